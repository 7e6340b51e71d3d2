"""Everything said to a model and answered by it, on disk, so that no answer is asked for twice and a run can be replayed.

Not a cache that may forget: an answer is durable before anyone acts on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from generator.authors.exchange import Exchange, Request, exchange_from_plain
from generator.canonical import canonical_json, digest_text
from generator.feedback import Feedback


class TranscriptError(ValueError):
    """A stored exchange that cannot be read, or is not what its name says."""


class TranscriptStore:
    """A folder of exchanges named by their request's hash: `answers/HASH.json`, `asked/HASH.TRY` for each try of which nothing
    was heard yet, and `feedback/HASH.json` for what was said to an answer of a problem.

    Safe with several processes: files appear whole or not at all, and the first answer to a request stays.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._answers = self.folder / "answers"
        self._asked = self.folder / "asked"
        self._feedback = self.folder / "feedback"

    def get(self, request: Request) -> Exchange | None:
        """The stored answer to this request, checked against its name."""
        return self.exchange(request.hash)

    def exchange(self, request_hash: str) -> Exchange | None:
        """The stored exchange of a request's hash."""
        return self._read(self._answers / f"{request_hash}.json")

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

    def put(self, exchange: Exchange, mark: Path | None = None) -> str:
        """Store an answer durably; the first one to a request wins. Returns the SHA-256 of the stored text."""
        text = canonical_json(exchange)
        path = self._answers / f"{exchange.request.hash}.json"
        if not path.exists():
            self._write(path, text, keep_first=True)
        if mark is not None:
            self.settle(mark)
        return digest_text(text)

    def get_feedback(self, name: str) -> Feedback | None:
        """What was fed back under a name (64 hex digits: of an exchange and its problem), or None."""
        path = self._feedback / f"{name}.json"
        try:
            return Feedback(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise TranscriptError(f"{path}: not a stored feedback ({error}); delete the file to have it judged again") from None

    def put_feedback(self, name: str, feedback: Feedback) -> None:
        """Store what is fed back, durably; the first one stays."""
        path = self._feedback / f"{name}.json"
        if not path.exists():
            self._write(path, canonical_json(feedback), keep_first=True)

    def unsettled(self) -> int:
        """Tries that were sent, by anyone, and of which nothing was heard: those in flight, and those perhaps paid in vain."""
        return len(os.listdir(self._asked)) if self._asked.is_dir() else 0

    def exchanges(self) -> Iterator[Exchange]:
        """Every stored exchange, in the order of its request's hash."""
        for path in sorted(self._answers.glob("*.json")):
            exchange = self._read(path)
            if exchange is not None:
                yield exchange

    def _read(self, path: Path) -> Exchange | None:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        try:
            exchange = exchange_from_plain(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise TranscriptError(
                f"{path}: not a stored exchange ({error}); delete the file to have it asked for again"
            ) from None
        if exchange.request.hash != path.stem:
            raise TranscriptError(f"{path}: holds the answer to another request; delete the file to have it asked for again")
        return exchange

    def _write(self, path: Path, text: str, keep_first: bool = False) -> None:
        """The whole file, durably. Raises TranscriptError where the folder cannot be written."""
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
            _write_synced(temporary, text)
            if keep_first:
                _link_new(temporary, path)
            else:
                os.replace(temporary, path)
            _sync_folder(path.parent)


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
