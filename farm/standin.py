"""Stages without kernels, for tests of faults and measurements of scale: a candidate is a pause, or a fault on demand.

What a job does is written in its spec's name, as words: `build=0.05` and `prove=1` pause for seconds, `die-build` and `die-prove`
kill the worker, `reason=wrong_value` ends so, `busy=2` finds the device taken twice, `once` lets a fault happen on the first try
only, `child` leaves a process that sleeps, `bytes=1000` builds a binary of that size; `candidate=hang`, `crash` or `eat` run a
real child under the limits of a helper, which hangs, crashes or takes all memory. A file `crash-t4` in the shop's cache kills
that class's actors when they say what they are. Not a benchmark of kernels: its rows hold no real times.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from catalog.schema import make_row
from farm.devices import LocalDevice
from farm.jobs import Built, Job, Row, Shop
from farm.plan import Plan
from farm.quiet import StillBusy
from farm.rows import fetched_path
from farm.rules import CPU_FORMS
from farm.search import Attempt
from generator.canonical import digest_bytes, digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.children import Limits, run_limited
from verifier.records import Binary

VERSION = "standin-1"
#: Class of a device -> targets that its stand-in judges.
STANDIN_TARGETS: dict[str, tuple[str, ...]] = {
    "cpu": tuple(CPU_FORMS), "t4": ("sm_75",), "rtx8000": ("sm_75",), "a100": ("sm_80",),
    "h200": ("sm_90a",),
}  # fmt: skip


def build(job: Job, shop: Shop) -> Built | Row:
    _note(shop, "build", job)
    if job.trouble:
        return row_without_verdict(job, *job.trouble)
    _act("build", job)
    name, path = digest_text(job.program), ""
    if size := int(_words(job).get("bytes", 0)):
        data = (job.program.encode() + b"\n").ljust(size, b"*")
        name = digest_bytes(data)
        path = str(Path(shop.cache) / f"{name}.bin")
        fresh = Path(f"{path}.{os.getpid()}")  # builders of several kinds write the same file, and read it back
        fresh.write_bytes(data)
        fresh.replace(path)
    return Built(job, Launch("standin", (), ()), Binary(path, name, name, job.target, "none", (), 0.0), {})


def prove(built: Built, shop: Shop, device: str = "cpu") -> Row:
    _note(shop, "prove", built.job)
    words = _words(built.job)
    if "bytes" in words and not any(p.is_file() for p in _places(built, shop)):
        return row_without_verdict(built.job, "not_run", "the binary is nowhere")
    _act("prove", built.job)
    if "busy" in words and counts(shop.cache)["prove"][built.job.key] <= int(words["busy"]):
        raise StillBusy("process 1 measures on cpu")
    reason, message = _candidate(words["candidate"]) if "candidate" in words else (words.get("reason", "ok"), "")
    row = row_without_verdict(built.job, reason, message)
    _note(shop, "done", built.job)
    return row


def row_unproven(built: Built, reason: str, message: str) -> Row:
    return row_without_verdict(built.job, reason, message)


def row_without_verdict(job: Job, reason: str, message: str) -> Row:
    name = digest_text(job.program)
    served = {
        "device_key": job.device_key or digest_text("standin"), "source_hash": name, "binary_hash": name, "rule_id": VERSION,
        "launch": Launch("standin", (), ()), "verified_shapes": [(1, 1, 1)], "p50_s": 1e-3,
        "baseline_name": "none", "ratio_p50": 1.0,
    }  # fmt: skip
    return make_row(
        attempt_key=job.key, attempt_no=job.attempt_no, reason_code=reason, message=message, spec=job.spec, target=job.target,
        translator_version=VERSION, harness_version=VERSION, **job.columns, **(served if reason == "ok" else {}),
    )  # fmt: skip


def inspect_device(device: str, shop: Shop, expected_class: str = "") -> tuple[LocalDevice, tuple[str, ...]]:
    """A stand-in of the class that is asked for."""
    if (Path(shop.cache) / f"crash-{expected_class}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return standin_device(device, expected_class or "cpu"), ()


def standin_device(device: str, device_class: str) -> LocalDevice:
    targets = STANDIN_TARGETS.get(device_class, ())
    return LocalDevice(device, device_class, f"stand-in for {device_class}", digest_text(device_class), targets)


def devices() -> tuple[LocalDevice, ...]:
    return (standin_device("cpu", "cpu"),)


#: What a faulty candidate does -> its program. All of them end by the limits of `_candidate` at the latest.
CANDIDATES = {
    "hang": "import time; time.sleep(600)",
    "crash": "import os; os.abort()",
    "eat": "held = []\nwhile True: held.append(bytearray(1 << 26))",
}


def _candidate(what: str) -> tuple[str, str]:
    """Reason and message of a faulty candidate, in a child that is killed as compilers are."""
    limits = Limits(wall_s=1.0 if what == "hang" else 30.0, memory_bytes=512 << 20)
    ended = run_limited([sys.executable, "-c", CANDIDATES[what]], limits)
    return (
        ("timeout", f"{limits.wall_s:g} s are over")
        if ended.how == "timeout"
        else ("crash", f"exit code {ended.code}: {ended.log[-100:]}")
    )


def _places(built: Built, shop: Shop) -> tuple[Path, Path]:
    return Path(built.binary.path), fetched_path(shop.cache, built.binary.hash)


def _words(job: Job) -> dict[str, str]:
    return {k: v for k, _, v in (word.partition("=") for word in job.spec.name.split())}


def _act(stage: str, job: Job) -> None:
    words = _words(job)
    if "child" in words and "STANDIN_NO_CHILD" not in os.environ:
        null = subprocess.DEVNULL
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=null, stdout=null, stderr=null)
    time.sleep(float(words.get(stage, 0)))
    if f"die-{stage}" in words and not ("once" in words and job.attempt_no > 1):
        os.kill(os.getpid(), signal.SIGKILL)


def _note(shop: Shop, what: str, job: Job) -> None:
    """Appends to the log that tests count: a line is written whole or not at all."""
    os.write(_log(shop.cache), f"{what} {job.key} {job.attempt_no}\n".encode())


@functools.lru_cache(maxsize=8)
def _log(cache: str) -> int:
    """Open as long as its process lives: a stand-in costs a measurement of the farm's own work little."""
    return os.open(Path(cache) / "standin.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def counts(cache: str | Path) -> dict[str, Any]:
    """Stage -> key -> how often it ran."""
    found: dict[str, dict[str, int]] = {"build": {}, "prove": {}, "done": {}}
    path = Path(cache) / "standin.log"
    for line in path.read_text().splitlines() if path.exists() else ():
        what, key, _ = line.split()
        found[what][key] = found[what].get(key, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class StandinAuthor:
    """Programs without a meaning: as many for a problem as the plan wants candidates, all at a time."""

    plan: Plan
    shop: Shop

    width: ClassVar[int] = 0

    def line(self) -> str:
        return "a stand-in writes"

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        texts = [f"program {n} for {spec.hash} on {target}" for n in range(self.plan.tuning.candidates)]
        jobs = [Job(digest_text(text), spec, target, text) for text in texts]
        waiting = [asyncio.ensure_future(attempt(job)) for job in jobs]
        words = spec.name.split()
        if "die-author" in words and not ("once" in words and (Path(self.shop.cache) / "author-died").exists()):
            await waiting[0]
            (Path(self.shop.cache) / "author-died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.gather(*waiting)


@contextlib.asynccontextmanager
async def author_of(plan: Plan, shop: Shop, *_: Any) -> AsyncIterator[StandinAuthor]:
    """What `farm.authors.author_of` is to a real sweep."""
    yield StandinAuthor(plan, shop)


def versions() -> tuple[str, str]:
    return VERSION, VERSION
