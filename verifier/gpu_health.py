"""Whether a GPU may be used again after a candidate hung or crashed: memory given back, processes gone, a tiny kernel right.

A device that does not come clean is out of service for this process; `check_in_service` says so to whoever asks next. Kills
nothing and resets nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verifier.gpu import GpuUse, NoDevice, use_of, uuid_of

#: How long the driver may take to clear away what a killed process had.
CLEAN_S = 30.0
#: What the driver may keep for itself after the first process that used the device.
ALLOWANCE_BYTES = 64 << 20


class OutOfService(NoDevice):
    """The device failed its health check earlier in this process."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Nothing of the dead candidates is left."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Something is left: `why` in words."""

    why: str


def judge_use(before: GpuUse, now: GpuUse, ours: Iterable[int]) -> Clean | NotYet:
    """Compare the device with what it held before the candidate started. ours: process ids of dead children.

    Memory that other processes took meanwhile is theirs; the rest may exceed the old level by ALLOWANCE_BYTES.
    """
    ours, held = frozenset(ours), dict(before.processes)
    if left := sorted(pid for pid, _ in now.processes if pid in ours):
        return NotYet(f"process {left[0]} was killed and is still on the device")
    others = sum(max(0, size - held.get(pid, 0)) for pid, size in now.processes)
    surplus = now.used_bytes - before.used_bytes - others
    if surplus > ALLOWANCE_BYTES:
        return NotYet(f"{surplus >> 20} MiB more are in use than before the candidate, by no process that is listed")
    return Clean()


def wait_clean(
    before: GpuUse, look: Callable[[], GpuUse], ours: Iterable[int], limit_s: float = CLEAN_S, pause_s: float = 0.1
) -> Clean | NotYet:
    """Look until the device is clean or the limit is over; the last finding."""
    deadline, ours = time.monotonic() + limit_s, frozenset(ours)
    while isinstance(found := judge_use(before, look(), ours), NotYet) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return found


_OUT: dict[str, str] = {}  # UUID -> why


def check_in_service(device: str) -> None:
    """Raises OutOfService for a device that failed its health check."""
    if (why := _OUT.get(uuid_of(device))) is not None:
        raise OutOfService(f"device: {device} is out of service since a candidate failed on it: {why}")


def recover(device: str, before: GpuUse, ours: Iterable[int], alive: Callable[[], str], limit_s: float = CLEAN_S) -> str:
    """After a death or a hang: "" when the device is well, else why it is out of service from now on.

    alive: runs a tiny known good kernel in a fresh child; "" when it was right, else what came instead.
    """
    found = wait_clean(before, lambda: use_of(device), ours, limit_s)
    why = found.why if isinstance(found, NotYet) else alive()
    if why:
        _OUT[uuid_of(device)] = why
    return why


def put_back(device: str) -> None:
    """In service again: a person, or a fresh self-test, says so."""
    _OUT.pop(uuid_of(device), None)
