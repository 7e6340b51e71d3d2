"""Puts a sweep together: catalog, executor, searches, display, signals. Judges nothing; `farm.summary` says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from catalog import store
from catalog.errors import FencedRun, StorageError
from catalog.store import Catalog
from farm.authors import Author, AuthorOf, author_of, endpoint_of
from farm.config import Config, usable_cache
from farm.console import InputError
from farm.devices import devices_here
from farm.executors import Executor, StartInterrupted, stages_of
from farm.jobs import STAGES, Shop, new_run_id
from farm.known_rows import KnownRows
from farm.model_feedback import TOLD_COLUMNS
from farm.on_ray import OnRay, Options, executor_for
from farm.places import AttemptsAt, Place
from farm.plan import Plan
from farm.progress import PlainDisplay, Tally, make_display, waits_of
from farm.rules import resolved_targets
from farm.scheduler import STOPPING, Counts, Search, Stream, Sweep
from farm.search import SANITIZED, Attempt, Versions
from farm.status import StatusFile
from farm.summary import Summary
from generator.authors.endpoint import Endpoint
from generator.canonical import digest
from generator.spec import AttentionSpec
from generator.targets import find_target
from verifier.compile import find_compiler

if TYPE_CHECKING:
    from catalog.writing import Writer
    from farm.preflight import Preflight

#: How long a cluster's sweep with nothing else to do waits for a kind of device of which the last one left.
DEVICE_PATIENCE_S = 300.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FENCE_LOOK_S = 5.0  # between looks for a later start of the same sweep


def run_sweep(plan: Plan, options: Options, config: Config, authors: AuthorOf | None = None) -> Summary:
    """Every problem of the plan that the catalog does not answer yet. Returns after the last one, or soon after a signal.

    authors: gives the author, as `farm.authors.author_of` does, who works in this process. Left out, the plan's own works here,
    too; on a cluster as an actor.
    """
    try:
        plan = dataclasses.replace(plan, targets=resolved_targets(plan.targets))
    except ValueError as error:
        raise InputError("", str(error)) from None
    endpoint, authors = endpoint_of(plan), authors or _authors(options)
    _check_compiler(plan, options)
    if options.sanitize and options.address == "local":
        check_sanitizer(plan.targets)
    checked = _preflight(plan, options)  # before anything is written
    opened = store.open(options.catalog, create=True)
    usable_cache(config)
    run_id = new_run_id()
    sweep_id = f"{plan.name}-{digest(dataclasses.asdict(plan))[:8]}"
    superseded = opened.start_run(run_id, sweep_id, "cluster" if options.on_cluster else socket.gethostname())
    cache = "" if options.on_cluster else str(config.cache)  # each node's own
    shop = Shop(
        opened.uri, cache, sweep_id, plan.variants, stages=options.stages, sanitize=options.sanitize, head_s=config.head_s
    )
    started = time.monotonic()
    tally, status = Tally(expected=_expected(plan)), StatusFile(config.cache, run_id, opened.uri, plan.name)
    with contextlib.ExitStack() as held:
        executor = held.enter_context(contextlib.closing(executor_for(options, shop, plan.targets, run_id, checked)))
        writer = held.enter_context(_writer(opened, run_id))
        with make_display(tally, executor.state, options.quiet) as display:
            for line in [*(checked.lines() if checked else ()), *map(_taken_over, superseded)]:
                display.note(line)
            known = KnownRows(opened, () if plan.author == "rules" else TOLD_COLUMNS)
            sweep = _adapted(Sweep(executor, writer, known, display, budget=plan.budget), shop, options)
            watch, author = _Watch(status, opened, run_id), functools.partial(authors, plan, shop)
            counts = asyncio.run(_run(sweep, plan, shop, author, endpoint, display, watch))
    if not opened.is_fenced(run_id):
        opened.record_run(run_id, sweep_id, counts.planned + counts.known, counts.known)
    wall_s = time.monotonic() - started
    return Summary(opened.uri, run_id, counts, tally, wall_s, sweep.stop_reason, sweep.is_stopped, tally.author())


def _check_compiler(plan: Plan, options: Options) -> None:
    """On one machine: raises NoCompiler, which says what to install, rather than to end every attempt with it."""
    if not options.on_cluster and options.stages == STAGES and any(find_target(t).family == "cpu" for t in plan.targets):
        find_compiler()


def _adapted(sweep: Sweep, shop: Shop, options: Options) -> Sweep:
    """How it ends what is interrupted, and on a cluster how it waits for devices and for an author far away."""
    sweep.interrupted_row = stages_of(shop).row_without_verdict
    if options.on_cluster:
        from farm.far_author import AHEAD

        sweep.device_patience_s, sweep.ahead = DEVICE_PATIENCE_S, AHEAD
    return sweep


def _authors(options: Options) -> AuthorOf:
    """On one machine the driver is the author, too: an actor would have no core of its own there, and would start Ray for nothing
    where everything is done already.
    """
    if not options.on_cluster:
        return author_of
    from farm.author_actor import author_on_ray

    return author_on_ray


def _preflight(plan: Plan, options: Options) -> Preflight | None:
    """A look at the cluster; None on this machine. Raises InputError for what it cannot meet, unless that is allowed."""
    if not options.on_cluster:
        return None
    from farm.preflight import preflight
    from farm.session import join_cluster

    join_cluster(options.address)
    found = preflight(plan.targets)
    if found.unmet and not options.allow_missing:
        missing = "\n".join(f"targets: {target}: {why}" for target, why in found.unmet.items())
        raise InputError("", f"{missing}\ntargets: --allow-missing builds them all the same, and ends each as a row that says so")
    if not found.builder_cpus:
        why = "no node has a CPU for builders, beside those that devices' actors need; add a node with CPUs"
        raise InputError("--address", why)
    return found


def _taken_over(run_id: str) -> str:
    return f"{run_id}: this start supersedes it; what it may still write is dropped by every reader"


@contextlib.contextmanager
def _writer(opened: Catalog, run_id: str) -> Iterator[Writer]:
    """The catalog's writer; of a run that was superseded meanwhile, what it wrote before stays in its journal for readers."""
    writer = opened.writer(run_id)
    try:
        yield writer
    finally:
        with contextlib.suppress(FencedRun):
            writer.close()


@dataclass(slots=True)
class _Watch:
    """Beside a sweep: keeps what `farm status` shows up to date, says once for each who is waited for, notices a later start."""

    status: StatusFile
    opened: Catalog
    run_id: str

    async def run(self, sweep: Sweep, display: PlainDisplay) -> None:
        looked, said = time.monotonic(), set[str]()
        while True:
            state = sweep.executor.state()
            self.status.write(display.tally.plain() | {"machine": state})
            waits = waits_of(state)
            for who in waits - said:
                display.note(f"waiting: {who}; one measurement at a time, so that none disturbs another")
            said = waits
            if (broken := state.get("broken")) and not sweep.stop_reason:
                display.note(f"{broken}; what has ended is in the catalog, and the same command goes on from there")
                sweep.stop(broken)
            display.pulse()
            if time.monotonic() - looked > FENCE_LOOK_S:
                looked = time.monotonic()
                if await asyncio.to_thread(self._superseded):
                    display.note(f"a later start of this sweep took over; this one ({self.run_id}) stops")
                    sweep.stop("superseded by a later start of the same sweep")
            await asyncio.sleep(1.0)

    def _superseded(self) -> bool:
        with contextlib.suppress(OSError, StorageError):  # a shared folder that is gone for a moment
            return self.opened.is_fenced(self.run_id)
        return False


async def _run(
    sweep: Sweep, plan: Plan, shop: Shop, authors: AuthorOf, endpoint: Endpoint | None, display: PlainDisplay, watch: _Watch
) -> Counts:
    loop = asyncio.get_running_loop()

    def catch_signals() -> None:
        for number in SIGNALS:
            loop.add_signal_handler(number, functools.partial(_stop, sweep, display, signal.Signals(number).name))

    def raise_signals() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _interrupt)

    catch_signals()
    if isinstance(sweep.executor, OnRay):  # whose start keeps this loop waiting for seconds, and puts handlers of Ray's in place
        sweep.executor.before_start, sweep.executor.after_start = raise_signals, catch_signals
    translator, harness = stages_of(shop).versions()
    versions = Versions(translator, harness + (SANITIZED if shop.sanitize else ""))  # other attempts than without it
    watching = asyncio.ensure_future(watch.run(sweep, display))
    sweep.executor.places(plan.targets)  # a cluster's devices start while the author does
    try:
        async with contextlib.AsyncExitStack() as held:
            author = await sweep.unless_stopped(held.enter_async_context(authors(versions, endpoint, display.note)))
            if author is None:
                return sweep.counts
            display.tally.author, sweep.width = author.line, author.width
            streams = _Streams(plan, author, sweep.executor)
            return await sweep.run_streams(await sweep.unless_stopped(streams.first()) or (), streams.joining)
    finally:
        watching.cancel()
        watch.status.remove()


class _Streams:
    """Every problem of a plan on every kind of device that can judge it; kinds that join meanwhile get theirs at once."""

    def __init__(self, plan: Plan, author: Author, executor: Executor) -> None:
        self._plan, self._author, self._executor = plan, author, executor
        self._known: set[Place] = set()

    async def first(self) -> list[Stream]:
        """After every device has said what it is: only then is it known which targets have none."""
        while not self._executor.settled:
            await asyncio.sleep(0.1)
        return self._of(self._executor.places(self._plan.targets))

    def joining(self) -> list[Stream]:
        """Of kinds that were not there before: also for a target that had no device when the sweep began."""
        return self._of(p for p in self._executor.places(self._plan.targets) if p.device_key is not None)

    def _of(self, places: Iterable[Place]) -> list[Stream]:
        fresh = [place for place in places if place not in self._known]
        self._known.update(fresh)
        return [Stream(str(place), self._searches(place), functools.partial(self._executor.room, place)) for place in fresh]

    def _searches(self, place: Place) -> Iterator[Search]:
        for spec in self._plan.specs():
            yield functools.partial(_solve, self._author, spec, place)


async def _solve(author: Author, spec: AttentionSpec, place: Place, attempt: Attempt) -> None:
    await author.solve(spec, place.target, AttemptsAt(place, attempt))


def _interrupt(number: int, _: FrameType | None) -> None:
    raise StartInterrupted(signal.Signals(number).name)


def _stop(sweep: Sweep, display: PlainDisplay, name: str) -> None:
    display.note(STOPPING.format(name))
    sweep.stop(f"stopped by {name}")


def _expected(plan: Plan) -> int:
    """Attempts, if every candidate is measured and every rung is full: what the time left is reckoned from."""
    rungs, each = plan.tuning.candidates, plan.tuning.candidates
    while rungs > 1:
        rungs = max(1, int(rungs * plan.tuning.keep))
        each += rungs
    problems = sum(len(m.shapes) * len(m.dtypes) for m in plan.models) + len(plan.raw_specs)
    return problems * len(plan.targets) * each


def check_sanitizer(targets: tuple[str, ...]) -> None:
    """Raises InputError where a GPU of this machine is to be used and there is no compute-sanitizer for it."""
    from verifier.cuda_sanitize import NoSanitizer, find_sanitizer

    if any(device.device != "cpu" and set(targets) & set(device.targets) for device in devices_here()):
        try:
            find_sanitizer()
        except NoSanitizer as error:
            raise InputError("--sanitize", str(error)) from None
