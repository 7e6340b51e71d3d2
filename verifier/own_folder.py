"""Folders of temporary files whose owner may be killed at any moment: held by a lock, which ends with its process, and removed by
the next one that makes such a folder. What nobody ever locked is left alone, and keeps no result.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: A folder gets its name when it is locked; one without has an owner that was killed in between, after so long at the latest.
_UNNAMED_S = 60.0


class OwnFolder:
    """A new folder `farm-NAME-*`, below that of temporary files where no parent is given."""

    def __init__(self, name: str, parent: str | os.PathLike[str] = "") -> None:
        parent = os.fspath(parent) or tempfile.gettempdir()
        _remove_abandoned_once(os.getpid(), name, parent)
        fresh = tempfile.mkdtemp(prefix=f".farm-{name}-", dir=parent)
        self._handle = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it but its owner
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = os.path.join(parent, os.path.basename(fresh)[1:])
        os.rename(fresh, self.path)

    def close(self) -> None:
        """Removes it; what cannot be removed (a busy mount) is left behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


@contextlib.contextmanager
def own_folder(name: str, parent: str | os.PathLike[str] = "") -> Iterator[Path]:
    """The same for as long as a block runs."""
    folder = OwnFolder(name, parent)
    try:
        yield Path(folder.path)
    finally:
        folder.close()


def remove_abandoned(name: str, parent: str | os.PathLike[str]) -> None:
    """Removes this user's folders of that name that nobody holds any more."""
    for entry in list(os.scandir(parent)):
        unnamed = entry.name.startswith(f".farm-{name}-")
        with contextlib.suppress(OSError):  # removed meanwhile, another user's, or no lock can be had
            if not (unnamed or entry.name.startswith(f"farm-{name}-")) or not entry.is_dir(follow_symlinks=False):
                continue
            about = entry.stat(follow_symlinks=False)
            if about.st_uid == os.getuid() and not (unnamed and time.time() - about.st_mtime < _UNNAMED_S):
                _remove_unless_held(entry.path)


def _remove_unless_held(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


@functools.lru_cache(maxsize=64)
def _remove_abandoned_once(process: int, name: str, parent: str) -> None:
    """Once a process: those that are killed from now on are the next one's."""
    with contextlib.suppress(OSError):
        remove_abandoned(name, parent)
