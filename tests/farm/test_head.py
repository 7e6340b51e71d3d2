"""Ray's head dies alone, its driver and its nodes living on: the sweep ends in bounded time, the next start goes on from it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from farm_here import farm_here

from catalog import audit, store
from farm import standin
from farm.console import EXIT_BROKEN_OFF
from farm.head import HeadWatch

pytest.importorskip("farm.actors")
PLAN = """
name: headless
targets: [cpu-avx2]
dtypes: [fp32]
tuning: {candidates: 1}
models: [{name: prove=0.2, num_heads: 1, head_dim: 16, seqlens: [%s]}]
"""
PROBLEMS = 40
HEAD_S = 2.0
ACTORS = ("ray::Device", "ray::Builder", "ray::AuthorActor")


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_a_head_that_is_silent_for_too_long_is_lost_and_one_that_comes_back_is_not() -> None:
    said: list[str] = []
    server = listening()
    port = server.getsockname()[1]
    watch = HeadWatch(f"127.0.0.1:{port}", 0.6, said.append)
    time.sleep(0.5)
    server.close()
    time.sleep(0.3)  # half of its patience
    server = listening(port)
    time.sleep(0.7)
    assert not said
    server.close()
    until = time.monotonic() + 10
    while not said and time.monotonic() < until:
        time.sleep(0.05)
    assert len(said) == 1 and said[0].startswith(f"Ray's head at 127.0.0.1:{port} was lost: no connection for ")
    assert said[0].endswith(" s (connection refused)")
    watch.close()


def test_a_watch_that_is_closed_says_nothing() -> None:
    said: list[str] = []
    HeadWatch("127.0.0.1:1", 0.3, said.append).close()
    time.sleep(0.6)
    assert not said


class Headless:
    """The cluster of `headless_cluster`: a head for builders, and a node whose processor is the device."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("headless_cluster.py"))
        self._process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._answer("at ")

    def _answer(self, start: str) -> str:
        """The rest of its next line that begins so: Ray may say things of its own before."""
        assert self._process.stdout
        return next(line.removeprefix(start).strip() for line in self._process.stdout if line.startswith(start))

    def kill_head(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("kill the head\n")
        self._process.stdin.flush()
        self._answer("killed")

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Headless]:
    """The stand-ins' log lies below this test's folder."""
    monkeypatch.setenv("FARM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FARM_HEAD_S", f"{HEAD_S:g}")
    made = Headless()
    yield made
    made.close()


def actors() -> set[str]:
    """Those of this test's cluster that live."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (told := " ".join(process.cmdline())).startswith(ACTORS):
                found.add(f"{process.pid}: {told}")
    return found


@pytest.mark.slow
def test_a_head_that_dies_ends_the_sweep_and_the_next_start_goes_on(
    cluster: Headless, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN % ", ".join(str(n) for n in range(5, 5 + PROBLEMS)))
    told = ["sweep", str(tmp_path / "plan.yaml"), "--stages", "farm.standin", "--json", "--catalog", str(tmp_path / "c")]
    before = actors()  # of an earlier test's cluster, on their way out
    running = subprocess.Popen(
        [sys.executable, "-m", "farm", *told, "--address", cluster.address],
        env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while len(standin.counts(tmp_path / "cache")["done"]) < 5:
        assert time.monotonic() < until and running.poll() is None, running.communicate()
        time.sleep(0.02)
    assert len(actors() - before) == 3
    cluster.kill_head()
    lost = time.monotonic()
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - lost < HEAD_S + 17, err
    assert running.returncode == EXIT_BROKEN_OFF, err
    said = [line for line in err.splitlines() if line.startswith("Ray's head at ")]
    assert len(said) == 1 and said[0].endswith("what has ended is in the catalog, and the same command goes on from there")
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary["stop_reason"].startswith("Ray's head at ") and summary["by_reason"]["not_run"] >= 1
    assert summary["planned"] == sum(summary["by_reason"].values())
    gone(before)
    monkeypatch.setattr(standin, "_act", lambda *_: None)  # without its pauses
    resumed(told, tmp_path)


def gone(before: set[str]) -> None:
    """Ten seconds after its driver; twice as long where other tests have the machine."""
    until = time.monotonic() + 20
    while (left := actors() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, "processes outlive the sweep"


def resumed(told: list[str], folder: Path) -> None:
    """The second start, without a cluster: every problem has ended then, and no attempt that had was made again."""
    rows = store.open(folder / "c", damaged="raise").rows(["attempt_key", "reason_code"]).to_pylist()
    ended = {row["attempt_key"] for row in rows if row["reason_code"] == "ok"}
    ran = standin.counts(folder / "cache")["done"]
    done = farm_here(*told, "--executor", "local", "-q", FARM_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    again = standin.counts(folder / "cache")["done"]
    assert json.loads(done.stdout)["known"] == len(ended) >= 4
    assert all(again[key] == ran[key] for key in ended), "an attempt that had ended was made again"
    opened = store.open(folder / "c")
    assert set(opened.rows(["reason_code"])["reason_code"].to_pylist()) == {"ok"}
    assert opened.count() == len(again) >= PROBLEMS
    assert audit.verify(opened, artifacts=False).errors == ()
