"""What can go wrong between a catalog and its user, by kind. Every message names the file or field and the cure."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import pyarrow as pa


class CatalogError(ValueError):
    """The base of all errors of the catalog."""


class LocationError(CatalogError):
    """A location that is wrong, or holds no catalog. Nothing was created there."""


class StorageError(CatalogError):
    """The file system refused: disk full, no permission, unreachable. What was stored before is whole."""


class DamagedFile(CatalogError):
    """Bytes on disk are not those that were written: names the file."""


class NewerSchema(CatalogError):
    """A file that a later version of this program wrote."""


class FencedRun(CatalogError):
    """A writer of a run that another one has superseded."""


class QueryError(CatalogError):
    """A filter, column or row id that cannot be used."""


_ADVICE = {
    errno.ENOSPC: "the disk is full; make room and start again",
    errno.EDQUOT: "the disk quota is used up; make room and start again",
    errno.EACCES: "no permission; check owner and mode of the folder",
    errno.EPERM: "not permitted; check owner and mode of the folder",
    errno.EROFS: "the file system is read-only; choose another location for writing",
}


def first_line(error: BaseException) -> str:
    """Libraries of object stores say a page, and its beginning says most."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def storage_errors(doing: str, where: str) -> Iterator[None]:
    """Turns an OSError into one StorageError line, but for a file that is not there to be read, which readers handle."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, FileNotFoundError) and doing != "writing":
            raise
        told = getattr(error, "strerror", None) or first_line(error)
        advice = _ADVICE.get(getattr(error, "errno", None) or 0, told)
        raise StorageError(f"{where}: {doing} failed: {advice}; rows and artifacts stored before are whole") from error
