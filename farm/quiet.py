"""Keeps other work away from the cores while something is timed on them: many may work, or one may measure. Times nothing.

The locks are files that every farm of this machine takes, whoever started it, and that the system lets go of when a process
dies. A gate keeps measuring from waiting for ever: who wants to measure holds it while those who work inside finish, and no
new one enters.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: Between looks at a lock that somebody else holds.
LOOK_S = 0.02


class StillBusy(Exception):
    """Somebody else works or measures there for as long as this process may wait. The message says who, as far as known."""


def _open(name: str) -> int:
    """A lock file that other users may take as well."""
    path = Path(os.environ.get("FARM_LOCKS") or tempfile.gettempdir()) / f"kernel-farm-{name}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # made by another user under a narrow umask: reading is enough to lock
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o666)
    return fd


@contextlib.contextmanager
def _held(name: str, how: int, until: float = math.inf) -> Iterator[int]:
    """The lock, as a descriptor. Raises StillBusy when it is not free by `until` (of time.monotonic)."""
    fd = _open(name)
    try:
        _take(fd, how, until)
        yield fd
    finally:
        os.close(fd)


def _take(fd: int, how: int, until: float) -> None:
    if until == math.inf:
        return fcntl.flock(fd, how)
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        if time.monotonic() > until:
            raise StillBusy
        time.sleep(LOOK_S)


@contextlib.contextmanager
def working(device: str = "cpu", patience_s: float = math.inf) -> Iterator[None]:
    """Held while a compiler runs, or a candidate is judged. Raises StillBusy after so many seconds of waiting."""
    until = time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        with _told_who(device), _held(f"{device}-gate", fcntl.LOCK_SH, until):
            stack.enter_context(_held(device, fcntl.LOCK_SH, until))
        yield


@contextlib.contextmanager
def measuring(device: str = "cpu", patience_s: float = math.inf) -> Iterator[None]:
    """Held for the whole of one measurement, rivals included. Raises StillBusy after so many seconds of waiting."""
    until = time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        with _told_who(device):
            stack.enter_context(_held(f"{device}-gate", fcntl.LOCK_EX, until))
            room = stack.enter_context(_held(device, fcntl.LOCK_EX, until))
        _sign(room, str(os.getpid()))
        try:
            yield
        finally:
            _sign(room, "")


def _sign(room: int, text: str) -> None:
    """Who measures is written into the lock's file, for those who wait."""
    with contextlib.suppress(OSError):  # another user's file that this one may only read
        os.ftruncate(room, 0)
        os.pwrite(room, text.encode(), 0)


@contextlib.contextmanager
def _told_who(device: str) -> Iterator[None]:
    """Says in a StillBusy who was in the way."""
    try:
        yield
    except StillBusy:
        raise StillBusy(_who(device)) from None


def _who(device: str) -> str:
    room = _open(device)
    try:
        pid = os.pread(room, 32, 0).decode(errors="replace").strip()
    finally:
        os.close(room)
    if pid.isdigit() and Path(f"/proc/{pid}").exists():
        return f"process {pid} measures on {device}"
    return f"others compile or judge on {device}"
