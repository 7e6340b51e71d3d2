"""Transcripts with a second copy beside a catalog that lies elsewhere, so that others replay them. Knows no kind of storage.

An answer is on this machine's disk first and elsewhere before anyone acts on it: a kill between the two loses nothing, since the
next start here copies what is missing there. Who starts with an empty folder, on any machine, reads what lies elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from generator.authors.exchange import Exchange, Request
from generator.authors.transcripts import ANSWERS, ASKED, FEEDBACK, TranscriptStore, exchange_of, feedback_of
from generator.feedback import Feedback

_T = TypeVar("_T")
#: Files that travel at a time: each waits for an object store, none needs a processor.
TRAVELLERS = 16
#: Pauses between tries of a copy, in seconds; after the last one its error is raised.
PAUSES_S = (1.0, 4.0)


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Elsewhere(Protocol):
    """A place of files by name, such as `catalog.locations.Location`. `read` raises FileNotFoundError; all raise ValueError or
    OSError when the place cannot be reached.
    """

    def files(self, folder: str) -> Iterable[Named]: ...
    def read(self, name: str) -> bytes: ...
    def put_new(self, name: str, data: bytes) -> bool: ...
    def delete(self, name: str) -> None: ...


class SharedTranscripts(TranscriptStore):
    """The same files in a folder of this machine and, under `prefix`, elsewhere. Close it when nobody asks any more.

    The first answer to a request stays, there too: whoever was later goes by what is there.
    """

    def __init__(self, folder: str | os.PathLike[str], elsewhere: Elsewhere, prefix: str) -> None:
        super().__init__(folder)
        self._elsewhere, self._prefix = elsewhere, prefix
        self._threads = ThreadPoolExecutor(TRAVELLERS, "transcripts")
        self._marks_there: set[str] = set()

    def close(self) -> None:
        """Waits for what is on its way."""
        self._threads.shutdown()

    def catch_up(self) -> None:
        """Copies what an earlier start here was killed before it could copy; counts what others asked without an answer."""
        for kind, folder in ((ANSWERS, self._answers), (FEEDBACK, self._feedback), (ASKED, self._asked)):
            there = {entry.name for entry in self._elsewhere.files(f"{self._prefix}/{kind}")}
            here = set(os.listdir(folder)) if folder.is_dir() else set()
            missing = sorted(name for name in here - there if not name.startswith("."))
            list(self._threads.map(lambda name, kind=kind: self._copy(kind, name), missing))
            if kind == ASKED:
                self._marks_there = there

    async def find(self, request: Request) -> Exchange | None:
        return self.get(request) or await self._apart(self._fetch_answer, request.hash)

    async def announce(self, request: Request) -> Path:
        mark = self.mark_asked(request)
        await self._apart(self._copy, ASKED, mark.name)
        return mark

    async def strike(self, mark: Path) -> None:
        self.settle(mark)
        await self._apart(self._remove_mark, mark.name)

    async def share(self, exchange: Exchange, mark: Path | None = None) -> Exchange:
        name = f"{exchange.request.hash}.json"
        if not await self._apart(self._copy, ANSWERS, name):
            (self._answers / name).unlink()  # somebody elsewhere was faster
            there: Exchange | None = await self._apart(self._fetch_answer, exchange.request.hash)
            exchange = there or exchange
        if mark is not None:
            await self._apart(self._remove_mark, mark.name)
        return exchange

    async def find_feedback(self, name: str) -> Feedback | None:
        return self.get_feedback(name) or await self._apart(self._fetch_feedback, name)

    async def keep_feedback(self, name: str, feedback: Feedback) -> Feedback:
        self.put_feedback(name, feedback)
        if not await self._apart(self._copy, FEEDBACK, f"{name}.json"):
            (self._feedback / f"{name}.json").unlink()
            await self._apart(self._fetch_feedback, name)
        return self.get_feedback(name) or feedback

    def _marks(self) -> set[str]:
        return super()._marks() | self._marks_there

    async def _apart(self, work: Callable[..., _T], *given: str) -> _T:
        """In a thread of its own: a far place is waited for by who asked, not by everyone."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def _copy(self, kind: str, name: str) -> bool:
        """A file of this folder elsewhere; False where another one has that name there. Raises what the last try raised."""
        data, there = (self.folder / kind / name).read_bytes(), f"{self._prefix}/{kind}/{name}"
        for pause_s in PAUSES_S:
            with contextlib.suppress(ValueError, OSError):
                return self._elsewhere.put_new(there, data) or self._elsewhere.read(there) == data
            time.sleep(pause_s)
        return self._elsewhere.put_new(there, data) or self._elsewhere.read(there) == data

    def _remove_mark(self, name: str) -> None:
        self._elsewhere.delete(f"{self._prefix}/{ASKED}/{name}")

    def _fetch_answer(self, request_hash: str) -> Exchange | None:
        name = f"{ANSWERS}/{request_hash}.json"
        text = self._read(name)
        if text is None:
            return None
        exchange = exchange_of(text, request_hash, f"{self._prefix}/{name} of the catalog")
        self.put(exchange)
        return exchange

    def _fetch_feedback(self, name: str) -> Feedback | None:
        text = self._read(f"{FEEDBACK}/{name}.json")
        if text is None:
            return None
        feedback = feedback_of(text, f"{self._prefix}/{FEEDBACK}/{name}.json of the catalog")
        self.put_feedback(name, feedback)
        return feedback

    def _read(self, name: str) -> str | None:
        try:
            return self._elsewhere.read(f"{self._prefix}/{name}").decode("utf-8", "replace")
        except FileNotFoundError:
            return None
