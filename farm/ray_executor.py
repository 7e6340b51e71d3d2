"""Runs jobs on Ray: builders and one actor a device, bounded queues, every loss a row. Decides nothing about what to try.

One thread owns all of it. A job is built by a task (any builder, one CPU), then waits for a device of its kind, which has at most
one job running and one queued. Whatever dies, its job ends as a row `lost_node`; the scheduler tries it again, on another
device of that kind where there is one. Nodes that join or leave a cluster are seen within seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farm import actors
from farm.actors import ray
from farm.devices import LocalDevice
from farm.executors import UNVERIFIED, stages_of
from farm.jobs import Built, Job, Row, Shop
from farm.nodes import DeviceWish, builder_cpus, node_wishes
from farm.places import Place, places_of

TICK_S = 0.1
QUEUED_PER_DEVICE = 2  # one running, one waiting
STRIKES = 3  # deaths in a row without a finished job, after which a device is out of service
HELLO_S = 300.0  # for a device to start and pass its self-test
GRACE_S = 90.0  # beyond the limits that stages keep themselves: a second wall
WATCH_S = 3.0  # between looks at a cluster's nodes


@dataclass(slots=True)
class _Slot:
    """One device in service: its actor and what it has in hand, in the order given."""

    wish: DeviceWish
    actor: Any
    hello: Any = None  # the reference, until the answer is there
    device: LocalDevice | None = None
    tasks: dict[Any, Built] = field(default_factory=dict)
    deadline: float = 0.0
    strikes: int = 0
    out_of_service: str = ""
    waits_for: str = ""  # who works or measures on the device, while it cannot be measured on
    busy_s: float = 0.0

    @property
    def ready(self) -> bool:
        return self.device is not None and self.hello is None and not self.out_of_service

    def may_judge(self, job: Job) -> bool:
        """Whether it is, or before it said what it is may be, of the job's kind."""
        return job.target in self.wish.targets and (self.device is None or self.device.key == job.device_key)

    def describe(self) -> dict[str, Any]:
        name = self.device.name if self.device else self.wish.expected_class
        return {
            "device": self.wish.device, "about": name, "out_of_service": self.out_of_service, "waits_for": self.waits_for,
            "in_hand": len(self.tasks), "busy_s": round(self.busy_s, 3),
        }  # fmt: skip


@dataclass(slots=True)
class _Building:
    job: Job
    deadline: float


class RayExecutor:
    """wishes: the devices of this machine. targets: with these instead, devices are those of a cluster's nodes, now and later."""

    def __init__(
        self, shop: Shop, wishes: Iterable[DeviceWish] = (), num_builders: int = 1, targets: tuple[str, ...] | None = None
    ) -> None:
        self._shop, self._num_builders, self._targets = shop, max(1, num_builders), targets
        self._most_builders = 1 << 20
        self._stages, self._versions = stages_of(shop), actors.versions()
        self._lock = threading.Condition()
        self._todo: deque[Job] = deque()
        self._futures: dict[str, Future[Row]] = {}
        self._building: dict[Any, _Building] = {}
        self._built: deque[Built] = deque()
        self._slots = [self._open(wish) for wish in wishes]
        self._closed, self._looked = False, 0.0
        self._started = time.monotonic()
        self._look_at_nodes()
        self._thread = threading.Thread(target=self._run, name="farm-ray", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------- called by others

    @property
    def capacity(self) -> int:
        return 2 * self._num_builders + (QUEUED_PER_DEVICE + 1) * max(1, len(self._slots))

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        """After every device has said what it is, or that it cannot serve."""
        until = time.monotonic() + HELLO_S
        while any(s.hello for s in self._slots) and time.monotonic() < until:
            time.sleep(TICK_S)
        return places_of(targets, tuple(s.device for s in self._slots if s.ready and s.device))

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
        return {
            "executor": "ray",
            "waiting": len(self._todo),
            "building": len(self._building),
            "built": len(self._built),
            "queues": dict(Counter(b.job.target for b in list(self._built))),
            "devices": [s.describe() | {"busy": round(s.busy_s / elapsed, 3)} for s in list(self._slots)],
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
            self._look_at_nodes()
            for slot in self._slots:
                self._head_runs(slot)
            self._give_out()
            self._collect()
            self._check_deadlines()

    def _look_at_nodes(self) -> None:
        """Devices of nodes that joined come into service; those of nodes that are gone leave it."""
        if self._targets is None or time.monotonic() - self._looked < WATCH_S:
            return
        self._looked = time.monotonic()
        nodes: list[Mapping[str, Any]] = ray.nodes()
        alive = {n["NodeID"] for n in nodes if n["Alive"]}
        self._num_builders = max(1, min(builder_cpus(nodes), self._most_builders))
        for slot in self._slots:
            if slot.wish.node_id not in alive and not slot.out_of_service:
                slot.out_of_service = "its node left the cluster"
                self._let_go(slot, RuntimeError(slot.out_of_service))
        have = Counter((s.wish.node_id, s.wish.expected_class) for s in self._slots)
        for wish in node_wishes(self._targets, nodes):
            key = (wish.node_id, wish.expected_class)
            if have[key] > 0:
                have[key] -= 1
            else:
                self._slots.append(self._open(wish))

    def _give_out(self) -> None:
        devices = sum(not s.out_of_service for s in self._slots)
        while self._todo and len(self._building) < self._num_builders and len(self._built) < self._num_builders + 2 * devices:
            with self._lock:
                job = self._todo.popleft()
            if not self._wanted(job):
                continue
            ref = actors.build.remote(job, self._shop)
            self._building[ref] = _Building(job, time.monotonic() + self._shop.compile_wall_s + GRACE_S)
        for _ in range(len(self._built)):
            self._place(self._built.popleft())

    def _place(self, built: Built) -> None:
        """To the least loaded device of its kind; back into the queue while all are busy; a row where there is none."""
        if not self._wanted(built.job):
            return
        if built.job.device_key is None:
            self._end(self._stages.row_unproven(built, "compiled_unverified", UNVERIFIED), built.job)
            return
        able = [s for s in self._slots if s.may_judge(built.job)]
        serving = [s for s in able if not s.out_of_service]
        if not serving:
            why = f"out of service: {able[0].out_of_service}" if able else "no device of its kind is left"
            self._end(self._stages.row_unproven(built, "missing_device", why), built.job)
            return
        slot = min(serving, key=lambda s: (not s.ready, len(s.tasks)))
        if slot.ready and len(slot.tasks) < QUEUED_PER_DEVICE:
            self._hand_over(slot, built)
        else:
            self._built.append(built)

    def _hand_over(self, slot: _Slot, built: Built) -> None:
        if not slot.tasks:
            slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S
        slot.tasks[slot.actor.prove.remote(built)] = built
        self._head_runs(slot)

    def _wanted(self, job: Job) -> bool:
        """Whether anyone still waits for this job; what nobody waits for is forgotten."""
        with self._lock:
            future = self._futures.get(job.key)
            if future is not None and future.cancelled():
                del self._futures[job.key]
                future = None
        return future is not None

    def _head_runs(self, slot: _Slot) -> None:
        """The first job of a device is being worked on and cannot be taken back any more; those behind it can."""
        for i, (ref, built) in enumerate(tuple(slot.tasks.items())):
            with self._lock:
                future = self._futures.get(built.job.key)
            if i == 0 and future is not None and not future.running():
                future.set_running_or_notify_cancel()
            elif i > 0 and future is not None and future.cancelled():
                ray.cancel(ref)

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
        except OutOfMemoryError as error:
            self._fewer_builders()
            self._end(self._stages.row_without_verdict(job, "compile_oom", f"builder: {_first_line(error)}"), job)
            return
        except Exception as error:
            self._end(self._lost(job, "builder", error), job)
            return
        if not isinstance(result, Built) and result["reason_code"] == "compile_oom":
            self._fewer_builders()
        if isinstance(result, Built):
            self._built.append(result)
        else:
            self._end(result, job)

    def _fewer_builders(self) -> None:
        """Memory ran out beside so many compilers: half of them, for the rest of this sweep."""
        self._most_builders = self._num_builders = max(1, self._num_builders // 2)

    def _heard(self, slot: _Slot, ref: Any) -> None:
        try:
            result = ray.get(ref, timeout=30)
        except ray.exceptions.TaskCancelledError:
            self._wanted(slot.tasks.pop(ref).job)
            return
        except Exception as error:
            self._actor_died(slot, error)
            return
        if ref is slot.hello:
            slot.hello, slot.device = None, result.device
            slot.out_of_service = "; ".join(result.problems)
            return
        self._proved(slot, ref, *result)

    def _proved(self, slot: _Slot, ref: Any, row: Row | str, seconds: float) -> None:
        """A row; or the name of who keeps the device, and then the job is asked for again: no limit counts waiting."""
        slot.strikes = 0
        built = slot.tasks.pop(ref)
        slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S
        if isinstance(row, str):
            slot.waits_for = row
            waited_s = built.columns.get("queue_s", 0.0) + self._shop.slot_wait_s
            self._hand_over(slot, replace(built, columns=built.columns | {"queue_s": waited_s}))
        else:
            slot.waits_for = ""
            slot.busy_s += seconds
            self._end(row, built.job)

    def _actor_died(self, slot: _Slot, error: BaseException) -> None:
        if isinstance(error, OutOfMemoryError):
            self._fewer_builders()
        self._let_go(slot, error)
        slot.strikes += 1
        if slot.strikes >= STRIKES:
            slot.out_of_service = f"{slot.strikes} deaths in a row, the last: {_first_line(error)}"
        elif not slot.out_of_service:
            fresh = self._open(slot.wish)
            slot.actor, slot.hello, slot.deadline = fresh.actor, fresh.hello, fresh.deadline

    def _save_ended(self, slot: _Slot) -> None:
        """Results that came in before the actor died, and were not looked at yet."""
        ended, _ = ray.wait(list(slot.tasks), num_returns=len(slot.tasks), timeout=0) if slot.tasks else ([], [])
        for ref in ended:
            with contextlib.suppress(Exception):  # those that it died with
                row, seconds = ray.get(ref, timeout=5)
                if not isinstance(row, str):
                    self._proved(slot, ref, row, seconds)

    def _let_go(self, slot: _Slot, error: BaseException) -> None:
        """The job at the head is the one that was running, and is lost; the queued one goes back without a mark."""
        self._save_ended(slot)
        jobs = list(slot.tasks.values())
        slot.tasks.clear()
        slot.hello = None
        if jobs:
            self._end(self._lost(jobs[0].job, slot.wish.device, error), jobs[0].job)
            self._built.extendleft(reversed(jobs[1:]))
        ray.kill(slot.actor, no_restart=True)

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
        options = dict(wish.options)
        if wish.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(wish.node_id, soft=False)
        actor = actors.Device.options(**options).remote(wish.device, wish.expected_class, self._shop)
        return _Slot(wish, actor, hello=actor.hello.remote(self._versions), deadline=time.monotonic() + HELLO_S)

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
