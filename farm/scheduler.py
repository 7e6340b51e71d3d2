"""Runs a sweep: opens searches, admits their attempts, tries transient failures again, writes every row. Works on none itself.

A search is a coroutine that asks for attempts and sees their rows (`farm.search`). Plans stream, one stream for each kind of
device: only as many searches are open as keep its devices busy. The sweep's state is the catalog: what ended there is not
done again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from catalog.errors import FencedRun, StorageError
from farm.executors import NO_SPACE, Executor, NoExecutor, StartInterrupted
from farm.jobs import Job, Row, device_seconds
from farm.plan import Budget
from verifier.records import REASONS

#: Transient reasons that are worth another try in the same sweep, and how many; the rest wait for the next start.
RETRIES = {"lost_node": 2, "compile_oom": 1, "throttled": 2}

T = TypeVar("T")

STOPPING = "{}: stopping; what has ended is in the catalog, and the same command goes on from there"
LOOK_S = 2.0  # between looks for devices that joined


class Stopped(Exception):
    """No more attempts are admitted: the budget is spent, or the user asked for the end."""


class Ended(Protocol):
    """What is known of attempts that ended in earlier starts."""

    def get(self, key: str) -> Row | None: ...


class Sink(Protocol):
    """Where rows go: the catalog's writer."""

    def append(self, row: Row) -> str: ...


class Display(Protocol):
    """Who watches."""

    def planned(self, job: Job) -> None: ...
    def ended(self, job: Job, row: Row) -> None: ...
    def known(self, job: Job, row: Row) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class Counts:
    """Planned attempts and how they ended. `known` ended in an earlier start and were not planned again."""

    planned: int = 0
    known: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> int:
        return sum(self.by_reason.values())

    @property
    def balanced(self) -> bool:
        return self.planned == self.ended


Search = Callable[[Callable[[Job], Awaitable[Row]]], Awaitable[None]]


@dataclass(slots=True)
class Stream:
    """Searches for one kind of device. room: how many of them its devices can use at a time, now."""

    name: str
    searches: Iterator[Search]
    room: Callable[[], int]
    num_open: int = 0
    exhausted: bool = False


@dataclass
class Sweep:
    """One start of a sweep. `run` ends when every search has ended, or soon after `stop`.

    width: searches to have open at a time although the executor could not work on so many: those that wait for a model.
    ahead: how many times as many as it can work on: those that wait for an author far away.
    """

    executor: Executor
    sink: Sink
    ended: Ended
    display: Display
    _: KW_ONLY
    budget: Budget = field(default_factory=Budget)
    width: int = 0
    ahead: int = 1
    storage_patience_s: float = 180.0
    device_patience_s: float = 0.0
    interrupted_row: Callable[[Job, str, str], Row] | None = None
    counts: Counts = field(default_factory=Counts)
    stop_reason: str = ""
    _started: float = field(default_factory=time.monotonic)
    _in_hand: dict[str, asyncio.Future[Row]] = field(default_factory=dict)
    _submitted: set[Future[Row]] = field(default_factory=set)
    _device_s: float = 0.0
    _counted: set[str] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, searches: Iterable[Search]) -> Counts:
        """Every search, as many at a time as the executor can use. Afterwards planned equals the rows written."""
        return await self.run_streams([Stream("", iter(searches), lambda: self.executor.capacity)])

    async def run_streams(self, streams: Iterable[Stream], joining: Callable[[], Iterable[Stream]] = tuple) -> Counts:
        """Several streams side by side, each as wide as its devices can use. joining: streams that came up meanwhile."""
        running, owners = list(streams), dict[asyncio.Task[None], Stream]()
        stopping = asyncio.ensure_future(self._stopping.wait())
        stalled_since = None
        try:
            while not self._is_over:
                running = [s for s in running if not s.exhausted] + list(joining())
                self._open_searches(running, owners)
                if owners:
                    stalled_since = None
                    await self._some_end(owners, stopping)
                    continue
                if all(s.exhausted for s in running):
                    break
                stalled_since = stalled_since or time.monotonic()
                if time.monotonic() - stalled_since >= self.device_patience_s:
                    self.stop("no device is left for " + ", ".join(s.name for s in running if not s.exhausted))
                else:
                    await asyncio.wait({stopping}, timeout=min(LOOK_S, self.device_patience_s))
            while owners and not self._stopping.is_set():
                await self._some_end(owners, stopping)
        finally:
            for task in owners:
                task.cancel()
            await asyncio.gather(*owners, return_exceptions=True)
            stopping.cancel()
        return self.counts

    def stop(self, reason: str) -> None:
        """Admit nothing more and let go of what is in hand; its attempts end as rows `not_run`."""
        self.stop_reason = self.stop_reason or reason
        self._stopping.set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called. A spent budget, or an author that cannot be had, admit nothing more without it."""
        return self._stopping.is_set()

    async def unless_stopped(self, beginning: Coroutine[Any, Any, T]) -> T | None:
        """What comes before the first attempt: its result, or None where the sweep was stopped before there was one."""
        work, stopping = asyncio.ensure_future(beginning), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return None
        finally:
            stopping.cancel()

    async def attempt(self, job: Job) -> Row:
        """The row of a job: of an earlier start, or of now, after as many tries as its reason allows."""
        known = self.ended.get(job.key)
        same_end = known is not None and job.trouble is not None and job.trouble == (known["reason_code"], known["message"])
        if known is not None and (REASONS[known["reason_code"]] == "final" or same_end):
            self.counts.known += 1
            self._count_device(known)
            self.display.known(job, known)
            return known
        first = (known["attempt_no"] if known else 0) + 1
        for attempt_no in range(first, first + 1 + max(RETRIES.values())):
            row = await self._shared(replace(job, attempt_no=attempt_no))
            if row["reason_code"] == "not_run" and (row["message"] or "").startswith(NO_SPACE):
                self.stop(row["message"])
            if attempt_no - first >= RETRIES.get(row["reason_code"], 0):
                break
        return row

    async def _shared(self, job: Job) -> Row:
        """Two searches may ask for the same attempt: it is made once."""
        if (running := self._in_hand.get(job.key)) is not None:
            return await asyncio.shield(running)
        future: asyncio.Future[Row] = asyncio.ensure_future(self._try(job))
        self._in_hand[job.key] = future
        try:
            return await future
        finally:
            self._in_hand.pop(job.key, None)

    async def _try(self, job: Job) -> Row:
        self._admit(job)
        submitted = self._submit(job)
        self._submitted.add(submitted)
        try:
            row = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            spent = self.stop_reason.startswith("budget") and not self._stopping.is_set()
            if self.interrupted_row is not None:
                reason = "budget_stopped" if spent else "not_run"
                self._write(job, self.interrupted_row(job, reason, f"stopped: {self.stop_reason or 'the sweep ended'}"))
            if spent:
                raise Stopped(self.stop_reason) from None
            raise
        finally:
            self._submitted.discard(submitted)
        self._count_device(row)
        return await self._write_patiently(job, row)

    def _submit(self, job: Job) -> Future[Row]:
        try:
            return self.executor.submit(job)
        except NoExecutor as error:
            self._write_unsubmitted(job, str(error), f"{error}; the same command goes on")
            raise Stopped(self.stop_reason) from None
        except StartInterrupted as error:
            self._write_unsubmitted(job, f"stopped by {error}", STOPPING.format(error))
            raise Stopped(self.stop_reason) from None

    def _write_unsubmitted(self, job: Job, reason: str, note: str) -> None:
        """Ends the sweep, and the job that nothing was there to run."""
        self.stop(reason)
        self.display.note(note)
        if self.interrupted_row is not None:
            self._write(job, self.interrupted_row(job, "not_run", f"stopped: {reason}"))

    def _count_device(self, row: Row) -> None:
        """Device seconds of attempts, each counted once. When the budget of them is spent, what waits for a device is let go."""
        key = row.get("row_id") or row["attempt_key"]
        limit = self.budget.gpu_s
        if limit is None or key in self._counted:
            return
        self._counted.add(key)
        self._device_s += device_seconds(row)
        if self._device_s >= limit and not self.stop_reason:
            self.stop_reason = f"budget: {self._device_s:.1f} s on the device of {limit:g} are spent"
            for waiting in tuple(self._submitted):
                waiting.cancel()  # one that runs goes on to its end

    async def _write_patiently(self, job: Job, row: Row) -> Row:
        """A shared folder may be gone for a minute, and a disk full until somebody makes room: the row waits for it."""
        until = time.monotonic() + self.storage_patience_s
        while True:
            try:
                return self._write(job, row)
            except FencedRun as error:
                self.stop(str(error))
                raise Stopped(self.stop_reason) from None
            except StorageError as error:
                if time.monotonic() > until or self._stopping.is_set():
                    self.stop(f"rows cannot be stored: {error}")
                    raise Stopped(self.stop_reason) from None
                self.display.note(f"rows cannot be stored, waiting: {error}")
                await asyncio.sleep(min(5.0, self.storage_patience_s / 4))

    def _admit(self, job: Job) -> None:
        limit = self.budget.attempts
        if self._stopping.is_set() or self.stop_reason:
            raise Stopped(self.stop_reason)
        if limit is not None and self.counts.planned >= limit:
            self.stop_reason = self.stop_reason or f"budget: {limit} attempts are made"
            raise Stopped(self.stop_reason)
        minutes = self.budget.minutes
        if minutes is not None and time.monotonic() - self._started >= 60 * minutes:
            self.stop_reason = self.stop_reason or f"budget: {minutes:g} minutes are over"
            raise Stopped(self.stop_reason)
        self.counts.planned += 1
        self.display.planned(job)

    def _write(self, job: Job, row: Row) -> Row:
        row = row | {"row_id": self.sink.append(row)}
        self.counts.by_reason[row["reason_code"]] += 1
        self.display.ended(job, row)
        return row

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() or bool(self.stop_reason)

    def _open_searches(self, streams: list[Stream], owners: dict[asyncio.Task[None], Stream]) -> None:
        """One of each stream in turn, until every one has as many open as its devices can use."""
        rooms = {id(s): s.room() for s in streams}
        rooms = {name: max(room * self.ahead, self.width) if room else 0 for name, room in rooms.items()}
        while able := [s for s in streams if not s.exhausted and s.num_open < rooms[id(s)]]:
            for stream in able:
                search = next(stream.searches, None)
                if search is None:
                    stream.exhausted = True
                    continue
                stream.num_open += 1
                owners[asyncio.ensure_future(self._guarded(search))] = stream

    async def _guarded(self, search: Search) -> None:
        try:
            await search(self.attempt)
        except Stopped as stopped:
            self.stop_reason = self.stop_reason or str(stopped)

    async def _some_end(self, owners: dict[asyncio.Task[None], Stream], stopping: asyncio.Future[Any]) -> None:
        """Waits for the end of a search, for the end of the sweep, or for the time to look at devices again."""
        done, _ = await asyncio.wait({*owners, stopping}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for task in [owner for owner in owners if owner in done]:
            owners.pop(task).num_open -= 1
            task.result()  # a fault of a search is a fault of ours
