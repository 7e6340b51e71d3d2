"""Keeps compilers away from the cores while something is timed on them: many may compile, or one may measure. Times nothing.

The locks are files that every farm of this machine takes, whoever started it, and that the system lets go of when a process
dies. A gate keeps measuring from waiting for ever: who wants to measure holds it while the compilers that are inside finish,
and no new one enters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def _open(name: str) -> int:
    """A lock file that other users may take as well."""
    path = Path(tempfile.gettempdir()) / f"kernel-farm-{name}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # made by another user under a narrow umask: reading is enough to lock
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o666)
    return fd


@contextlib.contextmanager
def _held(name: str, how: int) -> Iterator[None]:
    fd = _open(name)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def compiling(device: str = "cpu") -> Iterator[None]:
    """Held while a compiler runs."""
    with _held(f"{device}-gate", fcntl.LOCK_SH):
        room = _open(device)
        fcntl.flock(room, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(room)


@contextlib.contextmanager
def measuring(device: str = "cpu") -> Iterator[None]:
    """Held for the whole of one measurement, rivals included."""
    with _held(f"{device}-gate", fcntl.LOCK_EX), _held(device, fcntl.LOCK_EX):
        yield
