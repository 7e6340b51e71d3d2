"""A lock that is free in a forked child, whichever thread held it: that thread does not live there. Guards nothing itself."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkLock:
    """As threading.Lock in a `with`. What it guards has to be whole whenever Python code of another thread may run."""

    def __init__(self) -> None:
        self._lock = self._held = threading.Lock()
        _alive.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held = lock

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.release()  # in the child of the thread that held it, the parent's

    def renew(self) -> None:
        self._lock = threading.Lock()


_alive: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in tuple(_alive):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
