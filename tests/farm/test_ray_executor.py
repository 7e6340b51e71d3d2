"""Jobs on a real local Ray, with stand-in stages: losses become rows, devices recover or leave service."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from farm import standin
from farm.jobs import Built, Job, Row, Shop
from farm.scheduler import RETRIES
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.records import REASONS, Binary

actors = pytest.importorskip("farm.actors")
from ray.exceptions import OutOfMemoryError  # noqa: E402

from farm.nodes import DeviceWish  # noqa: E402
from farm.progress import waits_of  # noqa: E402
from farm.ray_executor import RayExecutor  # noqa: E402
from farm.session import start_session, stop_session  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    start_session("local", 2)
    yield
    stop_session()


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[RayExecutor]:
    made = RayExecutor(Shop(str(tmp_path), str(tmp_path), stages="farm.standin"), (DeviceWish("cpu", ("cpu-avx2",)),), 2)
    yield made
    made.close()


def job(number: int, words: str = "", target: str = "cpu-avx2", attempt_no: int = 1) -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, 4, 4, name=words)
    key = None if target.startswith("sm_") else digest_text("cpu")
    return Job(digest_text(f"{number}"), spec, target, f"program {number}", attempt_no=attempt_no, device_key=key)


def rows(futures: list[Future[Row]]) -> list[Row]:
    return [f.result(120) for f in futures]


def test_jobs_become_rows_built_and_proven_once(executor: RayExecutor, tmp_path: Path) -> None:
    ended = rows([executor.submit(job(i)) for i in range(12)])
    assert [row["reason_code"] for row in ended] == ["ok"] * 12
    assert all(row["ray_node_id"] for row in ended)
    assert {what: set(runs.values()) for what, runs in standin.counts(tmp_path).items()} == {
        "build": {1},
        "prove": {1},
        "done": {1},
    }


def test_a_dead_builder_costs_its_job_only(executor: RayExecutor) -> None:
    ended = rows([executor.submit(job(i, "die-build" if i == 2 else "")) for i in range(5)])
    assert [row["reason_code"] for row in ended] == ["ok", "ok", "lost_node", "ok", "ok"]
    assert "builder was lost" in ended[2]["message"]


def test_a_dead_device_actor_costs_the_running_job_only(executor: RayExecutor) -> None:
    ended = rows([executor.submit(job(i, "prove=0.2" + " die-prove" * (i == 1))) for i in range(5)])
    assert sorted(row["reason_code"] for row in ended) == ["lost_node", "ok", "ok", "ok", "ok"]
    assert ended[1]["reason_code"] == "lost_node"


def test_a_device_that_keeps_dying_leaves_service(executor: RayExecutor) -> None:
    ended = rows([executor.submit(job(i, "die-prove")) for i in range(5)])
    assert [row["reason_code"] for row in ended].count("lost_node") == 3
    assert [row["reason_code"] for row in ended].count("missing_device") == 2
    assert "3 deaths in a row" in executor.state()["devices"][0]["out_of_service"]


def test_a_target_without_a_device_is_built_only(executor: RayExecutor, tmp_path: Path) -> None:
    (row,) = rows([executor.submit(job(1, target="sm_80"))])
    assert row["reason_code"] == "compiled_unverified" and not standin.counts(tmp_path)["prove"]


def test_the_second_wall_ends_a_stuck_device(executor: RayExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    from farm import ray_executor

    rows([executor.submit(job(1))])  # the actor is up
    monkeypatch.setattr(ray_executor, "GRACE_S", -298.0)  # prove_wall_s is 300
    stuck, waiting = executor.submit(job(2, "prove=100")), executor.submit(job(3))
    assert stuck.result(30)["reason_code"] == "lost_node"
    monkeypatch.setattr(ray_executor, "GRACE_S", 60.0)
    assert waiting.result(60)["reason_code"] in ("ok", "lost_node")


def test_workers_are_not_niced(executor: RayExecutor) -> None:
    """A niced worker would be timed beside whatever else runs."""

    @actors.ray.remote
    def niceness() -> int:
        return os.nice(0)

    assert actors.ray.get(niceness.remote(), timeout=60) == os.nice(0)


def test_a_device_that_others_keep_busy_is_waited_for_and_loses_no_job(executor: RayExecutor, tmp_path: Path) -> None:
    futures = [executor.submit(job(1, "busy=3 prove=0.1"))]
    seen: set[str] = set()
    while not all(f.done() for f in futures):
        seen |= waits_of(executor.state())
        time.sleep(0.005)
    assert [row["reason_code"] for row in rows(futures)] == ["ok"]
    assert seen == {"process 1 measures on cpu"} and not waits_of(executor.state()), "it says who, and no longer than it waits"
    assert standin.counts(tmp_path)["prove"][job(1).key] == 4 and standin.counts(tmp_path)["build"][job(1).key] == 1


def test_a_builder_that_would_have_nothing_to_do_is_not_opened(executor: RayExecutor) -> None:
    rows([executor.submit(job(i, "prove=0.1")) for i in range(8)])
    assert executor._builders.num_open == 1
    rows([executor.submit(job(i, "build=0.8")) for i in range(8, 14)])
    assert executor._builders.num_open == 2


def test_memory_that_runs_out_is_no_crash_of_a_kernel_and_fewer_build_at_a_time(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public fault 43: elsewhere a worker that the memory monitor killed looked like any other crash."""
    real, killed = actors.ray.get, []

    def get(ref: object, timeout: float) -> object:
        found = real(ref, timeout=timeout)
        if isinstance(found, bytes) and isinstance(unpacked := actors.unpack(found), actors.Packed) and not killed:
            killed.append(unpacked.binary_hash)
            raise OutOfMemoryError("Task was killed due to the node running low on memory")
        return found

    monkeypatch.setattr(actors.ray, "get", get)
    ended = rows([executor.submit(job(i)) for i in range(4)])
    assert Counter(row["reason_code"] for row in ended) == {"compile_oom": 1, "ok": 3}
    assert executor._most_builders == 1 and REASONS["compile_oom"] == "transient" and RETRIES["compile_oom"]


def test_what_travels_is_small_and_what_is_in_hand_is_bounded(executor: RayExecutor) -> None:
    """Public fault 43: 2000 results of a megabyte in a store of 100."""
    binary = Binary("/cache/x.so", digest_text("x"), digest_text("y"), "cpu", "g++", (), 0.1)
    built = Built(job(1), Launch("standin", (), ()), binary, {"message": "x" * 1000})
    assert len(pickle.dumps(built)) < 8192, "the binary's bytes stay in their file"
    futures, most = [executor.submit(job(i, "prove=0.002")) for i in range(200)], 0
    while not all(f.done() for f in futures):
        state = executor.state()
        most = max(most, state["building"] + state["built"] + sum(d["in_hand"] for d in state["devices"]))
        time.sleep(0.002)
    assert 0 < most <= 10, "what waits, waits here and not in Ray's store"


def test_every_wait_for_ray_ends() -> None:
    """Public fault 39: an actor whose constructor fails makes an unlimited `get` wait for ever."""
    for file in Path(actors.__file__).parent.glob("*.py"):
        text = file.read_text()
        for call in re.findall(r"ray\.(?:get|wait)\([^\n]*", text):
            assert "timeout" in call, f"{file.name}: {call}"
        assert not re.search(r"max_restarts=(?!0)|max_task_retries=(?!0)", text), file.name


def test_a_job_taken_back_while_its_device_begins_it_is_looked_at_again_and_again() -> None:
    future: Future[Row] = Future()
    future.cancel()
    executor = SimpleNamespace(_lock=threading.Lock(), _futures={"key": future})
    slot = SimpleNamespace(tasks={"a call": SimpleNamespace(job=SimpleNamespace(key="key"))})
    for _ in range(3):
        RayExecutor._head_runs(executor, slot)  # type: ignore[arg-type]
    assert future.cancelled()
