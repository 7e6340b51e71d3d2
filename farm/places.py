"""Places: a target together with one kind of device that judges it. A problem is solved once for each: times do not travel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from farm.devices import LocalDevice
from farm.jobs import Job, Row
from generator.canonical import digest


@dataclass(frozen=True, slots=True)
class Place:
    """device_key: of the devices that may judge; None where none can: then binaries are built and kept, unverified.

    arch: what source is compiled for instead of the target, so that a newer card can check it.
    """

    target: str
    device_key: str | None = None
    device_class: str = ""
    arch: str | None = None

    def __str__(self) -> str:
        return f"{self.target} on {self.device_class}" if self.device_class else self.target

    def put(self, job: Job) -> Job:
        """The job here: the same program on another kind of device is another attempt."""
        return replace(job, key=digest([job.key, self.device_key]), device_key=self.device_key, arch=self.arch)


@dataclass(frozen=True, slots=True)
class AttemptsAt:
    """Asks for attempts at one place: what a search is given."""

    place: Place
    attempt: Callable[[Job], Awaitable[Row]]

    def __call__(self, job: Job) -> Awaitable[Row]:
        return self.attempt(self.place.put(job))


def places_of(targets: tuple[str, ...], devices: tuple[LocalDevice, ...]) -> tuple[Place, ...]:
    """Targets in their order, each on every kind of device that is its own; else on one that checks it; else on none."""
    found: list[Place] = []
    for target in targets:
        own = [Place(target, d.key, d.device_class) for d in devices if target in d.targets and target not in d.borrowed]
        lent = [Place(target, d.key, d.device_class, d.arch) for d in devices if target in d.borrowed]
        found += own or lent[:1] or [Place(target)]
    return tuple(dict.fromkeys(found))
