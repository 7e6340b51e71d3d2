"""What a kernel's warps wait for, as NVIDIA's profiler `ncu` counts it on one call. Judges nothing and times nothing.

For who wants a faster kernel: shares of the time between two instructions of a warp; how busy multiprocessors and memory were.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generator.canonical import to_plain
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.children import Limits, run_limited
from verifier.cuda_sanitize import NO_LIMIT_BYTES, write_call
from verifier.gpu import uuid_of
from verifier.input_values import make_values
from verifier.inputs import Case
from verifier.own_folder import own_folder
from verifier.records import Binary

WALL_S = 60.0
_STALL = re.compile(r"^smsp__average_warps?_(?:latency_)?issue_stalled_(?P<reason>\w+?)_per_issue_active(?:\.ratio)?$")
_BUSY = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
}
#: Reasons that are no waiting: the warp was ready.
_READY = ("selected",)


@dataclass(frozen=True, slots=True)
class Stalls:
    """waiting: reason -> share of the cycles between two instructions of a warp that it accounts for, largest first.

    busy: "multiprocessors" and "memory" -> share of what the device could do at most. why: what kept the profiler from looking.
    """

    waiting: tuple[tuple[str, float], ...] = ()
    busy: tuple[tuple[str, float], ...] = ()
    why: str = ""


@functools.lru_cache(maxsize=1)
def find_profiler() -> str | None:
    """The path of ncu on this machine."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    beside = f"{home}/bin/ncu"
    return shutil.which("ncu") or (beside if os.access(beside, os.X_OK) else None)


def stalls_of(binary: Binary, launch: Launch, spec: AttentionSpec, device: str, wall_s: float = WALL_S) -> Stalls | None:
    """One call of the spec's own size under ncu; None where there is no ncu. Raises NoDevice."""
    program = find_profiler()
    if program is None:
        return None
    with own_folder("stalls") as folder:
        case = Case("as asked", spec)
        (folder / "kernel.cubin").write_bytes(Path(binary.path).read_bytes())
        call = write_call(folder, 0, launch, case, make_values(case))
        (folder / "job.json").write_text(json.dumps({"launch": to_plain(launch), "calls": [call]}))
        sections = ["--section", "WarpStateStats", "--section", "SpeedOfLight"]
        watched = [sys.executable, "-m", "verifier.cuda_sanitize_child", str(folder)]
        command = [program, "--csv", "--page", "raw", *sections, "--kernel-name", launch.entry, "--launch-count", "1", *watched]
        here = str(Path(__file__).parents[1])
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": uuid_of(device), "PYTHONPATH": os.pathsep.join([here, *(p for p in sys.path if p)]),
            "TMPDIR": str(folder),
        }  # fmt: skip
        ended = run_limited(command, Limits(wall_s=wall_s, memory_bytes=NO_LIMIT_BYTES), env=env, cwd=str(folder))
    return Stalls(why=f"not finished in {wall_s:g} s") if ended.how == "timeout" else read_profile(ended.log)


def read_profile(output: str) -> Stalls:
    """The wide table that ncu prints: a line of names, a line of units, a line for the call."""
    waiting: dict[str, float] = {}
    busy: dict[str, float] = {}
    for name, value in _pairs(output):
        if match := _STALL.match(name):
            waiting[match["reason"]] = value
        elif name in _BUSY:
            busy[_BUSY[name]] = value / 100
    total = sum(waiting.values())
    if not total:
        complaint = next((line.strip() for line in output.splitlines() if "==ERROR==" in line), "it counted nothing")
        return Stalls(why=complaint.replace("==ERROR==", "").strip()[:200])
    shares = {reason: cycles / total for reason, cycles in waiting.items() if reason not in _READY}
    return Stalls(tuple(sorted(shares.items(), key=lambda pair: -pair[1])), tuple(busy.items()))


def _pairs(output: str) -> Iterator[tuple[str, float]]:
    table = [row for row in csv.reader(line for line in output.splitlines() if line.startswith('"')) if len(row) > 4]
    if len(table) < 3:
        return
    for name, value in zip(table[0], table[-1], strict=False):
        try:
            yield name, float(value.replace(",", ""))
        except ValueError:
            continue
