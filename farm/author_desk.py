"""An author at work away from its sweep: searches begin and attempts are told by letters, and letters ask for them. Knows no Ray.

A letter is small: a spec, a job, or the columns of a row that a search looks at.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, assert_never

from farm.jobs import Job, Row
from farm.places import AttemptsAt, Place
from farm.scheduler import Stopped
from farm.search import Attempt
from generator.authors.ledger import Paid
from generator.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Begin:
    """To the author: solve this problem."""

    problem: int
    spec: AttentionSpec
    place: Place


@dataclass(frozen=True, slots=True)
class Told:
    """To the author: what came of an attempt that it asked for; or, without a row, why no more attempts are made."""

    problem: int
    ask: str
    row: Row | None
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """To the author: nobody wants this problem solved any more."""

    problem: int


@dataclass(frozen=True, slots=True)
class Ask:
    """From the author: it wants this attempt made. ask: unlike that of any other, also of an author that was lost before."""

    problem: int
    ask: str
    job: Job


@dataclass(frozen=True, slots=True)
class Withdraw:
    """From the author: the attempt is not wanted any more."""

    problem: int
    ask: str


@dataclass(frozen=True, slots=True)
class End:
    """From the author: the search is over; with what it raised, if it did."""

    problem: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """From the author: a line for the person who watches."""

    text: str


ToAuthor: TypeAlias = Begin | Told | Drop
FromAuthor: TypeAlias = Ask | Withdraw | End | Note


@dataclass(frozen=True, slots=True)
class Report:
    """letters; then how the author stands: its line for the display, and what was paid since its last report."""

    letters: tuple[FromAuthor, ...]
    line: str = ""
    paid: Paid = Paid()


class Solver(Protocol):
    """What is asked of an author here."""

    def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> Awaitable[None]: ...


@dataclass(slots=True)
class Desk:
    """Searches of one author, all on one event loop. name: of this desk, in what it asks."""

    name: str
    _searches: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _asked: dict[str, asyncio.Future[Row]] = field(default_factory=dict)
    _out: list[FromAuthor] = field(default_factory=list)
    _fresh: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def take(self, letters: Iterable[ToAuthor], author: Solver) -> None:
        """Acts on letters. What is said of a search that is over is of no use any more."""
        for letter in letters:
            match letter:
                case Begin():
                    search = asyncio.ensure_future(self._search(letter, author))
                    self._searches[letter.problem] = search
                case Told():
                    self._hear(letter)
                case Drop():
                    if (dropped := self._searches.pop(letter.problem, None)) is not None:
                        dropped.cancel()
                case _:
                    assert_never(letter)

    def note(self, text: str) -> None:
        self._send(Note(text))

    async def collected(self, wait_s: float, gather_s: float) -> tuple[FromAuthor, ...]:
        """What there is to send: as soon as there is something, with what comes in the `gather_s` after it; () after `wait_s`."""
        try:
            await asyncio.wait_for(self._fresh.wait(), wait_s)
        except TimeoutError:
            return ()
        await asyncio.sleep(gather_s)
        return self.take_out()

    def take_out(self) -> tuple[FromAuthor, ...]:
        letters, self._out = tuple(self._out), []
        self._fresh.clear()
        return letters

    async def close(self) -> None:
        """Ends every search, and waits until it has put its affairs in order."""
        searches, self._searches = list(self._searches.values()), {}
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    def _send(self, letter: FromAuthor) -> None:
        self._out.append(letter)
        self._fresh.set()

    def _hear(self, letter: Told) -> None:
        future = self._asked.pop(letter.ask, None)
        if future is None or future.done():
            return
        if letter.row is None:
            future.set_exception(Stopped(letter.stopped))
        else:
            future.set_result(letter.row)

    async def _search(self, begun: Begin, author: Solver) -> None:
        async def ask(job: Job) -> Row:
            name = f"{self.name}.{next(self._numbers)}"
            future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
            self._asked[name] = future
            self._send(Ask(begun.problem, name, job))
            try:
                return await future
            except asyncio.CancelledError:
                self._asked.pop(name, None)
                self._send(Withdraw(begun.problem, name))
                raise

        error = None
        try:
            await author.solve(begun.spec, begun.place.target, AttemptsAt(begun.place, ask))
        except Exception as raised:
            error = portable(raised)
        if self._searches.pop(begun.problem, None) is not None:
            self._send(End(begun.problem, error))


def portable(error: Exception) -> Exception:
    """The error itself where it survives being pickled, else one that says the same."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if type(copied) is type(error) and str(copied) == str(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
