"""Strangers on a GPU while it is timed: the driver's list of processes before and after, ours and our children's left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from farm import neighbours, stages
from farm.jobs import Built, Job, Shop
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier import gpu
from verifier.records import Binary, Measurement, Passed, Timing

SPEC = AttentionSpec(2, 1, 64, 64, 1, 128, 128, "fp16")
NOBODY = 2**22 + 1  # no process has such an id


class Listing:
    """A driver's library that lists other processes each time it is asked; the last list stays."""

    NVMLError = RuntimeError

    def __init__(self, *lists: list[int]) -> None:
        self.lists = list(lists)
        self.asked = 0

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=1 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        self.asked += 1
        pids = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in pids]


@contextmanager
def stranger() -> Iterator[int]:
    """A process that neither is ours nor comes of us: its parent is gone."""
    code = (
        "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True).pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    try:
        yield pid
    finally:
        os.kill(pid, 9)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch):
    """Puts a listing in the driver's place."""

    def put(*lists: list[int]) -> Listing:
        fake = Listing(*lists)
        monkeypatch.setattr(gpu, "_ask", lambda question, device: question(fake, device))
        return fake

    return put


def test_only_those_that_are_not_of_us_are_strangers(listed) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        with stranger() as other:
            listed([os.getpid(), child.pid, other, NOBODY])
            assert neighbours.strangers_on("cuda:0") == {other: "sleep"}, "ids that cannot be seen here may be our children's"
            assert neighbours.strangers_on("cpu") == {}
    finally:
        child.kill()
        child.wait()


def proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The row of an attempt whose kernel is right and timed, on a GPU that is not there."""
    timing = Timing("ours", (1e-3,), 1e-3, 1e-3, 1e-3)
    measured = Measurement("test", timing, (), {}, "", 0.0, 0.0, 0.0, 1e-6, 1.0, 0, {"again_s": 0.0})
    monkeypatch.setattr(stages, "slot_of", lambda device: f"test-{os.getpid()}")
    monkeypatch.setattr(stages, "_judged", lambda *_: Passed("rule", (), ((1, 128, 128),), 1, 0.1))
    monkeypatch.setattr(stages, "_measured", lambda *_: measured)
    monkeypatch.setattr(stages.rows, "device_columns", lambda device: (("device_key", "d" * 64), ("device_name", "GPU")))
    (tmp_path / "x").write_bytes(b"x")
    binary = Binary(str(tmp_path / "x"), digest_text("x"), digest_text("y"), "sm_80", "nvrtc", (), 0.0)
    job = Job(digest_text("job"), SPEC, "sm_80", "program", device_key="d" * 64)
    columns = {"source_hash": "5" * 64, "binary_hash": "b" * 64, "launch": Launch("k", (), ()), "rule_id": "r"}
    return stages.prove(Built(job, Launch("k", (), ()), binary, columns), Shop(str(tmp_path), str(tmp_path)), "cuda:0")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stranger_before_or_after_makes_the_row_throttled_and_is_named(listed, tmp_path, monkeypatch, when: str) -> None:
    with stranger() as other:
        listing = listed(*([[other], []] if when == "before" else [[], [other]]))
        row = proved(tmp_path, monkeypatch)
    assert row["reason_code"] == "throttled" and row["p50_s"] is None and listing.asked == 2
    assert row["message"] == f"on the device while it was timed, and none of ours: sleep ({other})"


def test_nobody_else_is_no_trouble(listed, tmp_path, monkeypatch) -> None:
    listed([os.getpid()])
    assert proved(tmp_path, monkeypatch)["reason_code"] == "ok"
