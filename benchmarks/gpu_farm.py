"""One plan swept on one GPU of this machine, then on all of them: how busy each was, whether the times agree. Judges nothing.

    python benchmarks/gpu_farm.py [--seqlens 2048 4096] [--heads 16] [--candidates 4] [--measure-s 1.0] [--first N]
        [--out result.json]

Each sweep is the command `farm sweep` in a process, with a catalog and a cache of its own. What it says of itself meanwhile (as
to `farm status`) is read twice a second; a device's busy share is taken from the first moment that all had work to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from catalog import store
from verifier.gpu import gpus_here

COLUMNS = ("attempt_key", "spec_name", "tuning", "reason_code", "p20_s", "p50_s", "p80_s")


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Prefill problems enough to keep several devices busy."""
    specs = [
        {"name": f"{mask}-d{dim}-{length}", "num_heads": args.heads, "num_kv_heads": kv, "head_dim": dim, "batch": 1,
         "seqlen_q": length, "seqlen_k": length, "dtype": "bf16", "masks": masks}
        for length in args.seqlens
        for dim in (64, 128)
        for kv in (args.heads, args.heads // 4)
        for mask, masks in (("full", []), ("causal", ["causal"]))
    ]  # fmt: skip
    tuning = {"candidates": args.candidates, "measure_s": args.measure_s}
    return {"name": "gpu-farm", "targets": ["sm_90a"], "specs": specs, "tuning": tuning}


def sweep(devices: str, described: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the plan on the devices that CUDA_VISIBLE_DEVICES names; what it said meanwhile and at its end."""
    folder.mkdir()
    (folder / "plan.yaml").write_text(yaml.safe_dump(described))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "FARM_CACHE": str(folder / "cache")}
    command = [
        sys.executable,
        "-m",
        "farm",
        "sweep",
        str(folder / "plan.yaml"),
        "--catalog",
        str(folder / "catalog"),
        "--json",
        "--quiet",
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        samples = list(_samples(process, folder / "cache" / "runs"))
        told = process.communicate()[0]
    if process.returncode:
        sys.exit(f"farm sweep on devices {devices}: exit {process.returncode}\n{(folder / 'log').read_text()[-2000:]}")
    return {"summary": json.loads(told), "busy": busy_shares(samples), "catalog": str(folder / "catalog")}


def _samples(process: subprocess.Popen[str], runs: Path) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """(written at, devices) each time that the sweep rewrote its status file."""
    last = 0.0
    while process.poll() is None:
        time.sleep(0.5)
        for path in runs.glob("*.json"):
            said = json.loads(path.read_text())
            if said["written_at"] > last:
                last = said["written_at"]
                yield last, [d | {"for_s": last - said["started_at"]} for d in said["machine"].get("devices", [])]


def busy_shares(samples: list[tuple[float, list[dict[str, Any]]]]) -> dict[str, float]:
    """Of each GPU: seconds busy over seconds passed, between the first and the last moment that all had something in hand."""
    at_work = [
        (at, gpus)
        for at, found in samples
        if (gpus := [d for d in found if d["device"] != "cpu"]) and all(d["in_hand"] for d in gpus)
    ]
    if len(at_work) < 2:
        return {}
    (start, first), (end, last) = at_work[0], at_work[-1]
    before = {d["device"]: d["busy_s"] for d in first}
    return {d["device"]: round((d["busy_s"] - before[d["device"]]) / (end - start), 3) for d in last}


def compare(one: str, all_of_them: str) -> dict[str, Any]:
    """Times of the same attempts in both catalogs: the ratio of medians, and whether the spreads (20th to 80th) meet."""
    a, b = ({row["attempt_key"]: row for row in store.open(uri).rows(COLUMNS).to_pylist()} for uri in (one, all_of_them))
    both = [(a[key], b[key]) for key in sorted(a.keys() & b.keys()) if a[key]["p50_s"] and b[key]["p50_s"]]
    ratios = [y["p50_s"] / x["p50_s"] for x, y in both]
    apart = [f"{x['spec_name']} {x['tuning']}" for x, y in both if x["p20_s"] > y["p80_s"] or y["p20_s"] > x["p80_s"]]
    verdicts = sum(a[key]["reason_code"] != b[key]["reason_code"] for key in a.keys() & b.keys())
    return {
        "attempts": [len(a), len(b)], "in_both": len(a.keys() & b.keys()), "timed_in_both": len(both), "other_verdict": verdicts,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)} if ratios else None,
        "spreads_apart": apart,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--measure-s", type=float, default=1.0)
    parser.add_argument("--first", type=int, help="problems that one GPU is given, the first of the plan (default: all)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpus = [name.removeprefix("cuda:") for name in gpus_here()]
    if not gpus:
        sys.exit("gpu_farm: no GPU here; `farm doctor` says what is missing")
    folder = Path(tempfile.mkdtemp(prefix="gpu-farm-"))
    runs, whole = {}, plan(args)
    part = whole | {"specs": whole["specs"][: args.first]}
    for name, devices, described in (("all", ",".join(gpus), whole), ("one", gpus[0], part)):
        runs[name] = sweep(devices, described, folder / name)
        print(
            f"{name}: {runs[name]['summary']['by_reason']}, {runs[name]['summary']['wall_s']:.0f} s, busy {runs[name]['busy']}",
            flush=True,
        )
    result = {"gpus": len(gpus), **runs, "compared": compare(runs["one"]["catalog"], runs["all"]["catalog"])}
    print(json.dumps(result["compared"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
