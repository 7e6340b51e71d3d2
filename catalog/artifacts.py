"""Content-addressed bytes beside the rows: TL, sources, binaries, logs; a name is their SHA-256, checked on reading. No rows."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from pathlib import Path

from catalog.errors import CatalogError, DamagedFile
from catalog.locations import Entry, Location
from generator.canonical import digest_bytes

FOLDER = "artifacts"
_NAME = re.compile(r"[0-9a-f]{64}")
#: An artifact on an object store that is older than this is stored again when it is put again, so that gc sees it as fresh.
_REFRESH = dt.timedelta(hours=1)


class Artifacts:
    """The artifacts of one catalog. `put` before the row that names them is appended."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def put(self, data: bytes | str) -> str:
        """Stores bytes, or text as UTF-8, durably, once; gives their hash. A damaged copy under that name is mended."""
        data = data.encode() if isinstance(data, str) else bytes(data)
        name = digest_bytes(data)
        if not self._location.put_new(_file(name), data):
            self._keep(name, data)
        return name

    def get(self, name: str) -> bytes:
        """The bytes of a hash. Raises CatalogError when there are none, DamagedFile when they are not what was stored."""
        try:
            data = self._location.read(_file(_checked(name)))
        except FileNotFoundError:
            raise CatalogError(f"artifact {name}: not in {self._location.uri}") from None
        if digest_bytes(data) != name:
            raise DamagedFile(
                f"{self._location.at(_file(name))}: the bytes do not have the hash of its name; delete it and make the row again"
            )
        return data

    def text(self, name: str) -> str:
        """The artifact as text; bytes that are no UTF-8 are replaced."""
        return self.get(name).decode(errors="replace")

    def exists(self, name: str) -> bool:
        return self._location.exists(_file(_checked(name)))

    def path(self, name: str) -> str:
        """Where it lies, for people and for `local_path` users; whether it is there or not."""
        return self._location.at(_file(_checked(name)))

    def local_path(self, name: str) -> Path | None:
        """Its path on this machine's file system; None on any other location."""
        return None if self._location.local is None else self._location.local / _file(_checked(name))

    def entries(self) -> list[Entry]:
        """All artifacts, by hash; files with other names are left out."""
        found = ((entry, entry.name.rpartition("/")[2]) for entry in self._location.walk(FOLDER))
        return [Entry(name, entry.size, entry.modified) for entry, name in found if _NAME.fullmatch(name)]

    def delete(self, name: str) -> None:
        self._location.delete(_file(_checked(name)))

    def _keep(self, name: str, data: bytes) -> None:
        """An artifact that is there already: mended when damaged, and made fresh, so that gc leaves it for the row to come."""
        try:
            sound = self._location.read(_file(name)) == data
        except FileNotFoundError:
            sound = False
        path = self.local_path(name)
        if sound and path is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        elif not sound or self._is_old(name):
            self._location.replace(_file(name), data)

    def _is_old(self, name: str) -> bool:
        modified = self._location.filesystem.get_file_info(self._location.at(_file(name))).mtime
        return modified is not None and dt.datetime.now(dt.UTC) - modified > _REFRESH


def _file(name: str) -> str:
    """Two levels of folders, so that no folder holds more than a few hundred files of a million."""
    return f"{FOLDER}/{name[:2]}/{name[2:4]}/{name}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CatalogError(f"artifact: expected 64 hex digits (a SHA-256), found {name!r}")
    return name
