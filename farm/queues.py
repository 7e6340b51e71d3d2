"""What waits in a sweep on Ray, by kind of device: jobs for a builder, built ones for a device. Starts nothing and knows no Ray.

The next job to be built is of the kind whose devices have the least in stock, so that a slow kind never keeps a fast one waiting;
within a kind it is the one with the longest stage ahead, so that no long one is left alone at the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from farm.jobs import Job

#: (target, key of the devices that may judge it; None: none can, it is only built)
Kind: TypeAlias = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Ready:
    """A built job: the parcel that its builder packed and only a device opens, and, where its binary has to travel, a reference
    to its bytes in Ray's object store.
    """

    job: Job
    parcel: bytes
    data: Any = None


def kind_of(job: Job) -> Kind:
    return job.target, job.device_key


def length_of(job: Job) -> tuple[float, int]:
    """Longer stages compare greater: those that measure for longer, then larger problems."""
    spec = job.spec
    return job.measure_s, spec.batch * spec.num_heads * spec.seqlen_q * spec.seqlen_k * (spec.head_dim + spec.head_dim_v)


class Queues:
    """stock: attempts of a kind between the start of their build and their end."""

    def __init__(self) -> None:
        self._jobs: dict[Kind, list[tuple[tuple[float, int], int, Job]]] = {}
        self._numbers = itertools.count()
        self.stock: Counter[Kind] = Counter()
        self.ready: defaultdict[Kind, deque[Ready]] = defaultdict(deque)

    @property
    def num_jobs(self) -> int:
        return sum(len(waiting) for waiting in list(self._jobs.values()))

    @property
    def num_ready(self) -> int:
        return sum(len(waiting) for waiting in list(self.ready.values()))

    def waiting(self) -> dict[Kind, tuple[int, int]]:
        """Kind -> jobs that wait for a builder, and for a device."""
        kinds = dict.fromkeys([*self._jobs, *self.ready])
        found = {kind: (len(self._jobs.get(kind, ())), len(self.ready.get(kind, ()))) for kind in kinds}
        return {kind: counts for kind, counts in found.items() if any(counts)}

    def add(self, job: Job) -> None:
        measure_s, work = length_of(job)
        heapq.heappush(self._jobs.setdefault(kind_of(job), []), ((-measure_s, -work), next(self._numbers), job))

    def next_job(self, num_devices: Mapping[Kind, int], most_each: int) -> Job | None:
        """The job to build now; None where every kind that waits has `most_each` in stock for each of its devices.

        num_devices: those in service. A kind without any is built for as if it had one; what is only built comes last.
        """
        able = []
        for kind in self._jobs:
            devices = max(1, num_devices.get(kind, 0))
            if kind[1] is None:
                able.append((float("inf"), kind))
            elif self.stock[kind] < most_each * devices:
                able.append((self.stock[kind] / devices, kind))
        if not able:
            return None
        kind = min(able, key=lambda pair: pair[0])[1]
        job = heapq.heappop(self._jobs[kind])[2]
        if not self._jobs[kind]:
            del self._jobs[kind]
        self.stock[kind] += 1
        return job

    def put_back(self, built: list[Ready]) -> None:
        """Built jobs that a device gave back: they are the next of their kind."""
        for one in reversed(built):
            self.ready[kind_of(one.job)].appendleft(one)

    def ended(self, job: Job) -> None:
        kind = kind_of(job)
        self.stock[kind] -= 1
        if self.stock[kind] <= 0:
            del self.stock[kind]
