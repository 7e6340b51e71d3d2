"""Runs jobs on Ray: builders and one actor a device, bounded queues, every loss a row. Decides nothing about what to try.

One thread owns all of it. A job is built by a task (any builder, one CPU), then waits for a device that can run its target, which
has at most one job running and one queued. Whatever dies, its job ends as a row `lost_node`; the scheduler tries it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from farm import actors
from farm.actors import ray, start_session
from farm.devices import devices_here
from farm.executors import stages_of
from farm.jobs import Built, Job, Row, Shop

__all__ = ["DeviceWish", "RayExecutor", "local_wishes", "start_session"]

TICK_S = 0.1
QUEUED_PER_DEVICE = 2  # one running, one waiting
STRIKES = 3  # deaths in a row without a finished job, after which a device is out of service
HELLO_S = 300.0  # for a device to start and pass its self-test
GRACE_S = 90.0  # beyond the limits that stages keep themselves: a second wall


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """A device to put an actor on: the targets that it can judge, and what Ray has to give for it."""

    device: str  # as its own actor names it: "cpu", and "cuda:0" whichever GPU Ray gave it
    targets: tuple[str, ...]
    archs: tuple[tuple[str, str], ...] = ()  # of these, targets of older cards, and what their source is compiled for
    options: tuple[tuple[str, Any], ...] = (("num_cpus", 0),)


def local_wishes(targets: tuple[str, ...]) -> tuple[DeviceWish, ...]:
    """The devices of this machine that a plan's targets can use."""
    useful = (d for d in devices_here() if set(targets) & set(d.targets))
    return tuple(
        DeviceWish("cpu", d.targets)
        if d.device == "cpu"
        else DeviceWish("cuda:0", d.targets, tuple((t, d.arch) for t in d.borrowed), (("num_gpus", 1), ("num_cpus", 1)))
        for d in useful
    )


@dataclass(slots=True)
class _Slot:
    """One device in service: its actor and what it has in hand, in the order given."""

    wish: DeviceWish
    actor: Any
    ready: bool = False
    hello: Any = None  # the reference, until the answer is there
    about: actors.Hello | None = None
    tasks: dict[Any, Built] = field(default_factory=dict)
    deadline: float = 0.0
    strikes: int = 0
    out_of_service: str = ""
    busy_s: float = 0.0


@dataclass(slots=True)
class _Building:
    job: Job
    deadline: float


class RayExecutor:
    def __init__(self, shop: Shop, wishes: tuple[DeviceWish, ...], num_builders: int) -> None:
        self._shop, self._num_builders = shop, max(1, num_builders)
        self._stages = stages_of(shop)
        self._lock = threading.Condition()
        self._todo: deque[Job] = deque()
        self._futures: dict[str, Future[Row]] = {}
        self._building: dict[Any, _Building] = {}
        self._built: deque[Built] = deque()
        self._slots = [self._open(wish) for wish in wishes]
        self._closed = False
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="farm-ray", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------- called by others

    @property
    def capacity(self) -> int:
        return 2 * self._num_builders + (QUEUED_PER_DEVICE + 1) * max(1, len(self._slots))

    def submit(self, job: Job) -> Future[Row]:
        future: Future[Row] = Future()
        with self._lock:
            assert job.key not in self._futures, "one attempt of a key at a time"
            self._futures[job.key] = future
            self._todo.append(job)
            self._lock.notify()
        return future

    def busy_s(self) -> float:
        """Seconds that devices worked on candidates so far, all together."""
        return sum(s.busy_s for s in self._slots)

    def state(self) -> dict[str, Any]:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        devices = [
            {
                "device": s.wish.device,
                "targets": list(s.wish.targets),
                "about": s.about.description if s.about else "",
                "out_of_service": s.out_of_service,
                "in_hand": len(s.tasks),
                "busy": round(s.busy_s / elapsed, 3),
            }
            for s in self._slots
        ]
        return {
            "executor": "ray",
            "waiting": len(self._todo),
            "building": len(self._building),
            "built": len(self._built),
            "devices": devices,
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(10)
        for slot in self._slots:
            ray.kill(slot.actor, no_restart=True)
        for ref in self._building:
            ray.cancel(ref, force=True)

    def end_session(self) -> None:
        actors.stop_session()

    # ------------------------------------------------------------------------------------------------ the one thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                if not self._todo and not self._building and not self._built and not any(s.tasks or s.hello for s in self._slots):
                    self._lock.wait(1.0)
            self._give_out()
            self._collect()
            self._check_deadlines()

    def _give_out(self) -> None:
        devices = sum(not s.out_of_service for s in self._slots)
        while self._todo and len(self._building) < self._num_builders and len(self._built) < self._num_builders + 2 * devices:
            with self._lock:
                job = self._todo.popleft()
            ref = actors.build.remote(replace(job, arch=self._arch_for(job.target)), self._shop)
            self._building[ref] = _Building(job, time.monotonic() + self._shop.compile_wall_s + GRACE_S)
        for _ in range(len(self._built)):
            self._place(self._built.popleft())

    def _place(self, built: Built) -> None:
        """To the least loaded device that can run the target; back into the queue while all are busy; a row where none is."""
        able = [s for s in self._slots if built.job.target in s.wish.targets]
        serving = [s for s in able if not s.out_of_service]
        if not able:
            self._end(self._stages.row_unproven(built, "compiled_unverified", "no device here can run this target"), built.job)
        elif not serving:
            message = f"{able[0].wish.device} is out of service: {able[0].out_of_service}"
            self._end(self._stages.row_unproven(built, "missing_device", message), built.job)
        else:
            slot = min(serving, key=lambda s: (not s.ready, len(s.tasks)))
            if slot.ready and len(slot.tasks) < QUEUED_PER_DEVICE:
                self._hand_over(slot, built)
            else:
                self._built.append(built)

    def _hand_over(self, slot: _Slot, built: Built) -> None:
        if not slot.tasks:
            slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S
        slot.tasks[slot.actor.prove.remote(built)] = built

    def _collect(self) -> None:
        refs = [*self._building, *(s.hello for s in self._slots if s.hello), *(ref for s in self._slots for ref in s.tasks)]
        if not refs:
            return
        ready, _ = ray.wait(refs, num_returns=1, timeout=TICK_S)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in self._building:
                self._built_one(ref, self._building.pop(ref).job)
            else:
                slot = next((s for s in self._slots if ref is s.hello or ref in s.tasks), None)
                if slot is not None:  # else: its actor died a moment ago, and its jobs were dealt with
                    self._heard(slot, ref)

    def _built_one(self, ref: Any, job: Job) -> None:
        try:
            result = ray.get(ref, timeout=30)
        except Exception as error:
            self._end(self._lost(job, "builder", error), job)
            return
        if isinstance(result, Built):
            self._built.append(result)
        else:
            self._end(result, job)

    def _heard(self, slot: _Slot, ref: Any) -> None:
        try:
            result = ray.get(ref, timeout=30)
        except Exception as error:
            self._actor_died(slot, error)
            return
        if ref is slot.hello:
            slot.hello, slot.about = None, result
            slot.ready, slot.out_of_service = not result.problems, "; ".join(result.problems)
            return
        row, seconds = result
        slot.busy_s += seconds
        slot.strikes = 0
        self._end(row, slot.tasks.pop(ref).job)
        slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S

    def _actor_died(self, slot: _Slot, error: BaseException) -> None:
        """The job at the head is the one that was running; the queued one goes back without a mark."""
        slot.strikes += 1
        jobs = list(slot.tasks.values())
        slot.tasks.clear()
        if jobs:
            self._end(self._lost(jobs[0].job, slot.wish.device, error), jobs[0].job)
            self._built.extendleft(reversed(jobs[1:]))
        ray.kill(slot.actor, no_restart=True)
        slot.ready, slot.hello = False, None
        if slot.strikes >= STRIKES:
            slot.out_of_service = f"{slot.strikes} deaths in a row, the last: {_first_line(error)}"
        else:
            fresh = self._open(slot.wish)
            slot.actor, slot.hello, slot.deadline = fresh.actor, fresh.hello, fresh.deadline

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for ref, building in list(self._building.items()):
            if now > building.deadline:
                ray.cancel(ref, force=True)
                building.deadline = now + GRACE_S  # its end arrives as an error
        for slot in self._slots:
            if (slot.tasks or slot.hello) and now > slot.deadline:
                limit_s = HELLO_S if slot.hello else self._shop.prove_wall_s + GRACE_S
                self._actor_died(slot, TimeoutError(f"no answer within {limit_s:.0f} s"))

    # ------------------------------------------------------------------------------------------------------ small parts

    def _open(self, wish: DeviceWish) -> _Slot:
        actor = actors.Device.options(**dict(wish.options)).remote(wish.device, self._shop)
        return _Slot(wish, actor, hello=actor.hello.remote(), deadline=time.monotonic() + HELLO_S)

    def _arch_for(self, target: str) -> str | None:
        """What a target's source is compiled for: another architecture where only newer cards are in service for it."""
        able = [dict(s.wish.archs) for s in self._slots if target in s.wish.targets]
        return None if not able or any(target not in archs for archs in able) else able[0][target]

    def _lost(self, job: Job, who: str, error: BaseException) -> Row:
        return self._stages.row_without_verdict(job, "lost_node", f"{who} was lost: {_first_line(error)}")

    def _end(self, row: Row, job: Job) -> None:
        with self._lock:
            future = self._futures.pop(job.key, None)
        if future is not None and not future.cancelled():
            future.set_result(row)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
