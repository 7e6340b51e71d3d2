"""Faults on a cluster of unlike nodes: each costs at most one attempt, and what was planned has ended.

The nodes are those of Ray's own test cluster; their A100, RTX 8000 and T4 are stand-ins: slots of this machine's processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from catalog import audit, store, writing
from catalog.store import Catalog
from farm import standin
from farm.authors import Author
from farm.jobs import Job, Row, Shop
from farm.known_rows import KnownRows
from farm.places import Place
from farm.plan import Budget
from farm.plan_file import read_plan
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Search, Sweep
from farm.search import Versions
from farm.sweep import _solve
from generator.canonical import digest_text
from generator.spec import AttentionSpec

actors = pytest.importorskip("farm.actors")
from ray.cluster_utils import Cluster  # noqa: E402

from farm.author_actor import author_on_ray  # noqa: E402
from farm.ray_executor import RayExecutor  # noqa: E402
from farm.session import start_session, stop_session  # noqa: E402

pytestmark = pytest.mark.slow
TARGETS = ("sm_75", "sm_80")
CLASSES = ("a100", "rtx8000", "t4")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"class_head": 1}})
    for name in CLASSES:
        made.add_node(num_cpus=1, num_gpus=1, resources={f"class_{name}": 1}, object_store_memory=80 << 20)
    made.wait_for_nodes()
    start_session(made.address, 0)
    yield made
    stop_session()
    made.shutdown()


class Farm:
    """A sweep of stand-ins on the cluster with a real catalog, started as often as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shop = Shop(str(folder / "catalog"), str(folder), stages="farm.standin", prove_wall_s=30.0)
        self.opened: Catalog = store.open(self.shop.catalog, create=True)
        self.executor: RayExecutor
        self.author: Author
        self.notes: list[str] = []

    def run(self, words: str, count: int = 3, meanwhile: Callable[[], Any] | None = None, **options: Any) -> Sweep:
        """One start, from joining the cluster to the end; the invariants that hold whatever happens are checked."""

        async def here(sweep: Sweep) -> None:
            running = asyncio.ensure_future(sweep.run(searches(self.executor.places(TARGETS), count, words)))
            if meanwhile is not None:
                await meanwhile()
            await asyncio.wait_for(running, 100)

        return self.start(here, **options)

    def run_far(self, words: str, seqlens: int = 3, meanwhile: Callable[[Sweep], Any] | None = None, **options: Any) -> Sweep:
        """The same with an author that is an actor: two candidates for each problem."""
        model = {"name": words, "num_heads": 1, "head_dim": 16, "seqlens": list(range(5, 5 + seqlens))}
        plan = read_plan(
            yaml.safe_dump({"name": "far", "dtypes": ["fp16"], "tuning": {"candidates": 2}, "models": [model]}), "far"
        )

        async def far(sweep: Sweep) -> None:
            versions = Versions(*standin.versions())
            async with author_on_ray(plan, self.shop, versions, None, self.notes.append, standin.author_of) as self.author:
                problems = [(spec, place) for spec in plan.specs() for place in self.executor.places(TARGETS)]
                running = asyncio.ensure_future(sweep.run(functools.partial(_solve, self.author, *each) for each in problems))
                if meanwhile is not None:
                    await meanwhile(sweep)
                await asyncio.wait_for(running, 100)

        return self.start(far, **options)

    def start(self, work: Callable[[Sweep], Any], **options: Any) -> Sweep:
        run_id = f"run-{time.monotonic_ns()}"
        self.opened.start_run(run_id, "faults")
        self.executor = RayExecutor(self.shop, targets=TARGETS, patience_s=1.0)
        try:
            with self.opened.writer(run_id) as writer:
                sweep = Sweep(
                    self.executor, writer, KnownRows(self.opened), PlainDisplay(Tally(), lambda line: None),
                    interrupted_row=standin.row_without_verdict, **options,
                )  # fmt: skip
                asyncio.run(self._settled(sweep, work))
        finally:
            self.executor.close()
        self.opened.record_run(run_id, "faults", sweep.counts.planned + sweep.counts.known, sweep.counts.known)
        self.check(sweep)
        return sweep

    async def _settled(self, sweep: Sweep, work: Callable[[Sweep], Any]) -> None:
        while not self.executor.settled:
            await asyncio.sleep(0.05)
        await work(sweep)

    def check(self, sweep: Sweep) -> None:
        """Planned rows = terminal rows; the catalog is whole; nothing that had ended was made again."""
        assert sweep.counts.balanced
        assert audit.verify(self.opened, artifacts=False).errors == ()
        rows = self.opened.rows(["attempt_key", "attempt_no", "row_id"], history=True).to_pylist()
        assert len({row["row_id"] for row in rows}) == len(rows)
        ended = Counter(r["attempt_key"] for r in self.opened.rows(["attempt_key", "reason_code"], history=True).to_pylist()
                        if r["reason_code"] in ("ok", "timeout", "crash"))  # fmt: skip
        assert set(ended.values()) <= {1}, "an attempt that had ended was made again"

    def reasons(self, *, history: bool = False) -> Counter[str]:
        return Counter(self.opened.rows(["reason_code"], history=history)["reason_code"].to_pylist())


def searches(places: tuple[Place, ...], count: int, words: str) -> Iterator[Search]:
    """`words` of the form `CLASS:words` are for that class alone; the others' candidates are short pauses."""

    def one(job: Job) -> Search:
        async def search(attempt: Any) -> None:
            await attempt(job)

        return search

    only, colon, said = words.partition(":")
    for number in range(count):
        for place in places:
            own = (said if place.device_class == only else "prove=0.05") if colon else words
            spec = AttentionSpec(1, 1, 8, 8, 1, 1 + number, 4, name=own)
            yield one(place.put(Job(digest_text(f"{number} {place.target}"), spec, place.target, f"program {number} {words}")))


@pytest.fixture
def farm(cluster: Cluster, tmp_path: Path) -> Farm:
    return Farm(tmp_path)


def test_an_actor_that_is_killed_mid_task_costs_one_try(farm: Farm) -> None:
    farm.run("a100:die-prove once", count=1)
    assert farm.reasons() == {"ok": 3}
    assert farm.reasons(history=True) == {"ok": 3, "lost_node": 1}


def test_an_actor_whose_constructor_crashes_leaves_service_and_holds_up_nobody(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = actors.Device.__ray_metadata__.modified_class

    class Crashing(real):  # type: ignore[misc,valid-type]
        def __init__(self, device: str, expected_class: str, shop: Shop) -> None:
            if expected_class == "t4":
                os.abort()
            super().__init__(device, expected_class, shop)

    async def noticed() -> None:
        """On a busy machine the other two may be through before that node has started an actor at all."""
        until = time.monotonic() + 60
        while not any(d["out_of_service"] for d in farm.executor.state()["devices"]) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    monkeypatch.setattr(actors, "Device", actors.ray.remote(max_restarts=0, max_task_retries=0)(Crashing))
    farm.run("prove=0.05", meanwhile=noticed)
    assert farm.reasons() == {"ok": 6}
    (out,) = [d for d in farm.executor.state()["devices"] if d["out_of_service"]]
    assert out["class"] == "t4" and "3 deaths in a row" in out["out_of_service"]


@pytest.mark.soak
def test_a_device_that_dies_while_it_says_what_it_is(farm: Farm) -> None:
    (farm.folder / "crash-rtx8000").touch()
    farm.run("prove=0.05")
    assert farm.reasons() == {"ok": 6}


@pytest.mark.parametrize(("what", "reason"), [("hang", "timeout"), ("crash", "crash"), ("eat", "crash")])
def test_a_candidate_that_hangs_crashes_or_eats_memory_costs_its_own_attempt(farm: Farm, what: str, reason: str) -> None:
    farm.run(f"a100:candidate={what}", count=2)
    assert farm.reasons() == {"ok": 4, reason: 2}
    assert farm.reasons(history=True) == farm.reasons(), "it is no death of the device"


@pytest.mark.soak
def test_what_a_worker_cannot_end_itself_the_second_wall_ends(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    from farm import ray_executor

    monkeypatch.setattr(ray_executor, "GRACE_S", -26.0)  # of the shop's 30 s, 4 are left
    farm.run("t4:prove=60", count=1)
    assert farm.reasons()["ok"] == 2 and farm.reasons(history=True)["lost_node"] == 3, "tried three times, and given up"


def test_an_author_that_is_killed_costs_no_attempt(farm: Farm) -> None:
    """Another one begins the open problems again; what had ended meanwhile is not made once more."""
    before = workers("ray::AuthorActor")
    done = farm.run_far("prove=0.1 die-author once")
    assert farm.reasons(history=True) == {"ok": 18} and done.counts.planned == 18
    assert [note.partition(" (")[0] for note in farm.notes] == ["the author was lost"]
    assert farm.author.line() == "a stand-in writes"
    ended("ray::AuthorActor", before)


@pytest.mark.soak
def test_a_sweep_that_is_stopped_lets_go_of_its_author_and_goes_on_later(farm: Farm) -> None:
    """As by Ctrl-C: what was in hand has rows that say so; and a budget stops an author that is far away, too."""

    async def stop(sweep: Sweep) -> None:
        while sweep.counts.ended < 3:
            await asyncio.sleep(0.02)
        sweep.stop("stopped by SIGINT")

    before = workers("ray::AuthorActor")
    stopped = farm.run_far("prove=0.2", meanwhile=stop)
    assert 3 <= stopped.counts.by_reason["ok"] < 18 and stopped.counts.by_reason["not_run"] >= 1
    ended("ray::AuthorActor", before)
    spent = farm.run_far("prove=0.05", budget=Budget(attempts=2))
    assert spent.stop_reason == "budget: 2 attempts are made" and spent.counts.planned == 2
    last = farm.run_far("prove=0.05")
    assert farm.reasons() == {"ok": 18} and last.counts.known == stopped.counts.by_reason["ok"] + 2


@pytest.mark.soak
def test_an_author_that_keeps_dying_ends_the_sweep_and_says_so(farm: Farm) -> None:
    done = farm.run_far("prove=0.1 die-author")
    assert re.fullmatch(r"the author was lost 3 times in a row, the last time: \w+Error: .*", done.stop_reason)


def test_binaries_travel_through_the_object_store_even_when_it_is_full(farm: Farm) -> None:
    """The builder's file is gone before the device looks for it; and more is in the store than it holds."""
    held = [actors.ray.put(os.urandom(20 << 20)) for _ in range(3)]
    pinned = [actors.ray.get(ref) for ref in held]

    async def remove() -> None:
        """When all six are built (kinds share a file, and each build writes it): three wait for their device."""
        while len(standin.counts(farm.folder)["build"]) < 6 or len(standin.counts(farm.folder)["prove"]) < 3:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)  # written whole, and in the store
        for path in farm.folder.glob("*.bin"):
            path.unlink()

    farm.run("bytes=16000000 prove=3", count=2, meanwhile=remove)
    assert farm.reasons() == {"ok": 6} and len(pinned) == 3
    assert [p for p in (farm.folder / "fetched").rglob("*") if p.is_file()], "bytes came from the store"


@pytest.mark.soak
def test_a_shared_folder_that_is_gone_for_a_while_loses_no_row(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing finds no catalog there, and its rows stay in the journal. What is really mounted: test_storage_faults.py."""
    monkeypatch.setattr(writing, "SEAL_ROWS", 4)
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.2)
    here, away = farm.folder / "catalog", farm.folder / "away"

    async def take_away() -> None:
        while farm.opened.count() < 6:
            await asyncio.sleep(0.05)
        here.rename(away)
        await asyncio.sleep(2.0)
        assert not here.exists()
        away.rename(here)

    with pytest.warns(RuntimeWarning, match="rows stay in the journal"):
        farm.run("prove=0.1", count=10, meanwhile=take_away, storage_patience_s=20.0)
    assert farm.reasons() == {"ok": 30}


def test_an_attempt_that_completes_twice_counts_once(farm: Farm) -> None:
    farm.run("prove=0.01")
    again: list[Row] = farm.opened.rows(None).to_pylist()
    run_id = again[0]["run_id"]
    with farm.opened.writer(run_id) as writer:
        writer.append_all([standin.row_without_verdict(_job_of(row), "ok", "") for row in again])
    assert farm.reasons() == {"ok": 9}
    assert audit.verify(farm.opened, artifacts=False).errors == ()


def _job_of(row: Row) -> Job:
    spec = AttentionSpec(1, 1, 8, 8, 1, row["seqlen_q"], 4)
    return Job(row["attempt_key"], spec, row["target"], "again", device_key=row["device_key"])


def test_a_start_after_a_start_repeats_nothing(farm: Farm) -> None:
    farm.run("t4:reason=missing_device")
    second = farm.run("prove=0.01")
    assert (second.counts.known, second.counts.planned) == (6, 3) and farm.reasons() == {"ok": 9}


PLAN = """
name: killed
targets: [sm_75, sm_80]
dtypes: [fp16]
tuning: {candidates: 1}
models: [{name: prove=0.2, num_heads: 1, head_dim: 16, seqlens: [5, 6, 7, 8, 9, 10]}]
"""


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_driver_that_is_killed_leaves_no_actor_behind_and_is_gone_on_from(
    cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    argv = [sys.executable, "-m", "farm", "sweep", str(tmp_path / "plan.yaml"), "--stages", "farm.standin", "-q", "--json"]
    argv += ["--catalog", str(tmp_path / "c"), "--address", cluster.address]
    environment = os.environ | {"FARM_CACHE": str(tmp_path / "cache")}
    before = all_workers()
    running = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "kernel-farm" / "standin.log"
    until = time.monotonic() + 60
    while len(done(log, tmp_path)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(number)
    running.wait(20)
    until = time.monotonic() + 10
    while (left := all_workers() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, "actors outlive their driver"
    finished = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    opened = store.open(tmp_path / "c")
    assert Counter(opened.rows(["reason_code"])["reason_code"].to_pylist()) == {"ok": 18}
    assert audit.verify(opened, artifacts=False).errors == ()


def done(log: Path, folder: Path) -> list[str]:
    """What the stand-ins of the cluster's workers noted: their nodes' own caches are this user's."""
    with contextlib.suppress(OSError):
        return [line for line in log.read_text().splitlines() if line.startswith("done")]
    journals = list((folder / "c" / "journal").glob("*.journal"))
    return [line for path in journals for line in path.read_text().splitlines()[1:]]


def all_workers() -> set[int]:
    return workers("ray::Device") | workers("ray::Builder") | workers("ray::AuthorActor")


def ended(title: str, before: set[int]) -> None:
    """Waits until no process is left that is called so and was not there before."""
    until = time.monotonic() + 20
    while (left := workers(title) - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def workers(title: str) -> set[int]:
    """Living processes of this test's own cluster that are called so: another worker of the tests may have one, too."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                found.add(process.pid)
    return found


def test_a_node_that_is_lost_for_good_ends_its_kinds_attempts_and_no_other(farm: Farm, cluster: Cluster) -> None:
    """The last test: the cluster has no T4 from here on."""

    async def remove() -> None:
        while farm.reasons()["ok"] < 3:
            await asyncio.sleep(0.05)
        cluster.remove_node(next(n for n in cluster.worker_nodes if "class_t4" in str(n._ray_params.resources)))

    farm.run("prove=0.2", count=8, meanwhile=remove)
    found = farm.reasons()
    assert found["ok"] >= 16 and set(found) <= {"ok", "lost_node", "missing_device"} and found.total() == 24
    assert farm.reasons(history=True)["lost_node"] <= 1 + 2, "the running attempt is lost once, however often it is tried"
    shutil.rmtree(farm.folder / "catalog")
