"""Runs jobs on Ray: builders and one actor a device, bounded queues, every loss a row. Decides nothing about what to try.

One thread owns all of it. A job is built by any builder, then waits for a device of its kind, which has at most
one job running and one queued. Whatever dies, its job ends as a row `lost_node`; the scheduler tries it again, on another
device of that kind where there is one. Nodes that join or leave a cluster are seen within seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from farm import actors, session
from farm.actors import Packed
from farm.builders import Builder, Builders
from farm.device_slots import QUEUED_PER_DEVICE, Slot, first_line, open_slot
from farm.executors import UNVERIFIED, stages_of
from farm.jobs import Built, Job, Row, Shop
from farm.node_watch import NodeWatch
from farm.nodes import DeviceWish, builder_rooms
from farm.places import Place, places_of
from farm.queues import Kind, Queues, Ready, kind_of
from farm.session import ray

TICK_S = 0.1
STOCK_PER_DEVICE = 4  # attempts being built, built and in hand, for each device of their kind
FEW = 6  # calls, of which at most one has ended as a rule: the next round finds others as soon
STRIKES = 3  # deaths in a row without a finished job, after which a device is out of service
HELLO_S = 300.0  # for a device to start and pass its self-test
GRACE_S = 90.0  # beyond the limits that stages keep themselves: a second wall
SHORT_S = 0.5  # that devices are short of work, after which another builder is opened
PATIENCE_S = 300.0  # that jobs of a kind wait for a device when a cluster has lost its last one
KEPT_BINARIES = 1024  # references to binaries that may be asked for again, by a later rung of their search


@dataclass(slots=True)
class _Building:
    job: Job
    deadline: float
    builder: Builder
    data: Any = None


class RayExecutor:
    """wishes: the devices of this machine. targets: with these instead, devices are those of a cluster's nodes, now and later.

    unmet: target -> why no node can judge it (`farm.preflight`): its jobs are built, and end as rows that say so.
    """

    def __init__(
        self,
        shop: Shop,
        wishes: Iterable[DeviceWish] = (),
        num_builders: int = 1,
        targets: tuple[str, ...] | None = None,
        *,
        unmet: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._shop, self._targets = shop, targets
        self._builders = Builders(shop, {"": max(1, num_builders)} if targets is None else {})
        self._most_builders = 1 << 20
        self._unmet, self._patience_s = dict(unmet or {}), patience_s if targets is not None else 0.0
        self._stages, self._versions = stages_of(shop), actors.versions()
        self._lock = threading.Condition()
        self._queues = Queues()
        self._futures: dict[str, Future[Row]] = {}
        self._building: dict[Any, _Building] = {}
        self._binaries: OrderedDict[str, Any] = OrderedDict()
        self._alone_since: dict[Kind, float] = {}
        self._nodes = NodeWatch(targets) if targets is not None else None
        self._slots = [self._open(wish) for wish in wishes]
        self._closed, self._broken = False, ""
        self._builders_seen = self._enough_at = time.monotonic()
        self._watch = session.watch_head(shop, self._head_lost)
        self._started = time.monotonic()
        self._look_at_nodes()
        self._thread = threading.Thread(target=self._run, name="farm-ray", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        return 2 * self._builders.room + (QUEUED_PER_DEVICE + 1) * max(1, len(self._slots))

    def room(self, place: Place) -> int:
        """Searches of a place that may be open at a time: enough to keep its devices at work, none while it has none."""
        if place.device_key is None:
            return 2 * self._builders.room
        serving = sum(s.may_judge(place.target, place.device_key) and not s.out_of_service for s in list(self._slots))
        return (QUEUED_PER_DEVICE + 1) * serving + (2 if serving else 0)

    @property
    def settled(self) -> bool:
        return not any(s.hello for s in list(self._slots))

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        return places_of(targets, tuple(s.device for s in list(self._slots) if s.ready and s.device))

    def submit(self, job: Job) -> Future[Row]:
        future: Future[Row] = Future()
        with self._lock:
            assert job.key not in self._futures, "one attempt of a key at a time"
            self._futures[job.key] = future
            self._queues.add(job)
            self._lock.notify()
        return future

    def busy_s(self) -> float:
        """Seconds that devices worked on candidates so far, all together."""
        return sum(s.busy_s for s in self._slots)

    def state(self) -> dict[str, Any]:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        slots = list(self._slots)
        names = {s.device.key: s.device.device_class for s in slots if s.device}
        with self._lock:
            waiting = self._queues.waiting()
        return {
            "executor": "ray",
            "broken": self._broken,
            "waiting": sum(jobs for jobs, _ in waiting.values()),
            "building": len(self._building),
            "built": sum(ready for _, ready in waiting.values()),
            "queues": [
                {"target": target, "class": names.get(key or "", "no device"), "to_build": jobs, "to_judge": ready}
                for (target, key), (jobs, ready) in sorted(waiting.items(), key=str)
            ],
            "classes": dict(Counter(s.device_class for s in slots if s.ready)),
            "devices": [s.describe() | {"busy": round(s.busy_s / elapsed, 3)} for s in slots],
            "nodes": self._nodes.facts if self._nodes else [],
            "dashboard": session.dashboard(),
        }

    def close(self) -> None:
        self._watch.close()
        if session.abandoned():
            return
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(10)
        for slot in self._slots:
            session.kill(slot.actor)
        for building in self._building.values():
            self._builders.drop(building.builder)
        self._builders.close()

    def end_session(self) -> None:
        session.stop_session()

    def _run(self) -> None:
        """What Ray raises here, no call of an actor being at fault, is the end of its session: the server of a client is gone."""
        try:
            while self._one_round():
                pass
        except Exception as error:
            self._head_lost(f"Ray does not answer any more: {first_line(error)}")
            raise

    def _head_lost(self, why: str) -> None:
        """The sweep looks at `state`, and ends."""
        session.abandon()
        self._broken = self._broken or why

    def _one_round(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if not self._queues.num_jobs and not self._in_hand():
                self._lock.wait(1.0)
        self._look_at_nodes()
        for slot in self._slots:
            self._head_runs(slot)
        self._give_out()
        self._collect()
        self._check_deadlines()
        return True

    def _in_hand(self) -> bool:
        return bool(self._building) or self._queues.num_ready > 0 or any(s.tasks or s.hello for s in self._slots)

    def _look_at_nodes(self) -> None:
        """Devices of nodes that joined come into service; those of nodes that are gone leave it."""
        if self._nodes is None or (seen := self._nodes.look()) is None:
            return
        if seen.home_lost:
            self._head_lost("the node that this sweep's driver belongs to was lost")
        for slot in self._slots:
            if slot.wish.node_id not in seen.alive and not slot.out_of_service:
                slot.out_of_service = "its node left the cluster"
                self._let_go(slot, RuntimeError(slot.out_of_service))
        self._slots += [self._open(wish) for wish in seen.missing(slot.wish for slot in self._slots)]
        # What is held is what actors asked for when they were opened, whatever they would ask for now.
        self._builders.set_rooms(builder_rooms(seen.nodes, [s.wish for s in self._slots if not s.out_of_service]))
        if self._builders.room:
            self._builders_seen = time.monotonic()
        elif time.monotonic() - self._builders_seen > self._patience_s:
            self._broken = self._broken or f"no node has had a CPU for builders for {self._patience_s:.0f} s"

    def _give_out(self) -> None:
        serving = Counter[Kind]()
        for slot in self._slots:
            if slot.device is not None and not slot.out_of_service:
                serving.update((target, slot.device.key) for target in slot.device.targets)
        while len(self._building) < self._most_builders and self._may_build():
            with self._lock:
                job = self._queues.next_job(serving, STOCK_PER_DEVICE)
            if job is None:
                break
            if self._wanted(job):
                self._build(job)
        for kind in [kind for kind, waiting in self._queues.ready.items() if waiting]:
            self._place_all(kind)

    def _may_build(self) -> bool:
        """As many builders may be starting at a time as devices have been short of work for a while, so that none is opened that
        would have nothing to do; one where there is none, and any number for what is only built.
        """
        if self._builders.any_free:
            self._enough_at = time.monotonic()
            return True
        with self._lock:
            to_build = [kind for kind, (jobs, _) in self._queues.waiting().items() if jobs]
        short = sum(s.ready and len(s.tasks) < QUEUED_PER_DEVICE for s in self._slots)
        if not short or not to_build or self._builders.any_starting:
            self._enough_at = time.monotonic()
        if any(key is None for _, key in to_build):
            return self._builders.may_open(self._builders.room)
        lasting = short if time.monotonic() - self._enough_at > SHORT_S else 0
        return bool(to_build) and self._builders.may_open(lasting or int(not self._builders.num_open))

    def _build(self, job: Job) -> None:
        """On this machine the binary's file is enough; in a cluster its bytes go along."""
        builder, data = self._builders.take(), None
        if self._targets is None:
            ref = builder.actor.build.remote(actors.pack(job))
        else:
            ref, data = builder.actor.build_to_send.remote(actors.pack(job))
        self._building[ref] = _Building(job, time.monotonic() + self._shop.compile_wall_s + GRACE_S, builder, data)

    def _place_all(self, kind: Kind) -> None:
        """Built jobs to the least loaded devices of their kind, as long as one has room; rows where there is no such device."""
        waiting = self._queues.ready[kind]
        target, key = kind
        if key is None:
            reason, why = (
                ("missing_device", self._unmet[target]) if target in self._unmet else ("compiled_unverified", UNVERIFIED)
            )
            self._end_unproven(waiting, reason, why)
            return
        able = [s for s in self._slots if s.may_judge(target, key)]
        serving = [s for s in able if not s.out_of_service]
        if not serving:
            if time.monotonic() - self._alone_since.setdefault(kind, time.monotonic()) >= self._patience_s:
                why = f"out of service: {able[0].out_of_service}" if able else "no device of its kind is left"
                self._end_unproven(waiting, "missing_device", why)
            return
        self._alone_since.pop(kind, None)
        while waiting:
            if not self._wanted(waiting[0].job):
                waiting.popleft()
                continue
            slot = min(serving, key=lambda s: (not s.ready, len(s.tasks)))
            if not slot.ready or len(slot.tasks) >= QUEUED_PER_DEVICE:
                return
            self._hand_over(slot, waiting.popleft())

    def _hand_over(self, slot: Slot, ready: Ready) -> None:
        if not slot.tasks:
            slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S
        call = slot.actor.prove.remote(ready.parcel, *([(ready.data,)] if ready.data is not None else ()))
        slot.tasks[call] = ready
        self._head_runs(slot)

    def _wanted(self, job: Job) -> bool:
        """Whether anyone still waits for this job; what nobody waits for is forgotten."""
        with self._lock:
            future = self._futures.get(job.key)
            if future is not None and future.cancelled():
                del self._futures[job.key]
                self._queues.ended(job)
                future = None
        return future is not None

    def _head_runs(self, slot: Slot) -> None:
        """The first job of a device is being worked on and cannot be taken back any more; those behind it can."""
        for i, (ref, ready) in enumerate(tuple(slot.tasks.items())):
            with self._lock:
                future = self._futures.get(ready.job.key)
            if i == 0 and future is not None and not (future.running() or future.done()):  # done: it was taken back before
                future.set_running_or_notify_cancel()
            elif i > 0 and future is not None and future.cancelled():
                ray.cancel(ref)

    def _collect(self) -> None:
        refs = [*self._building, *(s.hello for s in self._slots if s.hello), *(ref for s in self._slots for ref in s.tasks)]
        if not refs:
            if self._queues.num_ready:
                time.sleep(TICK_S)  # for a device that may join
            return
        ready, _ = ray.wait(refs, num_returns=1, timeout=TICK_S)
        if ready and len(refs) > FEW:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        owners = {ref: s for s in self._slots for ref in (s.hello, *s.tasks) if ref} if ready else {}
        for ref in ready:
            if ref in self._building:
                self._built_one(ref, self._building.pop(ref))
            elif (slot := owners.get(ref)) is not None and (ref == slot.hello or ref in slot.tasks):
                self._heard(slot, ref)  # else: its actor died a moment ago, and its jobs were dealt with

    def _built_one(self, ref: Any, building: _Building) -> None:
        job = building.job
        try:
            result: Packed | Row = actors.unpack(ray.get(ref, timeout=30))
        except Exception as error:
            self._builders.drop(building.builder)
            if _is_of_memory(error):
                self._fewer_builders()
                self._end(self._stages.row_without_verdict(job, "compile_oom", f"builder: {first_line(error)}"), job)
            else:
                self._end(self._lost(job, "builder", error), job)
            return
        self._builders.give_back(building.builder)
        if isinstance(result, Packed):
            data = self._kept(result.binary_hash, building.data if result.sent else None)
            self._queues.ready[kind_of(job)].append(Ready(job, result.parcel, data))
            return
        if result["reason_code"] == "compile_oom":
            self._fewer_builders()
        self._end(result, job)

    def _fewer_builders(self) -> None:
        """Memory ran out beside so many compilers: half of them, for the rest of this sweep."""
        self._most_builders = max(1, min(self._most_builders, self._builders.room) // 2)

    def _kept(self, name: str, data: Any) -> Any:
        """One reference for each binary, whoever built it: Ray brings it to a node once."""
        if data is None:
            return None
        kept = self._binaries[name] = self._binaries.pop(name, data)  # the newest last
        while len(self._binaries) > KEPT_BINARIES:
            self._binaries.popitem(last=False)
        return kept

    def _heard(self, slot: Slot, ref: Any) -> None:
        try:
            result = ray.get(ref, timeout=30)
        except ray.exceptions.TaskCancelledError:
            self._wanted(slot.tasks.pop(ref).job)
            return
        except Exception as error:
            self._actor_died(slot, error)
            return
        if ref == slot.hello:
            slot.hello, slot.device = None, result.device
            slot.out_of_service = "; ".join(result.problems)
            if result.problems:
                session.kill(slot.actor)  # what it holds is another's from now on
            return
        self._proved(slot, ref, *actors.unpack(result))

    def _proved(self, slot: Slot, ref: Any, row: Row | str, seconds: float) -> None:
        """A row; or the name of who keeps the device, and then the job is asked for again: no limit counts waiting."""
        slot.strikes = 0
        ready = slot.tasks.pop(ref)
        slot.deadline = time.monotonic() + self._shop.prove_wall_s + GRACE_S
        if isinstance(row, str):
            slot.waits_for = row
            built: Built = actors.unpack(ready.parcel)
            waited_s = built.columns.get("queue_s", 0.0) + self._shop.slot_wait_s
            again = replace(built, columns=built.columns | {"queue_s": waited_s})
            self._hand_over(slot, replace(ready, parcel=actors.pack(again)))
        else:
            slot.waits_for = ""
            slot.busy_s += seconds
            slot.num_ended += 1
            self._end(row, ready.job)

    def _actor_died(self, slot: Slot, error: BaseException) -> None:
        if _is_of_memory(error):
            self._fewer_builders()
        self._let_go(slot, error)
        slot.strikes += 1
        if slot.strikes >= STRIKES:
            slot.out_of_service = f"{slot.strikes} deaths in a row, the last: {first_line(error)}"
        elif not slot.out_of_service:
            fresh = self._open(slot.wish)
            slot.actor, slot.hello, slot.deadline = fresh.actor, fresh.hello, fresh.deadline

    def _save_ended(self, slot: Slot) -> None:
        """Results that came in before the actor died, and were not looked at yet."""
        ended, _ = ray.wait(list(slot.tasks), num_returns=len(slot.tasks), timeout=0) if slot.tasks else ([], [])
        for ref in ended:
            with contextlib.suppress(Exception):  # those that it died with
                row, seconds = actors.unpack(ray.get(ref, timeout=5))
                if not isinstance(row, str):
                    self._proved(slot, ref, row, seconds)

    def _let_go(self, slot: Slot, error: BaseException) -> None:
        """The job at the head is the one that was running, and is lost; the queued one goes back without a mark."""
        self._save_ended(slot)
        jobs = list(slot.tasks.values())
        slot.tasks.clear()
        slot.hello = None
        if jobs:
            lost = jobs[0].job
            self._end(self._lost(lost, slot.wish.device, error), lost)
            self._queues.put_back(jobs[1:])
        session.kill(slot.actor)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for building in list(self._building.values()):
            if now > building.deadline:
                session.kill(building.builder.actor)
                building.deadline = now + GRACE_S  # its end arrives as an error
        for slot in self._slots:
            if (slot.tasks or slot.hello) and now > slot.deadline:
                limit_s = HELLO_S if slot.hello else self._shop.prove_wall_s + GRACE_S
                self._actor_died(slot, TimeoutError(f"no answer within {limit_s:.0f} s"))

    def _open(self, wish: DeviceWish) -> Slot:
        return open_slot(wish, self._shop, self._versions, HELLO_S)

    def _lost(self, job: Job, who: str, error: BaseException) -> Row:
        row: Row = self._stages.row_without_verdict(job, "lost_node", f"{who} was lost: {first_line(error)}")
        return row

    def _end_unproven(self, waiting: Any, reason: str, why: str) -> None:
        while waiting:
            ready = waiting.popleft()
            self._end(self._stages.row_unproven(actors.unpack(ready.parcel), reason, why), ready.job)

    def _end(self, row: Row, job: Job) -> None:
        """The row of a job that was being built or later. A second end of the same attempt finds nobody who waits for it."""
        with self._lock:
            future = self._futures.pop(job.key, None)
            if future is not None:
                self._queues.ended(job)
        if future is not None and not future.cancelled():
            future.set_result(row)


def _is_of_memory(error: BaseException) -> bool:
    """Whether Ray ended a worker because its node ran out of memory; of an actor it says so in words only."""
    return isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in str(error)
