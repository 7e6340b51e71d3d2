"""Where a catalog lies: any pyarrow file system behind seven operations with durable, atomic writes. Knows no row.

To add a kind of storage, give its pyarrow file system to `Location`; object stores go in `_ATOMIC_PUT` when their upload of a
whole object is atomic.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import secrets
import unicodedata
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from catalog.errors import LocationError, storage_errors

#: pyarrow type names of stores where a reader sees a whole object or none.
_ATOMIC_PUT = ("s3", "gcs", "abfs")
TEMPORARY = ".tmp-"
#: What file systems without hard links answer.
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: size in bytes, time of its last change (None where the store does not say)."""

    name: str
    size: int
    modified: dt.datetime | None


class Location:
    """A folder on a file system. Names are relative, with `/` between parts.

    local: the folder as a Path where it is on this machine's file system, else None.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str, uri: str) -> None:
        self.filesystem = filesystem
        self.path = path.rstrip("/") or path
        self.uri = uri
        self.local = Path(self.path) if isinstance(filesystem, pafs.LocalFileSystem) else None

    @staticmethod
    def of(uri: str | os.PathLike[str]) -> Location:
        """A local path, file:// or another URI of pyarrow.fs (s3://, gs://, abfs://). Touches nothing. Raises LocationError."""
        text = os.fspath(uri)
        _check_text(text)
        if "://" not in text:
            local = _local_path(text)
            return Location(pafs.LocalFileSystem(), local, local)
        if not urllib.parse.urlsplit(text).netloc and not urllib.parse.urlsplit(text).path.strip("/"):
            raise LocationError(f"catalog: {text!r} names no bucket and no folder")
        try:
            filesystem, path = pafs.FileSystem.from_uri(_impatient(text))
            _check_text(path)
        except LocationError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            raise LocationError(
                f"catalog: cannot use {text!r} ({reason}); expected a path, file://, s3://, gs:// or abfs://"
            ) from None
        return Location(filesystem, path, text)

    def at(self, name: str) -> str:
        """The full path of a name, for messages and for the file system."""
        return f"{self.path}/{name}" if name else self.path

    def files(self, folder: str) -> list[Entry]:
        """Files directly in a folder, temporary ones left out; none when the folder does not exist."""
        with storage_errors("listing", self.at(folder)):
            if self.local is not None:
                return _list_local(self.local / folder)
            infos = self.filesystem.get_file_info(pafs.FileSelector(self.at(folder), allow_not_found=True))
        files = (i for i in infos if i.type == pafs.FileType.File and not i.base_name.startswith(TEMPORARY))
        return [Entry(i.base_name, i.size, i.mtime) for i in files]

    def walk(self, folder: str) -> list[Entry]:
        """Files at any depth, names relative to the folder, temporary ones included."""
        with storage_errors("listing", self.at(folder)):
            infos = self.filesystem.get_file_info(pafs.FileSelector(self.at(folder), allow_not_found=True, recursive=True))
        prefix = len(self.at(folder)) + 1
        return [Entry(i.path[prefix:], i.size, i.mtime) for i in infos if i.type == pafs.FileType.File]

    def exists(self, name: str) -> bool:
        if self.local is not None:
            return (self.local / name).exists()
        with storage_errors("looking", self.at(name)):
            return bool(self.filesystem.get_file_info(self.at(name)).type != pafs.FileType.NotFound)

    def read(self, name: str) -> bytes:
        """All bytes. Raises FileNotFoundError."""
        with storage_errors("reading", self.at(name)):
            if self.local is not None:
                return (self.local / name).read_bytes()
            with self.filesystem.open_input_file(self.at(name)) as file:
                return bytes(file.read())

    def open_ranges(self, name: str) -> RangeReader:
        """A file for reading pieces of it. Raises FileNotFoundError."""
        with storage_errors("opening", self.at(name)):
            return RangeReader(self.at(name), self.filesystem if self.local is None else None)

    def put_new(self, name: str, data: bytes, check: Callable[[bytes], None] | None = None) -> bool:
        """Stores a whole file under a name that is not taken, durably. False, and nothing changed, where the name is taken.

        check gets the bytes as read back and raises where they are bad: then the name stays free.
        """
        with storage_errors("writing", self.at(name)):
            return (
                self._put_local(name, data, check, new=True)
                if self.local is not None
                else self._put_remote(name, data, check, new=True)
            )

    def replace(self, name: str, data: bytes) -> None:
        """Stores a whole file whether or not the name is taken; readers see the old bytes or the new ones."""
        with storage_errors("writing", self.at(name)):
            if self.local is not None:
                self._put_local(name, data, None, new=False)
            else:
                self._put_remote(name, data, None, new=False)

    def delete(self, name: str) -> None:
        """Removes a file; no error when it is gone already."""
        with storage_errors("deleting", self.at(name)), contextlib.suppress(FileNotFoundError):
            if self.local is not None:
                os.unlink(self.local / name)
            else:
                self.filesystem.delete_file(self.at(name))

    def _put_local(self, name: str, data: bytes, check: Callable[[bytes], None] | None, *, new: bool) -> bool:
        assert self.local is not None
        final = self.local / name
        make_folder(final.parent)
        temporary = final.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(temporary.read_bytes())
            if new:
                _link_new(temporary, final)
            else:
                os.replace(temporary, final)
            sync_folder(final.parent)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _put_remote(self, name: str, data: bytes, check: Callable[[bytes], None] | None, *, new: bool) -> bool:
        """Two writers of one name at once: the later wins. Names hold the hash of the bytes, so that both wrote the same."""
        if new and self.exists(name):
            return False
        atomic = self.filesystem.type_name in _ATOMIC_PUT
        folder = name.rpartition("/")[0]
        if not atomic:
            self.filesystem.create_dir(self.at(folder), recursive=True)
        written = name if atomic else f"{folder}/{TEMPORARY}{secrets.token_hex(8)}".lstrip("/")
        try:
            with self.filesystem.open_output_stream(self.at(written)) as file:
                file.write(data)
            if check is not None:
                check(self.read(written))
            if not atomic:
                self.filesystem.move(self.at(written), self.at(name))
        except BaseException:
            with contextlib.suppress(OSError, pa.ArrowException):
                self.filesystem.delete_file(self.at(written))
            raise
        return True


_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "http", "https")
#: Of a name between slashes, in bytes, on every file system of Linux; and of a whole path.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def _check_text(text: str) -> None:
    """Raises LocationError for what is a slip of the pen, whatever the file system would make of it."""
    if not text.strip():
        raise LocationError("catalog: expected a path or a URI, found an empty text")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise LocationError(f"catalog: expected a path or a URI without control characters, in UTF-8, found {text!r}")
    scheme, colon, rest = text.partition(":")
    if colon and scheme in _SCHEMES and not rest.startswith("//"):
        raise LocationError(f"catalog: expected {scheme}://..., found {text!r}; a folder of that name is ./{text}")


def _local_path(text: str) -> str:
    """The absolute path of a folder."""
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError:  # no such user
        raise LocationError(
            f"catalog: {text!r}: nobody of that name has a home folder; a folder of that name is ./{text}"
        ) from None
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if longest > _LONGEST_NAME or len(os.fsencode(path)) > _LONGEST_PATH:
        limits = f"names of at most {_LONGEST_NAME} bytes in a path of at most {_LONGEST_PATH}"
        raise LocationError(f"catalog: expected {limits}, found {text[:60]!r}...")
    return str(path)


def _impatient(uri: str) -> str:
    """pyarrow asks Google's servers for 15 minutes before it says that it was not let in."""
    if not uri.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds=30"


def _link_new(temporary: Path, final: Path) -> None:
    """Gives a file its name; raises FileExistsError when it is taken, which a rename does not."""
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if final.exists():
            raise FileExistsError from None
        os.rename(temporary, final)


class RangeReader:
    """An open file of which any piece can be read; threads may share it."""

    def __init__(self, path: str, filesystem: pafs.FileSystem | None) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if filesystem is None else -1
        self._file = None if filesystem is None else filesystem.open_input_file(path)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the file's end."""
        with storage_errors("reading", self._path):
            data: bytes = os.pread(self._descriptor, size, offset) if self._file is None else self._file.read_at(size, offset)
            return data

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
        elif self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def _list_local(folder: Path) -> list[Entry]:
    try:
        with os.scandir(folder) as entries:
            return [_local_entry(e) for e in entries if not e.name.startswith(TEMPORARY) and e.is_file()]
    except FileNotFoundError:
        return []


def _local_entry(entry: os.DirEntry[str]) -> Entry:
    try:
        stat = entry.stat()
    except FileNotFoundError:  # deleted since it was listed; whoever reads it finds out
        return Entry(entry.name, 0, None)
    return Entry(entry.name, stat.st_size, dt.datetime.fromtimestamp(stat.st_mtime, dt.UTC))


def read_small(path: Path, most: int = 16 << 20) -> bytes:
    """The bytes of a file that a person writes. Raises OSError, also for one that is larger, such as a device without an end."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def make_folder(folder: Path) -> None:
    """A folder and its parents, durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable; some file systems have no such call."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
