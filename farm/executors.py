"""What runs jobs: the protocol, and the plain one that works in this process. The one on Ray is in farm/ray_executor.py."""

from __future__ import annotations

import errno
import functools
import importlib
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from catalog.errors import StorageError
from farm.console import InputError
from farm.jobs import STAGES, Built, Job, Row, Shop
from farm.places import Place, places_of
from farm.quiet import StillBusy

UNVERIFIED = "no device here can run this target"


class NoExecutor(Exception):
    """What was to run jobs could not be started: why, in one sentence."""


class StartInterrupted(BaseException):
    """A signal came while what runs jobs was being started, for seconds: its name."""


class Executor(Protocol):
    """Takes jobs and gives rows: always a row, whatever happens to who works on it."""

    @property
    def capacity(self) -> int:
        """Jobs that may be in hand at a time so that nothing waits for work."""
        ...

    @property
    def settled(self) -> bool:
        """Whether every device that there is has said what it is, or that it cannot serve."""
        ...

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        """Each target on every kind of device in service that judges it; grows while devices join."""
        ...

    def room(self, place: Place) -> int:
        """Searches of a place that may be open at a time: none while it has no device in service."""
        ...

    def submit(self, job: Job) -> Future[Row]:
        """Raises NoExecutor, StartInterrupted."""
        ...

    def state(self) -> dict[str, Any]:
        """What is going on, for the display: plain values."""
        ...

    def close(self) -> None:
        """Drops what is in hand and ends every process that was started for it."""
        ...


def stages_of(shop: Shop) -> Any:
    """The module that does the work of a shop."""
    return importlib.import_module(shop.stages)


def check_stages(name: str) -> None:
    """Raises InputError for a module that is not there, or does no work of the kind."""
    try:
        lacking = [part for part in ("build", "prove", "row_without_verdict") if not hasattr(importlib.import_module(name), part)]
    except (ImportError, TypeError, ValueError) as error:  # TypeError: of a name that begins with a dot
        raise InputError("--stages", f"expected a module such as {STAGES}, found {name!r}: {error}") from None
    if lacking:
        raise InputError("--stages", f"expected a module such as {STAGES}, found {name!r}, which has no {', no '.join(lacking)}")


#: How the message of a row begins that ended because a disk is full: nothing else would end otherwise.
NO_SPACE = "no space left"


def trouble_of(error: BaseException) -> str:
    """A fault of our own as one sentence with the place where it happened; or a full disk, which is nobody's."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{NO_SPACE} for {error.filename or 'a file'}: make room, and start the same command again"
    if isinstance(error, StorageError):
        return f"{NO_SPACE}, or no way to the catalog: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"fault of the farm's own: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{place}"


def run_stages(job: Job, shop: Shop, say: Callable[[str], None] = lambda who: None) -> Row:
    """Build and prove one job here. A fault of our own code costs this one attempt, not the sweep.

    say: told who keeps the device busy, each time that this waited for them in vain.
    """
    stages = stages_of(shop)
    try:
        built = stages.build(job, shop)
        if not isinstance(built, Built):
            return built
        device = next((d.device for d in stages.devices() if d.key == job.device_key and job.target in d.targets), None)
        if device is None:
            return stages.row_unproven(built, "compiled_unverified", UNVERIFIED)
        if problems := _inspected(device, shop):
            return stages.row_unproven(built, "missing_device", f"{device} is out of service: {problems[0]}")
        while True:
            try:
                return stages.prove(built, shop, device)
            except StillBusy as busy:
                say(str(busy))
                built.columns["queue_s"] = built.columns.get("queue_s", 0.0) + shop.slot_wait_s
    except Exception as error:
        return stages.row_without_verdict(job, "not_run", trouble_of(error))


@functools.lru_cache(maxsize=8)
def _inspected(device: str, shop: Shop) -> tuple[str, ...]:
    """What keeps a device of this machine from serving; asked once a process."""
    problems: tuple[str, ...] = stages_of(shop).inspect_device(device, shop)[1]
    return problems


class LocalExecutor:
    """One job at a time on a thread of this process: for debugging, tests, and machines without Ray."""

    capacity = 2
    settled = True

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Row]] | None] = queue.SimpleQueue()
        self._current = self._waits_for = ""
        self._thread = threading.Thread(target=self._work, name="farm-local", daemon=True)
        self._thread.start()

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        return places_of(targets, stages_of(self._shop).devices())

    def room(self, place: Place) -> int:
        return self.capacity

    def submit(self, job: Job) -> Future[Row]:
        future: Future[Row] = Future()
        self._jobs.put((job, future))
        return future

    def state(self) -> dict[str, Any]:
        return {"executor": "local", "running": self._current, "waits_for": self._waits_for}

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if future.set_running_or_notify_cancel():
                self._current = str(job)
                try:
                    future.set_result(run_stages(job, self._shop, self._wait_for))
                except Exception as error:  # not even a row could be made: the sweep ends with it rather than wait for ever
                    future.set_exception(error)
                self._current = self._waits_for = ""

    def _wait_for(self, who: str) -> None:
        self._waits_for = who
