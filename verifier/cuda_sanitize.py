"""NVIDIA's compute-sanitizer over a cubin: a few inputs of its spec in a child that the tool watches. Compares no values.

On demand, since it makes kernels ten to a hundred times slower. `memcheck` finds accesses outside of tensors that are allocated
to the byte, `racecheck` hazards in shared memory, `synccheck` barriers that not all threads reach.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generator.binding import bind
from generator.canonical import to_plain
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.arena import POISON
from verifier.children import Limits, run_limited
from verifier.dtypes import DTYPES
from verifier.gpu import uuid_of
from verifier.input_layout import call_view, fill, slots_of
from verifier.inputs import Case
from verifier.own_folder import own_folder
from verifier.records import Binary, Failed, Witness
from verifier.trial import Trial, trials_for

#: Tool -> the reason of a row whose kernel it finds fault with.
TOOLS = {"memcheck": "out_of_bounds", "racecheck": "nondeterministic", "synccheck": "crash"}
#: Inputs that are run, and the scores of all of them together: the tool is slow.
MAX_INPUTS, MAX_SCORES = 6, 1 << 22
WALL_S = 120.0
#: The driver reserves terabytes of addresses.
NO_LIMIT_BYTES = 1 << 60
_FAULTY = 86  # the tool's exit status where it found something; the child's own are others
CURE = "install the CUDA toolkit (apt install cuda-sanitizer-13-0), or put compute-sanitizer on the path"
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


class NoSanitizer(ValueError):
    """There is no compute-sanitizer on this machine; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Clean:
    """What the tools said: one line for a row. ran: whether they could look at all; a tool that cannot says why."""

    words: str
    ran: bool


@functools.lru_cache(maxsize=1)
def find_sanitizer() -> str:
    """The tool's path. Raises NoSanitizer."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = (*((f"{home}/bin/compute-sanitizer",) if home else ()), *_PLACES)
    found = shutil.which("compute-sanitizer") or next((p for p in places if os.access(p, os.X_OK)), None)
    if found is None:
        raise NoSanitizer(f"compute-sanitizer was not found: {CURE}")
    return found


def sanitize(
    binary: Binary,
    launch: Launch,
    spec: AttentionSpec,
    device: str = "cuda:0",
    tools: Sequence[str] = ("memcheck", "racecheck"),
    seed: int | None = None,
    wall_s: float = WALL_S,
) -> Clean | Failed:
    """Run a kernel under each tool. A fault that one finds is a Failed. Raises NoSanitizer, NoDevice, SpecError.

    wall_s: for each tool; a kernel that takes longer under it has not been looked at, which is no fault.
    """
    from verifier.judge import read_binary

    program, data = find_sanitizer(), read_binary(binary)
    chosen = chosen_trials(trials_for(spec, seed).trials)
    said, ran = [], False
    with own_folder("sanitizer") as folder:
        _write_job(folder, data, launch, chosen)
        for tool in tools:
            outcome = _run_tool(program, tool, folder, device, wall_s)
            if isinstance(outcome, Failed):
                return outcome
            said.append(f"{tool}: {outcome.words}")
            ran = ran or outcome.ran
    return Clean(f"{'; '.join(said)} ({len(chosen)} inputs)", ran)


def chosen_trials(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The smallest inputs of each layout in turn, as many as the tool gets through; no tensors of terabytes."""
    by_layout: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=_scores):
        if trial.case.layout != "far" and 0 not in trial.case.shape:
            by_layout.setdefault(trial.case.layout, []).append(trial)
    queues, total = list(by_layout.values()), 0
    out: list[Trial] = []
    for rank in range(max(map(len, queues), default=0)):
        for queue in queues:
            if rank < len(queue) and len(out) < MAX_INPUTS and (not out or total + _scores(queue[rank]) <= MAX_SCORES):
                out.append(queue[rank])
                total += _scores(queue[rank])
    return tuple(out)


def _scores(trial: Trial) -> int:
    spec = trial.case.spec
    return spec.batch * spec.num_heads * spec.seqlen_q * spec.seqlen_k


def _write_job(folder: Path, cubin: bytes, launch: Launch, trials: Sequence[Trial]) -> None:
    """What `verifier.cuda_sanitize_child` reads: the cubin, the launch, and each call's tensors as files."""
    (folder / "kernel.cubin").write_bytes(cubin)
    calls = [write_call(folder, number, launch, trial.case, trial.values) for number, trial in enumerate(trials)]
    (folder / "job.json").write_text(json.dumps({"launch": to_plain(launch), "calls": calls}))


def write_call(folder: Path, number: int, launch: Launch, case: Case, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """One call's tensors as files, and what the child has to know of them."""
    binding = bind(launch, case.spec)
    slots = slots_of(case, binding)
    flat = {s.name: torch.full((s.storage * s.element_size // 2,), POISON, dtype=torch.int16) for s in slots}
    views = {s.name: flat[s.name].view(DTYPES[s.dtype]).as_strided(s.shape, s.strides, s.offset) for s in slots}
    fill(views, binding, values)
    tensors = []
    for slot, bound in zip(slots, binding.tensors, strict=True):
        file = f"{number}.{slot.name}.bin"
        (folder / file).write_bytes(flat[slot.name].numpy().tobytes())
        shape, strides = call_view(slot, bound.view, case.spec)
        offset = slot.offset * slot.element_size
        tensors.append({"file": file, "offset": offset, "shape": shape, "strides": strides})
    return {"name": case.name, "tensors": tensors, "scalars": [s.value for s in binding.scalars]}


def _run_tool(program: str, tool: str, folder: Path, device: str, wall_s: float) -> Clean | Failed:
    done = folder / "done"
    done.unlink(missing_ok=True)
    log = folder / f"{tool}.log"
    watched = [sys.executable, "-m", "verifier.cuda_sanitize_child", str(folder)]
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []  # bindings ask the driver for what it does not have
    command = [program, "--tool", tool, *quiet, "--error-exitcode", str(_FAULTY), "--log-file", str(log), *watched]
    here = str(Path(__file__).parents[1])
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": uuid_of(device), "PYTHONPATH": os.pathsep.join([here, *(p for p in sys.path if p)]),
        "TMPDIR": str(folder),
    }  # fmt: skip
    ended = run_limited(command, Limits(wall_s=wall_s, memory_bytes=NO_LIMIT_BYTES), env=env, cwd=str(folder))
    said = log.read_text(errors="replace") if log.exists() else ""
    if ended.how == "timeout":
        return Clean(f"not finished in {wall_s:g} s", ran=False)
    return outcome_of(tool, said, ended.log, done.read_text() if done.exists() else "")


_FAULTS = ("Invalid ", "Error: Race ", "Warning: Race ", "Race ", "Error: Potential ", "Barrier error", "Misaligned ")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazard)")


def outcome_of(tool: str, log: str, output: str, done: str) -> Clean | Failed:
    """log: the tool's own. output: the child's. done: what the child wrote when all calls had come back."""
    summary = _SUMMARY.search(log)
    found = int(summary["errors"] or summary["hazards"] or 0) if summary else 0
    first = _first_fault(log)
    if found and first:
        message = f"{tool}: {first} ({found} in all)"
        return Failed(TOOLS[tool], Witness(f"compute-sanitizer {tool}", message))
    if done and summary and not found:
        return Clean("clean", ran=True)
    why = first or _of_the_tool(log) or _last_line(output) or "it said nothing"
    return Clean(f"could not look: {why}", ran=False)


def _first_fault(log: str) -> str:
    """The first finding on kernels' code, with the place in it; "" for errors of the tool or of calls to the driver."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    for number, line in enumerate(lines):
        if line.startswith(_FAULTS):
            return " ".join(lines[number : number + 3])[:300]
    return ""


def _of_the_tool(log: str) -> str:
    """What it says of itself or of calls to the driver; "" for a log without such a line."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines()]
    return next((line[:200] for line in lines if line.startswith(("Error:", "Program hit", "Internal"))), "")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
