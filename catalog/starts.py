"""Starts of sweeps: a later start of one fences the earlier ones that may still be writing. Writes no row, ends no process."""

from __future__ import annotations

import datetime as dt
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from catalog import marks
from catalog.errors import FencedRun
from catalog.locations import Location
from generator.canonical import digest

STARTS = "starts"


@dataclass(frozen=True, slots=True)
class Process:
    """Which process of which machine: enough to tell later, on that machine, that it is gone for good."""

    machine: str
    pid: int
    started: int

    @staticmethod
    def current() -> Process:
        return Process(_machine(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def is_gone(self) -> bool:
        """Only where it can be known: on its own machine, since that was booted, among the same processes."""
        return self.machine == _machine() and _started(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a sweep. where: what it runs on; starts of one sweep on different machines of their own do not meet."""

    run_id: str
    sweep_id: str
    where: str
    process: dict[str, str | int] = field(default_factory=dict)
    started_at: str = ""

    @property
    def is_gone(self) -> bool:
        return Process(**self.process).is_gone  # type: ignore[arg-type]


def take_over(location: Location, run_id: str, sweep_id: str, where: str, fence: Callable[[str], None]) -> tuple[str, ...]:
    """Notes a start, and fences every earlier one of this sweep that neither ended nor is known to be dead: their run ids.

    The order of starts is counted, no clock decides it. Raises FencedRun when an even later start got there first.
    """
    folder = f"{STARTS}/{digest([sweep_id, where])[:16]}"
    known = sorted(entry.name for entry in location.files(folder) if entry.name.endswith(".json"))
    number = int(known[-1].partition(".")[0]) + 1 if known else 1
    mine = f"{number:08d}.{run_id}.json"
    process = Process.current()
    started_at = dt.datetime.now(dt.UTC).isoformat()
    plain: dict[str, str | int] = {"machine": process.machine, "pid": process.pid, "started": process.started}
    marks.write(location, f"{folder}/{mine}", Start(run_id, sweep_id, where, plain, started_at))
    names = sorted(entry.name for entry in location.files(folder) if entry.name.endswith(".json"))
    if names[-1] != mine:
        raise FencedRun(f"run_id: {run_id} was superseded while it started, by {names[-1]}")
    ended = {entry.name.removesuffix(".json") for kind in (marks.RUNS, marks.FENCES) for entry in location.files(kind)}
    fenced = []
    for name in names[:-1]:
        try:
            start = Start(**marks.read(location, f"{folder}/{name}"))
        except FileNotFoundError:
            continue  # another start saw that it had ended
        if start.run_id not in ended and not start.is_gone:
            fence(start.run_id)
            fenced.append(start.run_id)
    _forget(location, folder, names[:-1], ended)
    return tuple(fenced)


def is_fenced(location: Location, run_id: str) -> bool:
    return location.exists(f"{marks.FENCES}/{run_id}.json")


def _forget(location: Location, folder: str, names: list[str], ended: set[str]) -> None:
    """Of starts that ended or were fenced before now, the file is of no more use."""
    for name in names:
        if name.removesuffix(".json").partition(".")[2] in ended:
            location.delete(f"{folder}/{name}")


def _machine() -> str:
    """This host since its last start, and the set of processes that can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {os.getppid()}"
    return f"{socket.gethostname()} {boot} {space}"


def _started(pid: int) -> int | None:
    """When a living process started, in ticks since boot; None for one that is gone or only waits to be collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
