"""Our CPU kernels beside torch: SDPA, SDPA with a mask, eager operations, compiled FlexAttention. Measures; judges no kernel.

Every case is measured in several processes; in each, the contestants take turns call by call on random data, with the same number
of threads, each call making its own output. Printed is the median of the processes; all samples are kept in results/.

    python benchmarks/cpu_prefill.py                            # fp32, every case
    python benchmarks/cpu_prefill.py --dtype fp32 bf16 --flex   # with compiled FlexAttention as a rival
    python benchmarks/cpu_prefill.py --places 4,5 8,9 12,13     # three processes at once, each on two cores of its own
    python benchmarks/cpu_prefill.py --case causal --quick      # one process, few calls
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cpu_rivals import CASES, Case, Inputs, rivals  # noqa: E402

from generator.authors.rules import RuleAuthor  # noqa: E402
from generator.binding import bind  # noqa: E402
from generator.targets import Target, find_target  # noqa: E402
from generator.tl.fill import fill  # noqa: E402
from generator.translate import translate  # noqa: E402
from generator.tuning import ordered_choices  # noqa: E402
from verifier.compile import compile_translated  # noqa: E402
from verifier.environment import cache_bytes, cpu_flags, environment  # noqa: E402
from verifier.launch import load_cpu  # noqa: E402
from verifier.records import Binary  # noqa: E402

CACHE = Path(tempfile.gettempdir()) / "farm-benchmark-kernels"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one process measures a case: calls of each contestant, and seconds after which it stops early.

    fewest: calls of each contestant even then.
    """

    calls: int
    fewest: int
    budget_s: float
    processes: int
    candidates: int


FULL, QUICK = Effort(25, 5, 6.0, 3, 6), Effort(5, 3, 3.0, 1, 3)


def our_call(case: Case, inputs: Inputs, holes: dict[str, int], target: Target) -> Callable[[], Any]:
    """A function that allocates the outputs, runs our kernel and returns O."""
    import torch

    program = fill(RuleAuthor().code(case.spec, target.name), holes)
    translated = translate(program, target)
    binary = compile_translated(translated, CACHE)
    assert isinstance(binary, Binary), binary.log
    kernel = load_cpu(Path(binary.path).read_bytes(), translated.launch, num_threads=torch.get_num_threads())
    binding = bind(translated.launch, case.spec)
    scalars = [binding.values[s.name] for s in translated.launch.scalars]
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}

    def run() -> Any:
        out = {
            t.role: torch.empty(t.shape, dtype=inputs.q.dtype if t.role == "o" else torch.float32)
            for t in binding.tensors
            if t.written
        }
        tensors = []
        for t in binding.tensors:
            whole = given.get(t.role, out.get(t.role, inputs.captured.get(t.name)))
            tensors.append(whole.view(t.parameter_shape(case.spec)) if t.view == "grouped" else whole)
        kernel.call(tensors, scalars)
        return out["o"]

    return run


def tune(case: Case, inputs: Inputs, target: Target, effort: Effort) -> dict[str, int]:
    """The holes of our kernel, filled by measuring: a few calls of every candidate in turn, the one with the fastest call."""
    import torch

    code = RuleAuthor().code(case.spec, target.name)
    choices = ordered_choices(code, target, cache_bytes())[: effort.candidates]
    if len(choices) == 1:
        return choices[0]
    with ThreadPoolExecutor(torch.get_num_threads()) as crew:  # compilers are processes of their own
        made = list(crew.map(lambda c: our_call(case, inputs, c, target), choices))
    times = take_turns({json.dumps(c): call for c, call in zip(choices, made, strict=True)}, replace(effort, calls=6))
    return json.loads(min(times, key=lambda name: min(times[name])))


def take_turns(functions: dict[str, Callable[[], Any]], effort: Effort) -> dict[str, list[float]]:
    """Seconds of every call, one call of each function after the other; the first of each is not counted."""
    for f in functions.values():
        f()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + effort.budget_s
    for turn in range(effort.calls):
        for name, f in functions.items():
            start = time.perf_counter()
            kept = f()  # noqa: F841 - an output lives until the next call, as in a model
            times[name].append(time.perf_counter() - start)
        if time.perf_counter() > end and turn + 1 >= effort.fewest:
            break
    return times


def child(case: Case, target: Target, effort: Effort, holes: dict[str, int] | None, flex: bool) -> dict[str, Any]:
    """One case in this process. Without `holes` it only chooses them."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        inputs = Inputs.random(case.spec)
        if holes is None:
            return {"holes": tune(case, inputs, target, effort)}
        ours = our_call(case, inputs, holes, target)
        contestants, unsupported = rivals(case, inputs, flex and is_variant(case))
        result = ours().float()
        error = {name: float((result - f().float()).abs().max()) for name, f in contestants.items()}
        times = take_turns({"ours": ours, **contestants}, effort)
    facts = {"threads": torch.get_num_threads(), "cores": sorted(os.sched_getaffinity(0))}
    return {"samples_s": times, "max_difference": error, "unsupported": unsupported, **facts}


def is_variant(case: Case) -> bool:
    """Where a mask or score rule is more than causal, compiled FlexAttention is a rival."""
    return bool(case.spec.scores) or any(rule.name != "causal" for rule in case.spec.masks)


def in_process(cases: Sequence[Case], holes: dict[str, dict[str, int]], place: str, args: argparse.Namespace) -> dict[str, Any]:
    """What `child` finds for each of some cases of one dtype, in one new process. holes: of each case; empty: to be chosen."""
    command = [sys.executable, __file__, "--dtype", cases[0].spec.dtype, "--children", *(c.name for c in cases)]
    command += ["--places", place, "--holes", json.dumps(holes), *(["--isa", args.isa] if args.isa else [])]
    command += [flag for flag, wanted in (("--quick", args.quick), ("--flex", args.flex)) if wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a measuring process ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def children(args: argparse.Namespace, target: Target, effort: Effort) -> dict[str, Any]:
    """The side of `in_process` that measures."""
    if args.places[0]:
        os.sched_setaffinity(0, {int(core) for core in args.places[0].split(",")})
    holes = json.loads(args.holes)
    cases = [c.with_dtype(args.dtype[0]) for c in CASES if c.name in args.children]
    return {c.name: child(c, target, effort, holes.get(c.name), args.flex) for c in cases}


def summary(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios (a rival's median over ours) of each process, and their median."""
    names = [n for n in runs[0]["samples_s"] if n != "ours"]
    middle = [{n: statistics.median(t) for n, t in run["samples_s"].items()} for run in runs]
    ratios = {n: [m[n] / m["ours"] for m in middle] for n in names}
    ours_s = statistics.median(m["ours"] for m in middle)
    return {
        "ratio": {n: statistics.median(r) for n, r in ratios.items()},
        "ratio_of_each_process": ratios,
        "ours_ms": ours_s * 1e3,
        "gflops": case.flop / ours_s * 1e-9,
        "gbytes_per_s": case.bytes_of_kv / ours_s * 1e-9,
    }


def line(case: Case, s: dict[str, Any], holes: dict[str, int]) -> str:
    rate = f"{s['gbytes_per_s']:6.1f} GB/s " if case.spec.phase == "decode" else f"{s['gflops']:6.0f} GFLOP/s"
    ratios = "  ".join(f"{n} {r:.2f}x" for n, r in s["ratio"].items())
    return f"{case.name:28} {s['ours_ms']:9.2f} ms {rate}  {','.join(f'{k}={v}' for k, v in holes.items()):16} {ratios}"


class Report:
    """The file of one dtype's run, written after each process, so that a stopped run keeps what it has."""

    def __init__(self, args: argparse.Namespace, dtype: str, target: Target, effort: Effort) -> None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.record: dict[str, Any] = {"date": date, "dtype": dtype, "isa": target.isa, "effort": asdict(effort)}
        self.record |= {"environment": environment(), "places": args.places, "cases": {}}
        self.file = args.out / f"cpu_prefill-{date.replace(':', '').replace('+0000', 'Z')}-{dtype}-{target.isa}.json"
        self.lock, self.processes = threading.Lock(), effort.processes

    def add(self, case: Case, holes: dict[str, int], run: dict[str, Any]) -> None:
        with self.lock:
            runs = [*self.record["cases"].get(case.name, {"processes": []})["processes"], run]
            found = {"spec": str(case.spec), "holes": holes, **summary(case, runs), "processes": runs}
            self.record["cases"][case.name] = found
            self.file.write_text(json.dumps(self.record, indent=1, sort_keys=True) + "\n")
            if len(runs) == self.processes:
                print(f"{case.spec.dtype} {line(case, found, holes)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), nargs="+", default=["fp32"])
    parser.add_argument("--case", default="", help="only cases whose name holds this text")
    parser.add_argument("--isa", default="", help="avx2, avx512 or amx; else the widest that this CPU has")
    parser.add_argument("--quick", action="store_true", help="one process and few calls: a look, not a measurement")
    parser.add_argument("--flex", action="store_true", help="compiled FlexAttention too, where masks are more than causal")
    parser.add_argument("--places", nargs="+", default=[""], help="cores of processes that run at once: 4,5 8,9")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--children", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--holes", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    effort = QUICK if args.quick else FULL
    target = find_target(f"cpu-{args.isa}") if args.isa else find_target("cpu", cpu_flags())
    if args.children:
        print(json.dumps(children(args, target, effort)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    reports = {dtype: Report(args, dtype, target, effort) for dtype in args.dtype}
    cases = [c.with_dtype(dtype) for dtype in args.dtype for c in CASES if args.case in c.name]
    groups = [[c for c in cases if (c.spec.dtype, is_variant(c)) == key] for key in product(args.dtype, (True, False))]
    groups = [group for group in groups if group]
    free: SimpleQueue[str] = SimpleQueue()
    for place in args.places:
        free.put(place)

    def run(group: list[Case], holes: dict[str, dict[str, int]]) -> dict[str, Any]:
        place = free.get()
        try:
            return in_process(group, holes, place, args)
        finally:
            free.put(place)

    def measure(group: list[Case], holes: dict[str, dict[str, int]]) -> None:
        for name, found in run(group, holes).items():
            case = next(c for c in group if c.name == name)
            reports[case.spec.dtype].add(case, holes[name], found)

    with ThreadPoolExecutor(len(args.places)) as crew:
        tuned = list(crew.map(lambda group: {name: found["holes"] for name, found in run(group, {}).items()}, groups))
        jobs = [(group, holes) for _ in range(effort.processes) for group, holes in zip(groups, tuned, strict=True)]
        list(crew.map(lambda job: measure(*job), jobs))
    print(*(f"every sample: {report.file}" for report in reports.values()), sep="\n")


if __name__ == "__main__":
    main()
