"""One plan swept on all GPUs of this machine, then on one of them: how busy each was, whether the times agree. Judges nothing.

    python benchmarks/gpu_farm.py [--seqlens 2048] [--heads 16] [--candidates 2] [--measure-s 0.5] [--first N] [--limit-s 200]
        [--cache FOLDER] [--out result.json]
    python benchmarks/gpu_farm.py --compile --cache FOLDER        # only what the sweeps will ask for first; needs no GPU

Each sweep is the command `farm sweep` in a process, with a catalog of its own; both use one cache of binaries. A card is busy
while an attempt has it (`gpu_s` of a row: inputs made, verdict, measuring, measuring again), not while it waits for a binary, a
lock or an answer. The steady part goes from the moment when every card had begun to the moment when the first had no work left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import yaml  # noqa: E402

from catalog import store  # noqa: E402
from farm.jobs import device_seconds  # noqa: E402
from farm.plan_file import load_plan  # noqa: E402
from farm.search import order_choices  # noqa: E402
from generator.authors.rules import RuleAuthor  # noqa: E402
from generator.targets import find_target  # noqa: E402
from generator.tl.checker import parse_and_check  # noqa: E402
from generator.tl.printer import print_program  # noqa: E402
from generator.translate import translate  # noqa: E402
from generator.translate.records import Translated  # noqa: E402
from generator.tuning import ordered_choices, with_choice  # noqa: E402
from verifier.compile import compile_translated  # noqa: E402
from verifier.environment import environment  # noqa: E402
from verifier.gpu import driver_version, gpus_here  # noqa: E402

COLUMNS = (
    "attempt_key", "attempt_no", "spec_name", "tuning", "generation", "reason_code", "message", "uuid_hash", "device_name",
    "created_at", "p20_s", "p50_s", "p80_s", "baseline_name", "ratio_p50", "ratio_low", "ratio_high", "compile_s", "verify_s",
    "measure_s", "again_s", "gpu_s", "queue_s", "environment",
)  # fmt: skip
GRACE_S = 8.0  # for a sweep that was told to stop
LEAST_S = 20.0  # in which a sweep comes to anything


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Prefill problems enough to keep several devices busy."""
    specs = [
        {"name": f"{mask}-d{dim}-kv{kv}-{length}", "num_heads": args.heads, "num_kv_heads": kv, "head_dim": dim, "batch": 1,
         "seqlen_q": length, "seqlen_k": length, "dtype": args.dtype, "masks": masks}
        for length in args.seqlens
        for kv in (args.heads, args.heads // 4)
        for dim in (64, 128)
        for mask, masks in (("full", []), ("causal", ["causal"]))
    ]  # fmt: skip
    tuning = {"candidates": args.candidates, "measure_s": args.measure_s}
    return {"name": "gpu-farm", "targets": [args.target], "specs": specs, "tuning": tuning}


def compile_ahead(described: dict[str, Any], folder: Path, cache: Path) -> int:
    """Builds the first candidates of every problem, and two more for those that do not fit. Gives how many."""
    (folder / "plan.yaml").write_text(yaml.safe_dump(described))
    author, wanted = RuleAuthor(), described["tuning"]["candidates"] + 2

    def build(job: tuple[Any, str, Any]) -> None:
        code, target, choice = job
        program = parse_and_check(print_program(with_choice(code, choice)), filled=True).program
        translated = translate(program, find_target(target))
        if isinstance(translated, Translated):
            compile_translated(translated, cache)

    jobs = []
    for spec, target in load_plan(folder / "plan.yaml").problems():
        code = author.code(spec, target, author.sketch(spec, target))
        tiles = ordered_choices(code, find_target(target), {})
        jobs += [(code, target, choice) for choice in order_choices(tiles, tiles[0])[:wanted]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, jobs))
    return len(jobs)


def sweep(devices: str, described: dict[str, Any], folder: Path, cache: Path, limit_s: float) -> dict[str, Any]:
    """Runs the plan on the devices that CUDA_VISIBLE_DEVICES names, as far as it comes in the time: its end and its rows."""
    folder.mkdir()
    (folder / "plan.yaml").write_text(yaml.safe_dump(described))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "FARM_CACHE": str(cache)}
    command = [sys.executable, "-m", "farm", "sweep", str(folder / "plan.yaml"), "--catalog", str(folder / "catalog")]
    started, cut = time.time(), False
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*command, "--json", "--quiet"], env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            told = process.communicate(timeout=max(1.0, limit_s))[0]
        except subprocess.TimeoutExpired:
            cut = True
            process.send_signal(signal.SIGTERM)
            told = ended_or_killed(process)
    if process.returncode and not cut:
        sys.exit(f"farm sweep on devices {devices}: exit {process.returncode}\n{(folder / 'log').read_text()[-2000:]}")
    made = (folder / "catalog").exists()  # not before Ray is up
    rows = store.open(str(folder / "catalog")).rows(COLUMNS).to_pylist() if made else []
    rows = [row for row in rows if row["gpu_s"] or row["p50_s"]]
    summary = json.loads(told) if told.strip() else {}
    return {
        "devices": devices.count(",") + 1, "wall_s": round(time.time() - started, 1), "stopped_by_limit": cut,
        "by_reason": summary.get("by_reason"), **busy(rows, started), "spent_s": spent(rows), "rows": [plain(r) for r in rows],
    }  # fmt: skip


def ended_or_killed(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=GRACE_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # its guardian ends what it started
        return process.communicate()[0]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the result file: where its seconds went, nothing of the machine's folders."""
    known = row.pop("environment") or {}
    known = json.loads(known) if isinstance(known, str) else known
    phases = {"phases_s": known["phases_s"], "disturbed_before": known.get("disturbed_before")} if "phases_s" in known else {}
    return row | {"created_at": row["created_at"].timestamp(), "uuid_hash": (row["uuid_hash"] or "")[:8]} | phases


def busy(rows: Sequence[dict[str, Any]], started: float) -> dict[str, Any]:
    """The share of time that each card had an attempt, in the steady part and from the sweep's start to its last row."""
    worked: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        end = row["created_at"].timestamp()
        worked[(row["uuid_hash"] or "cpu")[:8]].append((end - (row["gpu_s"] or device_seconds(row)), end))
    if not worked:
        return {}
    first = max(min(start for start, _ in spans) for spans in worked.values())
    last = min(max(end for _, end in spans) for spans in worked.values())
    whole = max(end for spans in worked.values() for _, end in spans)
    return {
        "steady_s": round(last - first, 2),
        "busy": {card: round(_within(spans, first, last) / max(1e-9, last - first), 4) for card, spans in sorted(worked.items())},
        "busy_from_start": {card: round(_within(s, started, whole) / (whole - started), 4) for card, s in sorted(worked.items())},
        "until_first_attempt_s": round(first - started, 2),
        "attempts": {card: len(spans) for card, spans in sorted(worked.items())},
    }


def _within(spans: Sequence[tuple[float, float]], first: float, last: float) -> float:
    return sum(max(0.0, min(end, last) - max(start, first)) for start, end in spans)


def spent(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of an attempt by part."""
    parts = ("compile_s", "verify_s", "measure_s", "again_s", "gpu_s", "queue_s")
    return {part: round(statistics.fmean(row[part] or 0.0 for row in rows), 3) for part in parts} if rows else {}


def compare(one: Sequence[dict[str, Any]], every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the same attempts in both sweeps, all over one: on the same card, which shows how much a repetition differs, and
    on another; of how many the calls' spreads (20th to 80th) meet; and whether both chose the same kernel for each problem.
    """
    a, b = ({row["attempt_key"]: row for row in rows} for rows in (one, every))
    both = [(a[key], b[key]) for key in sorted(a.keys() & b.keys())]
    timed = [(x, y) for x, y in both if x["p50_s"] and y["p50_s"]]
    same = [(x, y) for x, y in timed if x["uuid_hash"] == y["uuid_hash"]]
    other = [(x, y) for x, y in timed if x["uuid_hash"] != y["uuid_hash"]]
    best_one, best_all = fastest(one), fastest(every)
    shared = sorted(best_one.keys() & best_all.keys())
    return {
        "in_both": len(both),
        "other_verdict": sum(x["reason_code"] != y["reason_code"] for x, y in both),
        "times_same_card": ratios([y["p50_s"] / x["p50_s"] for x, y in same]),
        "times_other_card": ratios([y["p50_s"] / x["p50_s"] for x, y in other]),
        "spreads_meet": sum(x["p20_s"] <= y["p80_s"] and y["p20_s"] <= x["p80_s"] for x, y in timed),
        "ratio_to_rival": ratios([y["ratio_p50"] / x["ratio_p50"] for x, y in timed if x["ratio_p50"] and y["ratio_p50"]]),
        "same_best": [name for name in shared if best_one[name]["tuning"] == best_all[name]["tuning"]],
        "other_best": [name for name in shared if best_one[name]["tuning"] != best_all[name]["tuning"]],
    }


def ratios(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {"attempts": len(values)} | {name: round(value, 4) for name, value in found.items()}


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["reason_code"] == "ok" and row["p50_s"] < best.get(row["spec_name"], {"p50_s": float("inf")})["p50_s"]:
            best[row["spec_name"]] = row
    return best


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90a", help="cpu: a trial without a GPU")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=2)
    parser.add_argument("--measure-s", type=float, default=0.5)
    parser.add_argument("--first", type=int, help="problems that one GPU is given, the first of the plan (default: all)")
    parser.add_argument("--limit-s", type=float, default=1e6, help="for all; what has ended by then is compared")
    parser.add_argument("--cache", type=Path, help="folder of binaries (default: a new one)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args, started = options(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="gpu-farm-"))
    cache, whole = args.cache or folder / "cache", plan(args)
    if args.compile:
        print(compile_ahead(whole, folder, cache), "binaries")
        return
    gpus = [name.removeprefix("cuda:") for name in gpus_here()]
    if not gpus and args.target != "cpu":
        sys.exit("gpu_farm: no GPU here; `farm doctor` says what is missing")
    gpus = gpus if args.target != "cpu" else [""]
    about = environment() | {"driver": driver_version() if args.target != "cpu" else None}
    result: dict[str, Any] = {"gpus": len(gpus), "plan": whole, "environment": about}
    part = whole | {"specs": whole["specs"][: args.first]}
    for name, devices, described in (("all", ",".join(gpus), whole), ("one", gpus[0], part)):
        left = args.limit_s - (time.monotonic() - started) - GRACE_S
        if left < LEAST_S:
            print(f"{name}: no time left for it")
            break
        result[name] = found = sweep(devices, described, folder / name, cache, left)
        told = {key: value for key, value in found.items() if key != "rows"}
        print(name, json.dumps(told), flush=True)
        if "one" in result:
            result["compared"] = compare(result["one"]["rows"], result["all"]["rows"])
            print(json.dumps(result["compared"], indent=1))
        if args.out:
            args.out.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
