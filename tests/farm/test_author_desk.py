"""An author away from its sweep, letter by letter, without Ray: what it asks for, what it is told, and how it is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farm.author_desk import Ask, Begin, Desk, Drop, End, Note, Told, Withdraw, portable
from farm.jobs import Job
from farm.places import Place
from farm.scheduler import Stopped
from generator.authors.transcripts import TranscriptError
from generator.canonical import digest_text
from generator.spec import AttentionSpec

SPEC = AttentionSpec(1, 1, 8, 8, 1, 4, 4)
PLACE = Place("sm_80", "d" * 64, "a100")


class Stub:
    """Asks for two attempts at a time and keeps what came of them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def solve(self, spec: AttentionSpec, target: str, attempt: Any) -> None:
        jobs = [Job(digest_text(f"{n}"), spec, target, f"program {n}") for n in range(2)]
        self.seen += await asyncio.gather(*(attempt(job) for job in jobs))


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def solve(self, spec: AttentionSpec, target: str, attempt: Any) -> None:
        raise self.error


async def out(desk: Desk) -> tuple[Any, ...]:
    return await desk.collected(1.0, 0.0)


def test_a_search_asks_and_goes_on_with_what_it_is_told() -> None:
    async def main() -> None:
        desk, stub = Desk("1"), Stub()
        desk.take([Begin(7, SPEC, PLACE)], stub)
        asks = await out(desk)
        assert [type(a) for a in asks] == [Ask, Ask] and len({a.ask for a in asks}) == 2
        assert {(a.problem, a.job.device_key) for a in asks} == {(7, "d" * 64)}, "put at the place before it travels"
        assert len({a.job.key for a in asks} | {digest_text("0"), digest_text("1")}) == 4
        desk.take([Told(7, a.ask, {"number": n}) for n, a in enumerate(asks)], stub)
        assert await out(desk) == (End(7),) and stub.seen == [{"number": 0}, {"number": 1}]
        desk.take([Told(7, asks[0].ask, {}), Drop(7)], stub)  # of no use any more, and no harm
        assert await desk.collected(0.01, 0.0) == ()

    asyncio.run(main())


def test_a_stop_reaches_the_search_and_comes_back_as_what_it_raised() -> None:
    async def main() -> None:
        desk = Desk("1")
        desk.take([Begin(1, SPEC, PLACE)], Stub())
        first, second = await out(desk)
        desk.take([Told(1, first.ask, None, "budget: 1 attempts are made")], Stub())
        end = next(letter for letter in await out(desk) if isinstance(letter, End))
        assert isinstance(end.error, Stopped) and str(end.error) == "budget: 1 attempts are made"
        desk.take([Told(1, second.ask, {})], Stub())

    asyncio.run(main())


def test_a_problem_that_is_dropped_lets_go_of_what_it_asked_for() -> None:
    async def main() -> None:
        desk = Desk("1")
        desk.note("hello")
        desk.take([Begin(1, SPEC, PLACE), Begin(2, SPEC, PLACE)], Stub())
        note, *asks = await out(desk)
        assert note == Note("hello") and len(asks) == 4
        desk.take([Drop(1)], Stub())
        assert {(type(a), a.problem) for a in await out(desk)} == {(Withdraw, 1)}
        await desk.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), TranscriptError("/a: cannot be read"), Stopped("over")])
def test_what_a_search_raises_is_told(error: Exception) -> None:
    async def main() -> End:
        desk = Desk("1")
        desk.take([Begin(1, SPEC, PLACE)], Failing(error))
        (end,) = await out(desk)
        return end

    end = asyncio.run(main())
    assert type(end.error) is type(error) and str(end.error) == str(error)


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        pass

    assert str(portable(Local("of here"))) == "Local: of here" and type(portable(Local("of here"))) is RuntimeError
