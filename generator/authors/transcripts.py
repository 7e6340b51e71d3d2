"""Everything said to a model and answered by it, on disk, so that no answer is asked for twice and a run can be replayed.

Not a cache that may forget: an answer is durable before anyone acts on it. `shared_transcripts` keeps a second copy elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from generator.authors.exchange import Exchange, Request, exchange_from_plain
from generator.canonical import canonical_json
from generator.feedback import Feedback

ANSWERS, ASKED, FEEDBACK = "answers", "asked", "feedback"


class TranscriptError(ValueError):
    """A stored exchange that cannot be read, or is not what its name says."""


class TranscriptStore:
    """A folder of exchanges named by their request's hash: `answers/HASH.json`, `asked/HASH.TRY` for each try of which nothing
    was heard yet, and `feedback/HASH.json` for what was said to an answer of a problem.

    Safe with several processes: files appear whole or not at all, and the first answer to a request stays. The async methods are
    what authors and clients go by: another store may have to ask another machine there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._answers = self.folder / ANSWERS
        self._asked = self.folder / ASKED
        self._feedback = self.folder / FEEDBACK

    async def find(self, request: Request) -> Exchange | None:
        """The stored answer to this request, wherever it is stored."""
        return self.get(request)

    async def announce(self, request: Request) -> Path:
        """`mark_asked`, where everyone sees it who shares this store."""
        return self.mark_asked(request)

    async def strike(self, mark: Path) -> None:
        """`settle`, where everyone sees it who shares this store."""
        self.settle(mark)

    async def share(self, exchange: Exchange, mark: Path | None = None) -> Exchange:
        """The exchange on record after `put` of one, which is another where somebody was faster: what everyone goes by."""
        return self.get(exchange.request) or exchange

    async def find_feedback(self, name: str) -> Feedback | None:
        """What was fed back under a name, wherever it is stored."""
        return self.get_feedback(name)

    async def keep_feedback(self, name: str, feedback: Feedback) -> Feedback:
        """`put_feedback`, where everyone sees it who shares this store. Gives what is on record then: the first one."""
        self.put_feedback(name, feedback)
        return self.get_feedback(name) or feedback

    def get(self, request: Request) -> Exchange | None:
        """The answer to this request in the folder, checked against its name."""
        return self.exchange(request.hash)

    def exchange(self, request_hash: str) -> Exchange | None:
        """The exchange of a request's hash in the folder."""
        path = self._answers / f"{request_hash}.json"
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        return exchange_of(text, request_hash, str(path))

    def mark_asked(self, request: Request) -> Path:
        """There before a try is sent: a mark that nobody settles counts as perhaps paid. Returns the mark.

        Outlives this process, whatever becomes of it, but not a power cut: only answers are worth waiting for the disk.
        """
        mark = self._asked / f"{request.hash}.{os.getpid()}-{secrets.token_hex(4)}"
        with _named(mark):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return mark

    def settle(self, mark: Path) -> None:
        """What became of that try is known."""
        mark.unlink(missing_ok=True)

    def put(self, exchange: Exchange, mark: Path | None = None) -> None:
        """Store an answer durably; the first one to a request stays. Settles its mark."""
        self._keep(self._answers / f"{exchange.request.hash}.json", canonical_json(exchange))
        if mark is not None:
            self.settle(mark)

    def get_feedback(self, name: str) -> Feedback | None:
        """What was fed back under a name (64 hex digits: of an exchange and its problem), or None."""
        path = self._feedback / f"{name}.json"
        try:
            return feedback_of(path.read_text(), str(path))
        except FileNotFoundError:
            return None

    def put_feedback(self, name: str, feedback: Feedback) -> None:
        """Store what is fed back, durably; the first one stays."""
        self._keep(self._feedback / f"{name}.json", canonical_json(feedback))

    def unsettled(self) -> int:
        """Tries that were sent, by anyone, and of which nothing was heard: those in flight, and those perhaps paid in vain."""
        return len(self._marks())

    def exchanges(self) -> Iterator[Exchange]:
        """Every exchange in the folder, in the order of its request's hash."""
        for path in sorted(self._answers.glob("*.json")):
            exchange = self.exchange(path.stem)
            if exchange is not None:
                yield exchange

    def _marks(self) -> set[str]:
        return set(os.listdir(self._asked)) if self._asked.is_dir() else set()

    def _keep(self, path: Path, text: str) -> None:
        """The whole file, durably, unless it is there. Raises TranscriptError where the folder cannot be written."""
        if path.exists():
            return
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
            _write_synced(temporary, text)
            _link_new(temporary, path)
            _sync_folder(path.parent)


def exchange_of(text: str, request_hash: str, where: str) -> Exchange:
    """A stored exchange, checked against its name. Raises TranscriptError that names the place."""
    try:
        exchange = exchange_from_plain(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TranscriptError(f"{where}: not a stored exchange ({error}); delete the file to have it asked for again") from None
    if exchange.request.hash != request_hash:
        raise TranscriptError(f"{where}: holds the answer to another request; delete the file to have it asked for again")
    return exchange


def feedback_of(text: str, where: str) -> Feedback:
    """A stored feedback. Raises TranscriptError that names the place."""
    try:
        return Feedback(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise TranscriptError(f"{where}: not a stored feedback ({error}); delete the file to have it judged again") from None


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Around the writing of a file: trouble with the folder is one sentence."""
    try:
        yield
    except OSError as error:
        raise TranscriptError(f"{path}: cannot be written: {(error.strerror or str(error)).lower()}") from None


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _link_new(temporary: Path, path: Path) -> None:
    """`path` for the temporary file, unless it is there already."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
