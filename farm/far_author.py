"""An author that works in an actor, as its sweep sees it: problems go there as letters, attempts are made here. Starts none.

The driver's event loop and the actor exchange letters (`farm.author_desk`), many to a call. An author that dies costs no attempt:
another one begins the open problems again, and is told what has ended meanwhile instead of having it made once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, assert_never

from farm.actors import pack, unpack
from farm.author_desk import Ask, Begin, Drop, End, Note, Report, ToAuthor, Told, Withdraw
from farm.device_slots import first_line
from farm.jobs import Job, Row
from farm.known_rows import KNOWN_COLUMNS
from farm.model_feedback import TOLD_COLUMNS
from farm.places import AttemptsAt
from farm.scheduler import Stopped
from farm.search import Attempt
from farm.session import ray
from generator.authors.ledger import Paid
from generator.spec import AttentionSpec

GATHER_S = 0.4  # that letters to an author wait for others, a call costing as much as ten of them
ENOUGH = 16  # letters that wait for no others
#: Problems of a kind that are open at least while there is a device for them, so that none waits for letters to come and go.
LEAST_WIDTH = 24
#: For the same reason, so many times as many problems as devices can use.
AHEAD = 2
ANSWER_S = 300.0  # without any answer, after which an author is taken for lost
CLOSE_S = 5.0
STRIKES = 3  # authors that were lost one after the other, before any solved a problem
#: What a call raises whose actor is gone.
LOSSES = (ray.exceptions.RayError, TimeoutError, ConnectionError)
#: Columns of a row that searches look at, as of rows of earlier starts.
SEEN_COLUMNS = tuple(dict.fromkeys((*KNOWN_COLUMNS, *TOLD_COLUMNS)))


@dataclass(slots=True)
class _Problem:
    """One that is open. made: every attempt, by key; earlier: those that a lost author had asked for, told to the next one."""

    begin: Begin
    attempt: Attempt
    ended: asyncio.Future[None]
    made: dict[str, asyncio.Task[Row]] = field(default_factory=dict)
    earlier: dict[str, asyncio.Task[Row]] = field(default_factory=dict)
    asked: dict[str, asyncio.Task[Row]] = field(default_factory=dict)


class FarAuthor:
    """An author as its sweep sees it.

    opened: starts an author's actor, given a name and what those before it paid; gives it and its width. killed: ends one.
    """

    def __init__(
        self,
        opened: Callable[[str, Paid], Awaitable[tuple[Any, int]]],
        note: Callable[[str], None],
        killed: Callable[[Any], None],
    ) -> None:
        self._opened, self._note, self._killed = opened, note, killed
        self._actor: Any = None
        self._open: dict[int, _Problem] = {}
        self._numbers, self._names = itertools.count(), itertools.count()
        self._outbox: list[ToAuthor] = []
        self._news, self._enough = asyncio.Event(), asyncio.Event()
        self._line, self._paid = "", list[Paid]()
        self._strikes, self._over = 0, ""
        self.width = 0

    def line(self) -> str:
        return self._line

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        """As `farm.authors.Author.solve`; cancelled, it drops the problem and lets go of its attempts first."""
        assert isinstance(attempt, AttemptsAt) and attempt.place.target == target
        if self._over:
            raise Stopped(self._over)
        number = next(self._numbers)
        begin = Begin(number, spec, attempt.place)
        problem = self._open[number] = _Problem(begin, attempt.attempt, asyncio.get_running_loop().create_future())
        self._send(begin)
        try:
            await problem.ended
        finally:
            del self._open[number]
            if not problem.ended.done() or problem.ended.cancelled():
                self._send(Drop(number))
            for task in problem.made.values():
                task.cancel()
            await asyncio.gather(*problem.made.values(), return_exceptions=True)

    async def start(self) -> None:
        """The first author. Raises what keeps it from starting."""
        self._actor, width = await self._opened(f"{next(self._names)}", Paid())
        self.width = max(width, LEAST_WIDTH)

    async def talk(self) -> None:
        """Exchanges letters until it is cancelled, with another author when one is lost."""
        while not self._over:
            try:
                await self._exchange()
            except LOSSES as error:
                await self._lost(error)
            except Exception as error:  # a fault of ours: nobody may wait for an author that nobody listens to
                self._break_off(error)
                raise

    async def close(self) -> None:
        """Lets the author end what it has begun, for a few seconds; then it is gone."""
        with contextlib.suppress(*LOSSES):
            self._read(unpack(await asyncio.wait_for(answer_of(self._actor.close.remote()), CLOSE_S)))
        self._killed(self._actor)

    def _send(self, letter: ToAuthor) -> None:
        self._outbox.append(letter)
        self._news.set()
        if len(self._outbox) >= ENOUGH:
            self._enough.set()

    async def _exchange(self) -> None:
        """One call is on its way most of the time, and a second one where there is something to say before that one is back. What
        comes back is read at once; what is sent waits for more.
        """
        calls: set[asyncio.Future[Any]] = set()
        self._news.set()
        due: asyncio.Future[Any] = asyncio.ensure_future(self._due())
        try:
            while True:
                if due.done():
                    letters, self._outbox = tuple(self._outbox), []
                    self._news.clear()
                    self._enough.clear()
                    calls.add(asyncio.ensure_future(answer_of(self._actor.exchange.remote(pack(letters)))))
                    due = asyncio.ensure_future(self._due())
                done, _ = await asyncio.wait({*calls, due}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")
                for call in calls & done:
                    calls.discard(call)
                    self._read(unpack(call.result()))
                if not calls:
                    self._news.set()
        finally:
            for waiting in (*calls, due):
                waiting.cancel()

    async def _due(self) -> None:
        """Until letters have waited long enough, or are enough; also where nobody may write to us before we call."""
        await self._news.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._enough.wait(), GATHER_S)

    def _read(self, report: Report) -> None:
        self._line = report.line
        if report.paid != Paid():
            self._paid.append(report.paid)
        for letter in report.letters:
            match letter:
                case Note():
                    self._note(letter.text)
                case Ask():
                    self._asked(letter)
                case Withdraw():
                    problem = self._open.get(letter.problem)
                    if problem is not None and (task := problem.asked.pop(letter.ask, None)) is not None:
                        task.cancel()
                case End():
                    self._end(letter)
                case _:
                    assert_never(letter)

    def _asked(self, letter: Ask) -> None:
        problem, job = self._open.get(letter.problem), letter.job
        if problem is None:
            return
        task = problem.earlier.pop(job.key, None) or asyncio.ensure_future(_made(problem.attempt, job))
        problem.made[job.key] = problem.asked[letter.ask] = task
        task.add_done_callback(functools.partial(self._tell, letter))

    def _tell(self, letter: Ask, task: asyncio.Task[Row]) -> None:
        problem = self._open.get(letter.problem)
        if problem is None or task.cancelled() or problem.asked.pop(letter.ask, None) is None:
            return
        match task.exception():
            case None:
                row = task.result()
                self._send(Told(letter.problem, letter.ask, {name: row.get(name) for name in SEEN_COLUMNS}))
            case Stopped() as stopped:
                self._send(Told(letter.problem, letter.ask, None, str(stopped)))
            case error:
                if not problem.ended.done():
                    problem.ended.set_exception(error)

    def _end(self, letter: End) -> None:
        problem, self._strikes = self._open.get(letter.problem), 0
        if problem is None or problem.ended.done():
            return
        if letter.error is None:
            problem.ended.set_result(None)
        else:
            problem.ended.set_exception(letter.error)

    async def _lost(self, error: BaseException) -> None:
        """The open problems begin again with another author; after STRIKES of them in a row they end the sweep."""
        self._strikes += 1
        self._killed(self._actor)
        if self._strikes < STRIKES:
            self._note(f"the author was lost ({first_line(error)}); another one goes on from what has ended")
            self._outbox = []
            for problem in self._open.values():
                problem.earlier, problem.asked = dict(problem.made), {}
                self._send(problem.begin)
            with contextlib.suppress(*LOSSES):  # then its first call says so
                self._actor, _ = await self._opened(f"{next(self._names)}", sum(self._paid, Paid()))
            return
        self._over = f"the author was lost {self._strikes} times in a row, the last time: {first_line(error)}"
        self._break_off(Stopped(self._over))

    def _break_off(self, error: Exception) -> None:
        for problem in self._open.values():
            if not problem.ended.done():
                problem.ended.set_exception(error)


async def _made(attempt: Attempt, job: Job) -> Row:
    return await attempt(job)


async def answer_of(ref: Any) -> Any:
    """What a call gives. One that nobody waits for any more is left alone: Ray's client takes it badly when its future is
    cancelled, and it may end after the loop.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def end(ended: Future[Any]) -> None:
        if answer.done():
            return
        if (error := ended.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(ended.result())

    def ended(future: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end, future)

    ref.future().add_done_callback(ended)
    return await answer
