"""A sweep and an author that is far away, on one event loop instead of Ray: losses, stops, budgets, a language model's ledger.

With Ray in between: test_cluster_faults.py, test_ray_client.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from model_runs import PLAN as MODEL_PLAN
from model_runs import PROGRAM, answering, review_here

from farm import model_search, standin
from farm.authors import author_of
from farm.executors import LocalExecutor
from farm.jobs import Row, Shop
from farm.plan import Budget, Plan
from farm.plan_file import read_plan
from farm.progress import PlainDisplay, Tally
from farm.scheduler import Sweep
from farm.search import Versions
from farm.sweep import _solve
from generator.authors.endpoint import Endpoint
from generator.authors.ledger import Paid, Spent

far = pytest.importorskip("farm.author_actor")
from ray.exceptions import ActorDiedError  # noqa: E402

PLAN = """
name: far
targets: [cpu-avx2]
dtypes: [fp32]
tuning: {candidates: 2}
models: [{name: prove=0.005, num_heads: 1, head_dim: 16, seqlens: [5, 6, 7, 8, 9, 10]}]
"""


class Rows(list[Row]):
    def append(self, row: Row) -> str:  # type: ignore[override]
        super().append(row)
        return str(len(self))

    def get(self, key: str) -> Row | None:
        return next((row for row in reversed(self) if row["attempt_key"] == key), None)


class Ref:
    """What a call of an actor gives."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task, self._future = task, Future[Any]()
        task.add_done_callback(self._end)

    def future(self) -> Future[Any]:
        return self._future

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self._future.done():
            return
        if task.exception() is not None:
            self._future.set_exception(task.exception())
        else:
            self._future.set_result(task.result())


class Call:
    def __init__(self, actor: Here, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Ref:
        ref = Ref(asyncio.ensure_future(getattr(self._actor.held, self._name)(*args)))
        self._actor.calls.append(ref)
        if self._actor.dead:
            self._actor.die()
        return ref


class Here:
    """An author's actor on this event loop."""

    def __init__(self) -> None:
        self.held = far.AuthorActor.__ray_metadata__.modified_class()
        self.calls: list[Ref] = []
        self.dead = False

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)

    def die(self) -> None:
        self.dead = True
        for search in self.held._desk._searches.values():
            search.cancel()
        for ref in self.calls:
            ref.task.cancel()
            if not ref.future().done():
                ref.future().set_exception(ActorDiedError())


class Farm:
    """Sweeps with such an author, on this process's own executor."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.notes = Rows(), list[str]()
        self.folder, self.authors = folder, list[Here]()
        self.line = ""

    def run(
        self, plan: Plan, meanwhile: Any = None, authors: Any = standin.author_of, endpoint: Any = None, **options: Any
    ) -> Sweep:
        shop = Shop(str(self.folder / "catalog"), str(self.folder), stages="farm.standin")
        executor, display = LocalExecutor(shop), PlainDisplay(Tally(), lambda line: None)
        sweep = Sweep(executor, self.rows, self.rows, display, interrupted_row=standin.row_without_verdict, **options)
        asyncio.run(asyncio.wait_for(self._run(sweep, plan, shop, meanwhile, authors, endpoint), 60))
        executor.close()
        assert sweep.counts.balanced
        return sweep

    async def _run(self, sweep: Sweep, plan: Plan, shop: Shop, meanwhile: Any, authors: Any, endpoint: Any) -> None:
        async def opened(name: str, paid: Paid) -> tuple[Here, int]:
            self.authors.append(Here())
            return self.authors[-1], await self.authors[-1].held.open(
                name, plan, shop, Versions(*standin.versions()), endpoint, paid, authors
            )

        author = far.FarAuthor(opened, self.notes.append, lambda actor: actor.die())
        await author.start()
        talking = asyncio.ensure_future(author.talk())
        problems = [(spec, place) for spec in plan.specs() for place in sweep.executor.places(plan.targets)]
        running = asyncio.ensure_future(sweep.run(functools.partial(_solve, author, *each) for each in problems))
        if meanwhile is not None:
            await meanwhile(self, sweep)
        await running
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await author.close()
        self.line = author.line()

    def made(self) -> Counter[int]:
        """How often attempts were made -> of how many that is true."""
        return Counter(standin.counts(self.folder)["done"].values())


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    return Farm(tmp_path)


def plan_of(text: str = PLAN, **changes: str) -> Plan:
    for old, new in changes.items():
        text = text.replace(old, new)
    return read_plan(text, "plan.yaml")


def test_every_problem_is_solved_and_every_attempt_made_once(farm: Farm) -> None:
    farm.run(plan_of())
    assert farm.made() == {1: 12} and farm.line == "a stand-in writes"


def test_authors_that_are_lost_cost_no_attempt(farm: Farm) -> None:
    """Three of them, each after a few attempts; none is asked for twice, and those in hand are told to the next author."""

    async def lose(farm: Farm, sweep: Sweep) -> None:
        for after in (1, 5, 9):
            while sweep.counts.ended < after:
                await asyncio.sleep(0.001)
            farm.authors[-1].die()

    done = farm.run(plan_of(), lose)
    assert farm.made() == {1: 12} and done.counts.planned == 12 and len(farm.authors) == 4
    assert [note.partition(":")[0] for note in farm.notes] == ["the author was lost (ActorDiedError"] * 3


def test_an_author_that_keeps_being_lost_ends_the_sweep_and_says_so(farm: Farm) -> None:
    async def lose(farm: Farm, sweep: Sweep) -> None:
        while not sweep.stop_reason:
            farm.authors[-1].die()
            await asyncio.sleep(0.001)

    done = farm.run(plan_of(), lose)
    assert done.stop_reason.startswith("the author was lost 3 times in a row, the last time: ActorDiedError")


def test_a_stop_reaches_what_is_in_hand_and_the_next_start_goes_on(farm: Farm) -> None:
    async def stop(farm: Farm, sweep: Sweep) -> None:
        while sweep.counts.ended < 3:
            await asyncio.sleep(0.001)
        sweep.stop("stopped by SIGINT")

    first = farm.run(plan_of(), stop)
    assert first.counts.by_reason["not_run"] >= 1 and not farm.authors[0].held._desk._searches
    spent = farm.run(plan_of(), budget=Budget(attempts=2))
    assert spent.stop_reason == "budget: 2 attempts are made" and spent.counts.planned == 2
    last = farm.run(plan_of())
    assert last.counts.known == first.counts.by_reason["ok"] + 2
    assert farm.made() in ({1: 12}, {1: 11, 2: 1}), "what was running when it was stopped is made again, and nothing else"


def test_a_fault_of_a_search_is_a_fault_of_ours(farm: Farm) -> None:
    class Broken(standin.StandinAuthor):
        async def solve(self, *_: Any) -> None:
            raise ZeroDivisionError("by zero")

    @asynccontextmanager
    async def broken(plan: Plan, shop: Shop, *_: Any) -> Any:
        yield Broken(plan, shop)

    with pytest.raises(ZeroDivisionError, match="by zero"):
        farm.run(plan_of(), authors=broken)


def test_a_language_model_far_away_keeps_its_ledger_its_record_and_its_line(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start's budget of tokens is spent after the sketch; the next one asks for the rest; a replay asks nothing."""
    monkeypatch.setattr(model_search, "review_apart", review_here)  # without a child of its own
    plan = plan_of(MODEL_PLAN, **{"targets: [cpu]": "targets: [cpu-avx2]"})
    with ChatServer(answering(PROGRAM)) as server:
        endpoint = Endpoint(server.base_url, "sk-test")
        poor = plan.with_changes(budget=Budget(tokens=100))
        first = farm.run(poor, authors=author_of, endpoint=endpoint, budget=poor.budget)
        assert first.stop_reason.startswith("budget tokens: ") and len(server.requests) == 1
        assert "left of the budget: 0 tokens" in farm.line
        farm.run(plan, authors=author_of, endpoint=endpoint)
        assert len(server.requests) == 2 and farm.line.startswith("model test-model: 2 answers, 200 tokens in, 100 out")
    assert [row["reason_code"] for row in farm.rows][-1] == "ok"
    replay = plan.with_changes(author_options=(("model", "test-model"), ("improvements", 0), ("repairs", 2), ("replay", True)))
    replayed = farm.run(replay, authors=author_of)
    assert replayed.counts.known == 1 and replayed.counts.planned == 0


def test_answers_of_open_problems_are_paid_for_once_however_many_authors_are_lost(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next author has the same answers from the record; the row that they led to still says what they cost."""
    monkeypatch.setattr(model_search, "review_apart", review_here)
    plan = plan_of(MODEL_PLAN, **{"targets: [cpu]": "targets: [cpu-avx2]", "name: tiny": "name: prove=0.8"})

    async def lose(farm: Farm, sweep: Sweep) -> None:
        for authors in (1, 2):
            while len(farm.authors) < authors or not farm.authors[-1].held._desk._asked:
                await asyncio.sleep(0.001)
            while not standin.counts(farm.folder)["prove"]:  # what was asked for was read here, and what it cost
                await asyncio.sleep(0.001)
            farm.authors[-1].die()

    with ChatServer(answering(PROGRAM)) as server:
        farm.run(plan, lose, authors=author_of, endpoint=Endpoint(server.base_url, "sk-test"))
        assert len(server.requests) == 2 and len(farm.authors) == 3
    assert farm.line.startswith("model test-model: 2 answers, 200 tokens in, 100 out")
    assert [(row["tokens_in"], row["tokens_out"]) for row in farm.rows] == [(200, 100)]


def test_what_an_author_spent_before_it_was_lost_counts(farm: Farm) -> None:
    """The next one takes its ledger over: a budget is the run's, however many authors it has."""
    plan, shop = plan_of(MODEL_PLAN), Shop(str(farm.folder / "catalog"), str(farm.folder), stages="farm.standin")

    async def main() -> tuple[Spent, str]:
        actor, before = Here(), Paid(Spent(3, 700, 200), ("an answer",))
        given = (plan.with_changes(budget=Budget(tokens=1000)), shop, Versions("t", "h"), Endpoint("http://localhost:1", "sk"))
        await actor.held.open("2", *given, before, author_of)
        report = far.unpack(await actor.held.close())
        assert report.paid == Paid(), "who asks knows of that already"
        return actor.held._author.ledger.spent, report.line

    spent, line = asyncio.run(main())
    assert spent == Spent(3, 700, 200) and "left of the budget: 100 tokens" in line
