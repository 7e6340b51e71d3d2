"""Sweeps that are killed: a valid catalog, no process left behind, and no attempt done again that had ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from farm_here import farm_here

from catalog import audit, store
from farm import standin

PLAN = """
name: faults
tuning: {{candidates: 2}}
models:
  - name: {name}
    num_heads: 1
    head_dim: 16
    seqlens: {lengths}
"""
#: What a sweep may take to be gone; twice as long where other tests have the machine.
TEN_S = 10.0
ATTEMPTS_EACH = 3  # two candidates, and the better one again


class Killed:
    """A sweep with stand-in kernels in a session of its own, as a terminal would start it."""

    def __init__(self, folder: Path, words: str, problems: int = 6) -> None:
        self.folder, self.total = folder, problems * ATTEMPTS_EACH
        folder.mkdir(exist_ok=True)
        (folder / "plan.yaml").write_text(PLAN.format(name=words, lengths=list(range(5, 5 + problems))))
        self.log = folder / "cache" / "standin.log"

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-m", "farm", "sweep", str(self.folder / "plan.yaml"), "--stages", "farm.standin", "--json", "--catalog", str(self.folder / "c")]  # noqa: E501  # fmt: skip

    def environment(self) -> dict[str, str]:
        return os.environ | {"FARM_CACHE": str(self.folder / "cache"), "FAULT_TEST": str(self.folder)}

    def start(self, argv: list[str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(argv or self.argv, env=self.environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: E501  # fmt: skip

    def finish(self) -> dict:
        """The next start, to its end, in this process."""
        done = farm_here(*self.argv[3:], "--executor", "local", FARM_CACHE=str(self.folder / "cache"), STANDIN_NO_CHILD="1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for_rows(self, count: int) -> None:
        until = time.monotonic() + 60
        while len(standin.counts(self.folder / "cache")["done"]) < count:
            assert time.monotonic() < until, "no rows"
            time.sleep(0.02)

    def left(self) -> list[int]:
        """Living processes that were started by this sweep, by their environment or an open file below its folders."""
        mark = f"FAULT_TEST={self.folder}".encode()
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and mark in (process / "environ").read_bytes():
                        found.append(int(process.name))
                except OSError:
                    continue
        return found


def said_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:200]}"
    return f"{pid}: gone"


def check_after_kill(sweep: Killed) -> None:
    """Everything that has to hold ten seconds after a kill, and after the start that follows."""
    until = time.monotonic() + 2 * TEN_S
    while sweep.left() and time.monotonic() < until:
        time.sleep(0.1)
    assert not [said_of(pid) for pid in sweep.left()], "processes outlive the sweep"
    before = store.open(sweep.folder / "c", damaged="raise").rows(["attempt_key", "reason_code"]).to_pylist()
    ended = {row["attempt_key"] for row in before if row["reason_code"] == "ok"}
    ran = standin.counts(sweep.folder / "cache")["done"]
    summary = sweep.finish()
    again = standin.counts(sweep.folder / "cache")["done"]
    assert summary["planned"] == sum(summary["by_reason"].values())
    assert summary["known"] == len(ended) and summary["known"] + summary["planned"] == sweep.total
    assert all(again[key] == ran[key] for key in ended), "an attempt that had ended was made again"
    rows = store.open(sweep.folder / "c").rows(["attempt_key", "reason_code"]).to_pylist()
    assert len(rows) == len({row["attempt_key"] for row in rows}) == sweep.total
    assert {row["reason_code"] for row in rows} == {"ok"}
    assert audit.verify(store.open(sweep.folder / "c"), artifacts=False).errors == ()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    sweep = Killed(tmp_path, "prove=0.15 child")
    running = sweep.start()
    sweep.wait_for_rows(4)
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # a terminal sends it to the whole group
    else:
        running.send_signal(number)
    stopped = time.monotonic()
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - stopped < 2 * TEN_S
    if number == signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
    else:
        assert running.returncode == 130, err
        assert "the same command goes on from there" in err and "Traceback" not in err
        summary = json.loads(out)
        assert summary["planned"] == sum(summary["by_reason"].values())
        assert summary["by_reason"]["not_run"] >= 1
    check_after_kill(sweep)


#: Python whose clocks are an hour off, in front of the farm's command line.
SKEWED = """
import datetime, sys, time
hour, real, now = {hours} * 3600, datetime.datetime, time.time
class Skewed(real):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(now() + hour, tz)
datetime.datetime, time.time = Skewed, lambda: now() + hour
from farm.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("hours", [1, -1], ids=["fast", "slow"])
def test_a_driver_whose_clock_is_an_hour_off(tmp_path: Path, hours: int) -> None:
    """The first start's clock is wrong and it is killed; the next one, with the right clock, goes on from it all the same."""
    sweep = Killed(tmp_path, "prove=0.05")
    argv = [sys.executable, "-c", SKEWED.format(hours=hours), *sweep.argv[3:], "--executor", "local"]
    running = subprocess.Popen(argv, env=sweep.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sweep.wait_for_rows(5)
    running.kill()
    running.wait()
    check_after_kill(sweep)
    rows = store.open(tmp_path / "c").rows(["run_id", "sequence"]).sort_by("sequence").to_pylist()
    assert len(dict.fromkeys(row["run_id"] for row in rows)) == 2
    assert [row["run_id"] for row in rows] == sorted((row["run_id"] for row in rows), reverse=hours > 0)


@pytest.mark.slow
def test_two_sweeps_on_one_catalog_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Different plans at a time on one catalog; each attempt that both ask for is one row that counts."""
    one, two = Killed(tmp_path / "1", "prove=0.05", 4), Killed(tmp_path / "2", "prove=0.05", 6)
    shared = str(tmp_path / "c")
    running = [s.start([*s.argv[:-1], shared, "--executor", "local"]) for s in (one, two)]
    summaries = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    opened = store.open(shared)
    assert all(s["planned"] == sum(s["by_reason"].values()) and s["planned"] + s["known"] >= 12 for s in summaries)
    assert opened.count({"reason_code": "ok"}) == opened.count() == two.total
    assert audit.verify(opened, artifacts=False).errors == ()


@pytest.mark.slow
def test_a_second_start_of_a_living_sweep_takes_over(tmp_path: Path) -> None:
    """The first one notices within seconds and says so; what it wrote before counts, and nothing that had ended is done again."""
    sweep = Killed(tmp_path, "prove=0.4", 10)
    first = sweep.start([*sweep.argv, "--executor", "local"])
    sweep.wait_for_rows(2)
    summary = sweep.finish()
    out, err = first.communicate(timeout=60)
    assert first.returncode == 3 and "superseded by a later start" in json.loads(out)["stop_reason"], err
    assert summary["known"] >= 2 and summary["planned"] == sum(summary["by_reason"].values())
    opened = store.open(tmp_path / "c")
    assert opened.count({"reason_code": "ok"}) == opened.count() == sweep.total
    assert audit.verify(opened, artifacts=False).errors == ()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(150))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Any signal, at any moment of a sweep, twice; starting Ray, stopping and sealing included."""
    chance = random.Random(seed)
    sweep = Killed(tmp_path, "prove=0.05 child")
    for _ in range(2):
        running = sweep.start()
        time.sleep(chance.uniform(0.2, 12))
        running.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
        running.communicate(timeout=30)
    if not (sweep.folder / "c" / "catalog.json").exists():
        return  # killed before there was anything
    check_after_kill(sweep)
