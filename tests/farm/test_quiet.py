"""The lock between workers and measurements: intervals that must not overlap, do not; nobody waits for ever; death lets go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from farm import quiet
kind, log, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
done = 0
while done < rounds or not rounds:
    last = os.path.exists(log + ".stop")
    with getattr(quiet, kind)():
        start = time.monotonic(); time.sleep(0.02); end = time.monotonic()
    with open(log, "a") as f:
        f.write(f"{kind} {start} {end}\\n")
    done += 1
    if last:
        break
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_LOCKS", str(tmp_path))


def start(kind: str, log: Path, rounds: int) -> subprocess.Popen[bytes]:
    """rounds: 0 for as many as there is time for, until a file says to stop, and one more."""
    return subprocess.Popen([sys.executable, "-c", SCRIPT, kind, str(log), str(rounds)])


def test_measurements_are_alone_and_are_not_starved(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    workers = [start("working", log, 0) for _ in range(3)]
    meters = [start("measuring", log, 6) for _ in range(2)]
    assert all(p.wait(120) == 0 for p in meters), "the gate let measuring in although compiling never ended"
    (tmp_path / "log.stop").touch()
    assert all(p.wait(60) == 0 for p in workers)
    spans = [(k, float(a), float(b)) for k, a, b in (line.split() for line in log.read_text().splitlines())]
    measured = [s for s in spans if s[0] == "measuring"]
    assert len(measured) == 12
    for _, a, b in measured:
        assert sum(x < b and y > a for _, x, y in spans) == 1, "something ran beside a measurement"
    compiled = [s for s in spans if s[0] == "working"]
    assert any(x < b and y > a for i, (_, a, b) in enumerate(compiled) for _, x, y in compiled[:i]), "workers run side by side"


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    from farm import quiet

    holder = subprocess.Popen([sys.executable, "-c", "import time; from farm import quiet\nwith quiet.measuring():\n print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)  # noqa: E501  # fmt: skip
    assert holder.stdout and holder.stdout.readline()
    holder.kill()
    holder.wait()
    started = time.monotonic()
    with quiet.measuring():
        assert time.monotonic() - started < 30


def test_who_waits_for_too_long_is_told_for_whom() -> None:
    from farm import quiet

    with quiet.measuring():
        for kind in (quiet.measuring, quiet.working):
            with pytest.raises(quiet.StillBusy, match=f"process {os.getpid()} measures on cpu"), kind("cpu", patience_s=0.05):
                pass
    with quiet.working(), pytest.raises(quiet.StillBusy, match="compile or judge on cpu"), quiet.measuring("cpu", 0.05):
        pass
    with quiet.measuring("cpu", 0.05):
        pass
