"""Our CUDA prefill kernels against the libraries' on this machine's GPU, cell by cell against the bars. No full check of values.

    python benchmarks/gpu_prefill.py --out FOLDER [--rows sm_90a,sm_80,sm_75,variants] [--process 3] [--budget-s 470]

For each kind of call the author's tile sizes, then hints are searched by measured halving; the winner is compared with float64
on sampled rows, then timed against a rival, call by call in turn, on a card at work, in several processes. The median of the
processes counts. FOLDER gets `prefill.json` (every cell), `samples.json` (every single time) and `table.txt`.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gpu_cases as cases  # noqa: E402
from gpu_cases import Build, Rule, spec  # noqa: E402
from gpu_kernels import Kernel, compile_one, environment, log  # noqa: E402

from generator.authors.rules import RuleAuthor  # noqa: E402
from generator.spec import AttentionSpec  # noqa: E402
from generator.targets import TARGETS  # noqa: E402
from generator.translate.records import Translated  # noqa: E402
from generator.tuning import TUNED_HINTS, ordered_choices  # noqa: E402
from verifier.records import Binary  # noqa: E402

START = time.monotonic()
SHORT, LONG = 2048, 8192  # lengths of the search: cells take the winner of the nearer one
RMS_LIMIT = {"bf16": 6e-3, "fp16": 1.2e-3}
VARIANTS: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...]]] = {
    "window": ((Rule.make("window", left=1023),), ()),
    "softcap": (cases.CAUSAL, (Rule.make("softcap", cap=20.0),)),
    "alibi": (cases.CAUSAL, (Rule.make("alibi"),)),
    "document": ((Rule.make("document"),), ()),
    "prefix": ((Rule.make("prefix", length=1024),), ()),
}
#: Row -> (lowest ratio of every cell, lowest geometric mean): rival's time over ours.
BARS = {
    "sm_90a": (1.0, 1.15), "sm_80": (0.95, 1.05), "sm_75": (1.3, 1.3),
    "variants sm_90a": (1.8, 1.8), "variants sm_80": (1.2, 1.2),
}  # fmt: skip
RIVALS = {"sm_90a": "cudnn", "sm_80": "flash", "sm_75": "efficient"}
Built = tuple[str, Translated, Binary]
Job = tuple[tuple[str, AttentionSpec], bool]  # a kind of call, and whether it is long


@dataclass(frozen=True)
class Cell:
    """One line of the table: a call, on one target's instructions, against a rival whose ratio has a bar."""

    row: str
    target: str
    spec: AttentionSpec
    rival: str
    beside: tuple[str, ...] = ()  # other rivals that take their turns with it

    @property
    def kind(self) -> tuple[str, AttentionSpec]:
        """Target and what a kernel is made for; lengths, batch and heads apart."""
        return self.target, cases.sized(self.spec, 1, 4, 2, 256, 256)

    @property
    def name(self) -> str:
        s, rules = self.spec, [r.name for r in self.spec.masks + self.spec.scores]
        dims = f"d{s.head_dim}" + (f"/{s.head_dim_v}" if s.head_dim != s.head_dim_v else "")
        heads = f"{s.num_heads}/{s.num_kv_heads}"
        return f"{self.row} {s.dtype} {dims} {'+'.join(rules) or 'full'} {s.batch}x{heads}x{s.seqlen_q}"


def tokens(dtype: str, d: int, dv: int, masks: tuple[Rule, ...], seqlen: int, group: int = 1) -> AttentionSpec:
    """16,384 tokens of 2,048 = heads x head_dim_v."""
    heads = 2048 // dv
    return cases.sized(spec(dtype, d, dv, masks), 16384 // seqlen, heads, heads // group, seqlen, seqlen)


def cells(rows: Sequence[str]) -> list[Cell]:
    """All cells, the rows mixed; a row's first ones count most, so that a short run says something of each."""
    of_rows = [_cells_of(row) for row in rows]
    placed = [(i / len(own), cell) for own in of_rows for i, cell in enumerate(own)]
    return [cell for _, cell in sorted(placed, key=lambda x: x[0])]


def _cells_of(row: str) -> list[Cell]:
    if row == "variants":
        shaped = [cases.sized(spec("bf16", 128, 128, m, x), 4, 16, 16, 4096, 4096) for m, x in VARIANTS.values()]
        beside = {"sm_90a": (), "sm_80": ("flex-mma",)}
        return [Cell(f"variants {t}", t, s, "flex", b) for s in shaped for t, b in beside.items()]
    if row not in RIVALS:
        raise SystemExit(f"--rows: expected some of {', '.join([*RIVALS, 'variants'])}, found {row!r}")
    dims = [(128, 128), (64, 64), (192, 128), (256, 256)] if row == "sm_90a" else [(128, 128), (64, 64)]
    lengths = (8192, 2048, 16384, 4096) if row == "sm_90a" else (8192, 1024, 16384, 2048, 4096)
    out: list[Cell] = []
    for dtype in ("fp16",) if row == "sm_75" else ("bf16", "fp16"):
        for group in (1, 8) if row == "sm_90a" else (1,):
            for d, dv in dims:
                both = [(masks, n) for masks in ((), cases.CAUSAL) for n in lengths]
                out += [Cell(row, row, tokens(dtype, d, dv, masks, n, group), RIVALS[row]) for masks, n in both]
    return out


# ------------------------------------------------------------------------------------------------------------- kernels


def candidates(kind: tuple[str, AttentionSpec], count: int) -> list[Build]:
    target, s = kind
    choices = ordered_choices(RuleAuthor().code(s, target), TARGETS[target], {})
    return [Build(s, target, tuple(sorted(c.items()))) for c in choices[:count]]


def hinted(winners: Mapping[Job, Built], by_name: Mapping[str, Build], count: int) -> dict[Job, list[Build]]:
    """Winners of the search with one hint each, the first ones of those that a tuner would try."""
    out = {}
    for job, (name, *_) in winners.items():
        b = by_name[name]
        out[job] = [replace(b, hints=(*b.hints, hint)) for hint in TUNED_HINTS.get(b.target, ())[:count]]
    return out


def compile_every(builds: Sequence[Build]) -> dict[Build, Built]:
    out = {}
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 4) - 2), mp_context=mp.get_context("fork")) as pool:
        for b, row, translated, binary in pool.map(compile_one, builds):
            if translated is None or binary is None:
                log("  build", b.name, row["error"])
                continue
            if row.get("spill_bytes"):
                log("  build", b.name, "spills", row["spill_bytes"])
            out[b] = (b.name, translated, binary)
    return out


# ------------------------------------------------------------------------------------------------------------ children


def streamed(work: Callable[[Any], Any], items: Sequence[Any], limit_s: float, deadline: float) -> Iterator[tuple[Any, Any]]:
    """(item, result) of each item, worked on in turn by one forked child; another child goes on behind an item that ends one.

    Items that the time until `deadline` (monotonic seconds) does not reach are left out. A result that is a string is an error.
    """
    rest = list(items)
    while rest and time.monotonic() < deadline:
        here, there = mp.Pipe(False)
        child = mp.get_context("fork").Process(target=_serve, args=(there, work, rest, deadline))
        child.start()
        there.close()
        while rest:
            try:
                if not here.poll(limit_s):
                    raise EOFError
                state, answer = here.recv()
            except EOFError:
                if time.monotonic() < deadline:
                    yield rest[0], f"no answer: the process hung for {limit_s:g} s or died"
                rest = rest[1:]
                break
            if state == "late":
                rest = []
                break
            yield rest.pop(0), answer
            if state == "broken":
                break
        child.kill()
        child.join()


def _serve(there: Any, work: Callable[[Any], Any], items: Sequence[Any], deadline: float) -> None:
    """Sends (state, answer) for each item: "good"; "broken": the device is not to be trusted after it; "late": out of time."""
    for item in items:
        if time.monotonic() >= deadline:
            there.send(("late", None))
            break
        try:
            there.send(("good", work(item)))
        except Exception as error:  # noqa: BLE001 - a cell that fails is a result
            there.send(("broken", f"{type(error).__name__}: {str(error)[:300]}"))
            break
    there.close()
    os._exit(0)


# -------------------------------------------------------------------------------------------------------------- timing


def input_sets(torch: Any, s: AttentionSpec, count: int) -> list[dict[str, Any]]:
    out = []
    for seed in range(count):
        q, k, v, o = cases.random_qkv(torch, s, seed + 3)
        lse = torch.empty((s.batch, s.num_heads, s.seqlen_q), device="cuda")
        out.append({"q": q, "k": k, "v": v, "o": o, "lse": lse, **cases.captured(torch, s)})
    return out


def in_turns(torch: Any, calls: dict[str, list[Callable[[], Any]]], rounds: int, heat_s: float) -> dict[str, list[float]]:
    """Milliseconds of single calls, contestants taking turns, another input set each round.

    Before the timed rounds they take turns for `heat_s` seconds: a card in service runs at the clocks that its power limit
    leaves, not at those of the first milliseconds after a pause. Nothing waits between calls, so that no launch is timed.
    """

    def turns(count: int) -> dict[str, list[tuple[Any, Any]]]:
        events: dict[str, list[Any]] = {n: [] for n in calls}
        for i in range(count):
            for n, own in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                own[i % len(own)]()
                b.record()
                events[n].append((a, b))
        return events

    for own in calls.values():
        for call in own:
            call()
    first = turns(1)
    torch.cuda.synchronize()
    round_s = sum(a.elapsed_time(b) for pairs in first.values() for a, b in pairs) / 1e3
    turns(math.ceil(heat_s / max(round_s, 1e-5)))
    events = turns(rounds)
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


def halve(own: Sequence[Built], s: AttentionSpec, heat_s: float) -> list[tuple[str, float]]:
    """Names and milliseconds of the survivors, the fastest first: few rounds for all, then more for the faster half."""
    import torch

    sets, calls = input_sets(torch, s, 1), {}
    for name, translated, binary in own:
        calls[name] = [Kernel(translated, binary).prepared(s, x) for x in sets]
    rounds, ranking = 3 if len(own) > 4 else 8, []
    while True:
        times = in_turns(torch, calls, rounds, heat_s / 2)
        ranking = sorted(((n, statistics.median(t)) for n, t in times.items()), key=lambda x: x[1])
        if len(ranking) <= 2:
            return ranking
        calls = {n: calls[n] for n, _ in ranking[: math.ceil(len(ranking) / 2)]}
        rounds *= 2


def time_cell(cell: Cell, ours: Built, rounds: int, heat_s: float) -> dict[str, Any]:
    """Milliseconds of ours and the rival's calls, and the error of ours on sampled rows."""
    import torch

    s = cell.spec
    names = (cell.rival, *cell.beside)
    sets, rivals = opponents(torch, s, names)
    kernel = Kernel(ours[1], ours[2])
    calls: dict[str, list[Callable[[], Any]]] = {"ours": [kernel.prepared(s, x) for x in sets]}
    calls |= {n: [r.calls[n] for r in rivals] for n in names if all(n in r.calls for r in rivals)}
    times = in_turns(torch, calls, rounds, heat_s)
    return {"kernel": ours[0], "ms": times, "rms": sampled_error(torch, s, sets[0]), "unsupported": rivals[0].unsupported}


_LAST: dict[AttentionSpec, tuple[list[dict[str, Any]], list[cases.Rivals]]] = {}


def opponents(torch: Any, s: AttentionSpec, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[cases.Rivals]]:
    """Input sets and the rivals' calls on them; the cell before's where they are the same, since FlexAttention compiles."""
    flex = names[0] == "flex"
    if s not in _LAST:
        _LAST.clear()
        torch.cuda.empty_cache()
        if flex:  # each variant is a compilation; past a number of them on record the compiler would give up quietly
            torch._dynamo.reset()
        sets = input_sets(torch, s, 1 if flex else 2)
        _LAST[s] = sets, [cases.Rivals() for _ in sets]
    for x, rivals in zip(*_LAST[s], strict=True):
        found = cases.rivals(torch, s, x["q"], x["k"], x["v"], tuple(n for n in names if not _tried(rivals, n)))
        rivals.calls |= found.calls
        rivals.unsupported |= found.unsupported
    return _LAST[s]


def _tried(rivals: cases.Rivals, name: str) -> bool:
    return name in rivals.calls or name in rivals.unsupported


def sampled_error(torch: Any, s: AttentionSpec, tensors: dict[str, Any], rows: int = 96) -> float:
    """Relative rms error of O against float64 on rows of the first and the last head."""
    top = bottom = 0.0
    at = torch.linspace(0, s.seqlen_q - 1, rows, device="cuda").long()
    for b, h in ((0, 0), (s.batch - 1, s.num_heads - 1)):
        q, k, v = tensors["q"][b, h, at].double(), tensors["k"][b, h // s.group].double(), tensors["v"][b, h // s.group].double()
        x = q @ k.T * cases.scale_of(s)
        i, j = at[:, None], torch.arange(s.seqlen_k, device="cuda")[None, :]
        for rule in s.scores:
            x = _scored(torch, rule, x, tensors, h, i, j)
        for rule in s.masks:
            x = x.masked_fill(~_visible(rule, tensors, b, i, j), -torch.inf)
        expected = torch.softmax(x, -1) @ v
        top += float((tensors["o"][b, h, at].double() - expected).square().sum())
        bottom += float(expected.square().sum())
    return math.sqrt(top / bottom)


def _scored(torch: Any, rule: Rule, x: Any, tensors: dict[str, Any], h: int, i: Any, j: Any) -> Any:
    if rule.name == "softcap":
        cap = float(dict(rule.parameters)["cap"])
        return cap * torch.tanh(x / cap)
    if rule.name == "alibi":
        return x + tensors["Slopes"][h].double() * (j - i)
    raise ValueError(f"no reference for {rule.name}")


def _visible(rule: Rule, tensors: dict[str, Any], b: int, i: Any, j: Any) -> Any:
    options = dict(rule.parameters)
    match rule.name:
        case "causal":
            return j <= i
        case "window":
            return (j <= i) & (i - j <= int(options["left"]))
        case "prefix":
            return (j <= i) | (j < int(options["length"]))
        case "document":
            start, end = tensors["DocStart"][b].long(), tensors["DocEnd"][b].long()
            return (j >= start[i]) & (j < end[i])
    raise ValueError(f"no reference for {rule.name}")


# --------------------------------------------------------------------------------------------------------------- merge


def quantiles(ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ms)
    at = {"q10": 0.1, "median": 0.5, "q90": 0.9}
    return {k: round(ordered[min(len(ordered) - 1, int(p * len(ordered)))], 5) for k, p in at.items()}


def merged(cell: Cell, runs: Sequence[Any]) -> dict[str, Any]:
    """One cell over processes: times of each, the ratio of the median process, errors as they were."""
    s, good = cell.spec, [r for r in runs if isinstance(r, dict)]
    out: dict[str, Any] = {"cell": cell.name, "row": cell.row, "rival": cell.rival, "processes": len(good)}
    out["errors"] = [r for r in runs if isinstance(r, str)]
    if not good:
        return out
    work = cases.flops(s, cases.visible_pairs(s)) / 1e9
    out |= {"kernel": good[0]["kernel"], "rms": max(r["rms"] for r in good), "unsupported": good[0]["unsupported"]}
    out["right"] = out["rms"] <= RMS_LIMIT[s.dtype]
    for n in ("ours", cell.rival, *cell.beside):
        medians = [statistics.median(r["ms"][n]) for r in good if n in r["ms"]]
        if medians:
            out[n] = {"tflops": round(work / statistics.median(medians), 1), "ms": [quantiles(r["ms"][n]) for r in good]}
    out |= ratios(good, cell.rival)
    if beside := {n: found for n in cell.beside if (found := ratios(good, n))}:
        out["beside"] = beside
    return out


def ratios(runs: Sequence[dict[str, Any]], rival: str) -> dict[str, Any]:
    """A rival's time over ours, of each process and of the median one."""
    found = [statistics.median(r["ms"][rival]) / statistics.median(r["ms"]["ours"]) for r in runs if rival in r["ms"]]
    return {"ratio": round(statistics.median(found), 4), "ratios": [round(r, 4) for r in found]} if found else {}


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line per cell, then per row the worst cell and the geometric mean beside the bar."""
    lines = []
    for c in found:
        if "kernel" not in c:
            lines.append(f"{c['cell']:48s} {c['errors'][:1]}")
            continue
        of = {c["rival"]: c.get("ratio"), **{n: x["ratio"] for n, x in c.get("beside", {}).items()}}
        beside = [f"{n} {c[n]['tflops']:6.1f}  ratio {ratio:.3f}" for n, ratio in of.items() if ratio]
        tiles = c["kernel"].split("_BM")[-1]
        wrong = "" if c["right"] else f"  WRONG {c['rms']:.1e}"
        lines.append(f"{c['cell']:48s} ours {c['ours']['tflops']:6.1f}  {'  '.join(beside) or c['unsupported']}  {tiles}{wrong}")
    for row in dict.fromkeys(c["row"] for c in found):
        of_row = [c for c in found if c["row"] == row]
        lines.append(_verdict(row, BARS[row], [(c["ratio"], c["cell"]) for c in of_row if "ratio" in c], len(of_row)))
        for n in dict.fromkeys(n for c in of_row for n in c.get("beside", {})):
            others = [(c["beside"][n]["ratio"], c["cell"]) for c in of_row if n in c.get("beside", {})]
            lines.append(_verdict(f"{row}, {n}", BARS[row], others, len(of_row)))
    return lines


def _verdict(row: str, bars: tuple[float, float], ratios: Sequence[tuple[float, str]], cells: int) -> str:
    if not ratios:
        return f"== {row}: no cell"
    (worst, where), mean = min(ratios), math.exp(statistics.fmean(math.log(r) for r, _ in ratios))
    bar, mean_bar = bars
    verdict = "met" if worst >= bar and mean >= mean_bar else "MISSED"
    below, missing = sum(r < bar for r, _ in ratios), cells - len(ratios)
    return (
        f"== {row}: {verdict}; worst {worst:.3f} ({where}), {below} of {len(ratios)} below {bar}; "
        f"mean {mean:.3f} (bar {mean_bar})" + (f"; {missing} cells without a ratio" if missing else "")
    )


# ---------------------------------------------------------------------------------------------------------------- main


def searches(all_cells: Sequence[Cell]) -> dict[Job, AttentionSpec]:
    """What to search for, and the call that decides."""
    jobs: dict[Job, AttentionSpec] = {}
    for cell in all_cells:
        s, is_long = cell.spec, cell.spec.seqlen_q > SHORT
        at = s.seqlen_q if cell.rival == "flex" else LONG if is_long else SHORT
        jobs.setdefault((cell.kind, is_long), cases.sized(s, max(1, 16384 // at), s.num_heads, s.num_kv_heads, at, at))
    return jobs


def search(
    jobs: Mapping[Job, AttentionSpec], built: Mapping[Job, list[Built]], heat_s: float, deadline: float
) -> dict[Job, Built]:
    """The fastest kernel of each job; where a search failed, the first that was built."""
    winners = {job: built[job][0] for job in jobs if built.get(job)}
    for job, ranking in streamed(lambda job: halve(built[job], jobs[job], heat_s), list(winners), 30, deadline):
        if isinstance(ranking, str):
            log("  search", job, ranking)
            continue
        winners[job] = next(b for b in built[job] if b[0] == ranking[0][0])
    return winners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the files")
    parser.add_argument("--rows", default="sm_90a,sm_80,sm_75,variants", help="rows of the table")
    parser.add_argument("--cells", default="*", help="only cells whose name matches, e.g. '*bf16 d128*'")
    parser.add_argument("--process", type=int, default=3, help="processes; the median of them counts")
    parser.add_argument("--rounds", type=int, default=16, help="timed calls of each contestant in a cell")
    parser.add_argument("--heat-s", type=float, default=0.2, help="seconds of turns before the timed ones")
    parser.add_argument("--candidates", type=int, default=6, help="choices of tile sizes for each kind of call")
    parser.add_argument("--hints", type=int, default=2, help="hints tried with the best tile sizes of each kind of call")
    parser.add_argument("--budget-s", type=float, default=470)
    options = parser.parse_args()
    import torch  # noqa: F401 - before children fork; touches no device

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = environment() | {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": vars(options),
    }
    log(facts)
    chosen = [c for c in cells(options.rows.split(",")) if fnmatch.fnmatch(c.name, options.cells)]
    kinds = list(dict.fromkeys(c.kind for c in chosen))
    by_kind = {kind: candidates(kind, options.candidates) for kind in kinds}
    log(f"{len(chosen)} cells, {sum(map(len, by_kind.values()))} kernels")
    done = compile_every([b for builds in by_kind.values() for b in builds])
    built = {kind: [done[b] for b in builds if b in done] for kind, builds in by_kind.items()}
    log("searching")
    end = START + options.budget_s
    jobs = searches(chosen)
    winners = search(jobs, {job: built.get(job[0], []) for job in jobs}, options.heat_s, START + options.budget_s / 3)
    if options.hints:
        by_name = {b.name: b for builds in by_kind.values() for b in builds}
        tried = hinted(winners, by_name, options.hints)
        done = compile_every(list(dict.fromkeys(b for builds in tried.values() for b in builds)))
        against = {job: [winners[job], *(done[b] for b in builds if b in done)] for job, builds in tried.items()}
        winners |= search(jobs, against, options.heat_s, START + options.budget_s / 2)
    runs: dict[Cell, list[Any]] = {c: [] for c in chosen}

    def work(cell: Cell) -> Any:
        return time_cell(cell, winners[cell.kind, cell.spec.seqlen_q > SHORT], options.rounds, options.heat_s)

    for n in range(options.process):
        log(f"process {n + 1} of {options.process}")
        deadline = time.monotonic() + (end - time.monotonic()) / (options.process - n)
        ready = [c for c in chosen if (c.kind, c.spec.seqlen_q > SHORT) in winners]
        for cell, result in streamed(work, ready, 60, deadline):
            runs[cell].append(result)
            if isinstance(result, str):
                log("  ", cell.name, result)
        found = [merged(c, r) for c, r in runs.items() if r]
        (out / "prefill.json").write_text(json.dumps(facts | {"cells": found}, indent=1))
        (out / "samples.json").write_text(json.dumps({c.name: r for c, r in runs.items()}))
        (out / "table.txt").write_text("\n".join(table(found)) + "\n")
    log("done")
    print("\n" + "\n".join(table([merged(c, r) for c, r in runs.items() if r])), flush=True)


if __name__ == "__main__":
    main()
