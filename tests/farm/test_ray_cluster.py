"""Several nodes on Ray's own test cluster, their devices stand-ins: every class works, nodes come and go, rows add up."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farm import standin
from farm.jobs import Job, Row, Shop
from farm.places import Place
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Search, Sweep
from generator.canonical import digest_text
from generator.spec import AttentionSpec

actors = pytest.importorskip("farm.actors")
from ray.cluster_utils import Cluster  # noqa: E402

from farm.preflight import preflight  # noqa: E402
from farm.ray_executor import RayExecutor  # noqa: E402
from farm.session import start_session, stop_session  # noqa: E402

pytestmark = pytest.mark.slow
TARGETS = ("sm_75", "sm_80")


class Rows(list[Row]):
    def append(self, row: Row) -> str:  # type: ignore[override]
        super().append(row)
        return str(len(self))

    def get(self, key: str) -> Row | None:
        return next((row for row in reversed(self) if row["attempt_key"] == key), None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without devices, one A100, one RTX 8000 and one T4 node. The last tests change it."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"class_head": 1}})
    for name in ("a100", "rtx8000", "t4"):
        made.add_node(num_cpus=1, num_gpus=1, resources={f"class_{name}": 1})
    made.wait_for_nodes()
    start_session(made.address, 0)
    yield made
    stop_session()
    made.shutdown()


@pytest.fixture
def executor(cluster: Cluster, tmp_path: Path) -> Iterator[RayExecutor]:
    made = RayExecutor(Shop(str(tmp_path), str(tmp_path), stages="farm.standin"), targets=TARGETS, patience_s=2.0)
    yield made
    made.close()


def settled(executor: RayExecutor) -> tuple[Place, ...]:
    """Its places, after every device has said what it is."""
    until = time.monotonic() + 60
    while not executor.settled and time.monotonic() < until:
        time.sleep(0.05)
    return executor.places(TARGETS)


def searches(places: tuple[Place, ...], count: int, words: str) -> Iterator[Search]:
    def one(job: Job) -> Search:
        async def search(attempt: Any) -> None:
            await attempt(job)

        return search

    for number in range(count):
        for place in places:
            spec = AttentionSpec(1, 1, 8, 8, 1, 1 + number, 4, name=words)
            yield one(place.put(Job(digest_text(f"{number} {place.target}"), spec, place.target, f"program {number}")))


def run(executor: RayExecutor, rows: Rows, wanted: Iterator[Search], meanwhile: Any = None) -> Sweep:
    sweep = Sweep(executor, rows, rows, PlainDisplay(Tally(), lambda line: None), interrupted_row=standin.row_without_verdict)

    async def both() -> None:
        running = asyncio.ensure_future(sweep.run(wanted))
        if meanwhile is not None:
            await meanwhile(rows)
        await asyncio.wait_for(running, 120)

    asyncio.run(both())
    assert sweep.counts.balanced and len(rows) == sweep.counts.planned
    return sweep


def test_each_kind_of_device_solves_the_plan_for_itself(executor: RayExecutor) -> None:
    places = settled(executor)
    assert {(p.target, p.device_class) for p in places} == {("sm_75", "t4"), ("sm_75", "rtx8000"), ("sm_80", "a100")}
    rows = Rows()
    run(executor, rows, searches(places, 6, "prove=0.05"))
    assert Counter(row["device_key"] for row in rows) == {p.device_key: 6 for p in places}
    assert len({row["ray_node_id"] for row in rows}) == 3, "each on its own node"


def test_a_node_that_is_not_what_it_says_does_not_serve(cluster: Cluster, tmp_path: Path) -> None:
    """The real stages on a node that claims an A100 and has none."""
    made = RayExecutor(Shop(str(tmp_path), str(tmp_path)), targets=("sm_80",))
    try:
        until = time.monotonic() + 60
        while not any(d["out_of_service"] for d in made.state()["devices"]) and time.monotonic() < until:
            time.sleep(0.2)
        assert [p.device_key for p in made.places(("sm_80",))] == [None]
    finally:
        made.close()


def test_a_worker_with_another_version_of_the_code_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    shop = Shop(str(tmp_path), str(tmp_path), stages="farm.standin")
    actor = actors.Device.options(num_cpus=0).remote("cpu", "cpu", shop)
    hello = actors.ray.get(actor.hello.remote(actors.versions() | {"translator": "another"}), timeout=60)
    assert len(hello.problems) == 1 and "translator is" in hello.problems[0] and os.getpid() != hello.pid


def test_preflight_tells_versions_of_every_node_and_what_none_can_meet(cluster: Cluster) -> None:
    started = time.monotonic()
    found = preflight((*TARGETS, "sm_90a"))
    assert time.monotonic() - started < 60
    assert sorted(c for node in found.nodes for c in node.classes) == ["a100", "head", "rtx8000", "t4"]
    assert all(
        {"python", "ray", "torch", "kernel-farm", "CUDA compiler", "translator"} <= node.versions.keys() for node in found.nodes
    )
    assert list(found.unmet) == ["sm_90a"] and "class_h100 or class_h200" in found.unmet["sm_90a"] and not found.ready
    assert found.builder_cpus == 2, "one CPU of each GPU node is its device's"
    assert preflight(TARGETS).ready
    assert any("1 x a100" in line and "torch" in line for line in found.lines())


def test_another_version_on_a_node_is_told_before_anything_starts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    real = actors.versions()
    monkeypatch.setattr(actors, "versions", lambda: real | {"harness": "another"})
    found = preflight(TARGETS)
    assert all("harness is" in node.refused[0] for node in found.nodes) and set(found.unmet) == set(TARGETS)


def test_a_target_without_a_device_is_rows_that_say_so(cluster: Cluster, tmp_path: Path) -> None:
    """What --allow-missing does."""
    shop = Shop(str(tmp_path), str(tmp_path), stages="farm.standin")
    made = RayExecutor(shop, targets=("sm_90a",), unmet=preflight(("sm_90a",)).unmet)
    try:
        rows = Rows()
        run(made, rows, searches(made.places(("sm_90a",)), 2, ""))
    finally:
        made.close()
    assert {row["reason_code"] for row in rows} == {"missing_device"}
    assert all("no node of the cluster has the resource class_h100" in row["message"] for row in rows)


def test_a_cluster_without_a_processor_for_builders_is_not_waited_for_without_end(
    cluster: Cluster, executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(executor)
    assert not executor.state()["broken"]
    monkeypatch.setattr("farm.ray_executor.builder_rooms", lambda nodes, wishes: {})
    until = time.monotonic() + 30
    while not executor.state()["broken"] and time.monotonic() < until:
        time.sleep(0.1)
    assert executor.state()["broken"] == "no node has had a CPU for builders for 2 s"


def test_a_node_that_joins_takes_its_share(cluster: Cluster, executor: RayExecutor) -> None:
    places = tuple(p for p in settled(executor) if p.device_class == "a100")
    rows = Rows()

    async def add(rows: Rows) -> None:
        while not rows:
            await asyncio.sleep(0.02)
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"class_a100": 1})

    run(executor, rows, searches(places, 60, "prove=0.2"), add)
    assert {row["reason_code"] for row in rows} == {"ok"}
    assert len({row["ray_node_id"] for row in rows}) == 2


def test_a_node_that_is_removed_costs_its_running_attempts_and_its_kind_waits(cluster: Cluster, executor: RayExecutor) -> None:
    places = settled(executor)
    rows = Rows()

    async def remove(rows: Rows) -> None:
        while len(rows) < 6:
            await asyncio.sleep(0.02)
        cluster.remove_node(next(n for n in cluster.worker_nodes if "class_t4" in str(n._ray_params.resources)))

    run(executor, rows, searches(places, 12, "prove=0.2"), remove)
    on_t4 = [row for row in rows if "t4" in places[[p.device_key for p in places].index(key_of(row, places))].device_class]
    others = [row for row in rows if row not in on_t4]
    assert {row["reason_code"] for row in others} == {"ok"} and len(others) == 24
    assert {row["reason_code"] for row in on_t4} <= {"ok", "lost_node", "missing_device"}
    assert Counter(row["reason_code"] for row in on_t4)["lost_node"] <= 3
    assert [d["about"] for d in executor.state()["devices"] if d["out_of_service"]] == ["stand-in for t4"]


def key_of(row: Row, places: tuple[Place, ...]) -> str | None:
    """Rows of lost jobs name no device: their attempt key does."""
    if row["device_key"]:
        return str(row["device_key"])
    spec_number = row["seqlen_q"] - 1
    for place in places:
        spec = AttentionSpec(1, 1, 8, 8, 1, 1 + spec_number, 4)
        job = place.put(Job(digest_text(f"{spec_number} {place.target}"), spec, place.target, ""))
        if job.key == row["attempt_key"]:
            return place.device_key
    raise AssertionError(row)
