"""Puts a sweep together: catalog, executor, searches, display, signals; and says at the end what came of it. Judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog import store
from catalog.store import Catalog
from farm.authors import Author, author_of, endpoint_of
from farm.config import Config
from farm.console import InputError
from farm.devices import devices_here
from farm.executors import Executor, LocalExecutor, run_stages, stages_of
from farm.guardian import Guardian
from farm.jobs import Job, Row, Shop, new_run_id
from farm.places import AttemptsAt, Place, places_of
from farm.plan import Plan
from farm.progress import PlainDisplay, Tally, make_display, waits_of
from farm.rules import resolved_targets
from farm.scheduler import Counts, Search, Sweep
from farm.search import SANITIZED, Attempt, Versions
from farm.status import StatusFile
from generator.authors.endpoint import Endpoint
from generator.canonical import digest
from generator.spec import AttentionSpec
from verifier.environment import cores_given

if TYPE_CHECKING:
    from farm.ray_executor import RayExecutor

#: What is kept in memory of attempts that ended in earlier starts.
_KNOWN = (
    "row_id", "attempt_key", "attempt_no", "reason_code", "message", "p50_s", "baseline_name", "baseline_p50_s", "ratio_p50",
    "ratio_low", "ratio_high", "generation", "compile_s", "verify_s", "measure_s", "spill_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a plan here: where rows go and on what the work runs."""

    catalog: str
    executor: str = "ray"
    address: str = "local"
    quiet: bool = False
    stages: str = "farm.stages"
    sanitize: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of one start."""

    catalog: str
    run_id: str
    counts: Counts
    tally: Tally
    wall_s: float
    stop_reason: str
    author: str = ""  # what a language model has cost

    @property
    def stopped_by_signal(self) -> bool:
        return self.stop_reason.startswith("stopped by")

    @property
    def broken_off(self) -> bool:
        """Neither ended, nor stopped by its user or its budget."""
        return bool(self.stop_reason) and not self.stopped_by_signal and not self.stop_reason.startswith("budget")

    @property
    def any_verified(self) -> bool:
        return any(row["reason_code"] == "ok" for row in self.tally.best.values())

    def plain(self) -> dict[str, Any]:
        """The summary for scripts. planned = the sum of by_reason, always; known ended in an earlier start."""
        return {
            "catalog": self.catalog,
            "run_id": self.run_id,
            "planned": self.counts.planned,
            "known": self.counts.known,
            "by_reason": dict(sorted(self.counts.by_reason.items())),
            "wall_s": round(self.wall_s, 3),
            "stop_reason": self.stop_reason,
            "author": self.author,
            "best": [table_row(row) for row in sorted(self.tally.best.values(), key=_in_table)],
        }


class KnownRows:
    """Attempts that ended before this start, by their key."""

    def __init__(self, opened: Catalog) -> None:
        self._table = opened.rows(_KNOWN)
        keys = self._table.column("attempt_key").to_pylist()
        self._index = {bytes.fromhex(key): i for i, key in enumerate(keys)}

    def get(self, key: str) -> Row | None:
        index = self._index.get(bytes.fromhex(key))
        return None if index is None else self._table.slice(index, 1).to_pylist()[0]


def run_sweep(plan: Plan, options: Options, config: Config) -> Summary:
    """Every problem of the plan that the catalog does not answer yet. Returns after the last one, or soon after a signal."""
    try:
        plan = dataclasses.replace(plan, targets=resolved_targets(plan.targets))
    except ValueError as error:
        raise InputError("", str(error)) from None
    endpoint = endpoint_of(plan)
    if options.sanitize and options.address == "local":
        check_sanitizer(plan.targets)
    if options.executor == "ray" and options.address != "local":
        from farm.actors import join_cluster

        join_cluster(options.address)  # before anything is written
    opened = store.open(options.catalog, create=True)
    config.cache.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id()
    sweep_id = f"{plan.name}-{digest(dataclasses.asdict(plan))[:8]}"
    shop = Shop(opened.uri, str(config.cache), sweep_id, plan.variants, stages=options.stages, sanitize=options.sanitize)
    started = time.monotonic()
    with contextlib.closing(_executor(options, shop, plan, run_id)) as executor, opened.writer(run_id) as writer:
        tally, status = Tally(expected=_expected(plan)), StatusFile(config.cache, run_id, opened.uri, plan.name)
        with make_display(tally, executor.state, options.quiet) as display:
            interrupted = stages_of(shop).row_without_verdict
            sweep = Sweep(executor, writer, KnownRows(opened), display, budget=plan.budget, interrupted_row=interrupted)
            counts = asyncio.run(_run(sweep, plan, shop, endpoint, display, status))
    opened.record_run(run_id, sweep_id, counts.planned, counts.known)
    return Summary(opened.uri, run_id, counts, tally, time.monotonic() - started, sweep.stop_reason, tally.author())


async def _run(
    sweep: Sweep, plan: Plan, shop: Shop, endpoint: Endpoint | None, display: PlainDisplay, status: StatusFile
) -> Counts:
    loop = asyncio.get_running_loop()

    def catch_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, functools.partial(_stop, sweep, display, signal.Signals(number).name))

    catch_signals()
    if isinstance(sweep.executor, _OnRay):
        sweep.executor.after_start = catch_signals  # Ray puts handlers of its own in their place
    translator, harness = stages_of(shop).versions()
    versions = Versions(translator, harness + (SANITIZED if shop.sanitize else ""))  # other attempts than without it
    telling = asyncio.ensure_future(_tell(status, display, sweep.executor))
    try:
        async with author_of(plan, shop, versions, endpoint, display.note) as author:
            display.tally.author, sweep.width = author.line, author.width
            return await sweep.run(_searches(plan, author, sweep.executor))
    finally:
        telling.cancel()
        status.remove()


async def _tell(status: StatusFile, display: PlainDisplay, executor: Executor) -> None:
    """Keeps what `farm status` shows up to date, and says once for each who is waited for."""
    said: set[str] = set()
    while True:
        state = executor.state()
        status.write(display.tally.plain() | {"machine": state})
        waits = waits_of(state)
        for who in waits - said:
            display.note(f"waiting: {who}; one measurement at a time, so that none disturbs another")
        said = waits
        display.pulse()
        await asyncio.sleep(1.0)


def _searches(plan: Plan, author: Author, executor: Executor) -> Iterator[Search]:
    """Every problem on every kind of device that can judge it; kinds that join while the sweep runs get theirs at the end."""
    known: set[Place] = set()
    while fresh := [place for place in executor.places(plan.targets) if place not in known]:
        for spec in plan.specs():
            for place in fresh:
                yield functools.partial(_solve, author, spec, place)
        known.update(fresh)


async def _solve(author: Author, spec: AttentionSpec, place: Place, attempt: Attempt) -> None:
    await author.solve(spec, place.target, AttemptsAt(place, attempt))


def _stop(sweep: Sweep, display: PlainDisplay, name: str) -> None:
    display.note(f"{name}: stopping; what has ended is in the catalog, and the same command goes on from there")
    sweep.stop(f"stopped by {name}")


def _expected(plan: Plan) -> int:
    """Attempts, if every candidate is measured and every rung is full: what the time left is reckoned from."""
    rungs, each = plan.tuning.candidates, plan.tuning.candidates
    while rungs > 1:
        rungs = max(1, int(rungs * plan.tuning.keep))
        each += rungs
    problems = sum(len(m.shapes) * len(m.dtypes) for m in plan.models) + len(plan.raw_specs)
    return problems * len(plan.targets) * each


class _OnRay:
    """Ray, started with the first job: a sweep on this machine that finds everything done starts nothing."""

    def __init__(self, options: Options, shop: Shop, targets: tuple[str, ...], run_id: str) -> None:
        self._options, self._shop, self._targets, self._run_id = options, shop, targets, run_id
        self._running: tuple[Guardian, RayExecutor] | None = None
        self.after_start: Callable[[], None] = lambda: None

    @property
    def capacity(self) -> int:
        return self._running[1].capacity if self._running else 2 * cores_given() + 3

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        if self._options.address == "local":
            return places_of(targets, stages_of(self._shop).devices())
        return self._started().places(targets)

    def submit(self, job: Job) -> Future[Row]:
        """A job that brings its own end needs no worker, only its row."""
        if job.trouble is None:
            return self._started().submit(job)
        ended: Future[Row] = Future()
        ended.set_result(run_stages(job, self._shop))
        return ended

    def state(self) -> dict[str, Any]:
        return self._running[1].state() if self._running else {}

    def close(self) -> None:
        """Ends everything that was started for this sweep, and waits until it is gone."""
        if self._running is None:
            return
        guardian, executor = self._running
        try:
            executor.close()
            executor.end_session()
        finally:
            guardian.close()

    def _started(self) -> RayExecutor:
        if self._running is None:
            self._running = self._start()
            self.after_start()
        return self._running[1]

    def _start(self) -> tuple[Guardian, RayExecutor]:
        from farm import actors
        from farm.nodes import local_wishes
        from farm.ray_executor import RayExecutor

        guardian = Guardian(self._run_id)
        try:
            folder = actors.start_session(self._options.address, cores_given())
            if not folder:
                return guardian, RayExecutor(self._shop, targets=self._targets)
            guardian.watch_folder(folder)
            wishes = local_wishes(self._targets, stages_of(self._shop).devices())
            return guardian, RayExecutor(self._shop, wishes, cores_given())
        except BaseException:
            guardian.close()
            raise


def _executor(options: Options, shop: Shop, plan: Plan, run_id: str) -> Executor:
    """The executor that the options ask for."""
    return LocalExecutor(shop) if options.executor == "local" else _OnRay(options, shop, plan.targets, run_id)


def check_sanitizer(targets: tuple[str, ...]) -> None:
    """Raises InputError where a GPU of this machine is to be used and there is no compute-sanitizer for it."""
    from verifier.cuda_sanitize import NoSanitizer, find_sanitizer

    if any(device.device != "cpu" and set(targets) & set(device.targets) for device in devices_here()):
        try:
            find_sanitizer()
        except NoSanitizer as error:
            raise InputError("--sanitize", str(error)) from None


# ------------------------------------------------------------------------------------------------------------ the table


def _in_table(row: Row) -> tuple[Any, ...]:
    spec = row["_spec"]
    return (row["_name"], spec.dtype, spec.seqlen_k, spec.seqlen_q, row["_target"])


def table_row(row: Row) -> dict[str, Any]:
    """One problem of the closing table as plain values; times in milliseconds."""
    spec, ok = row["_spec"], row["reason_code"] == "ok"

    def ms(name: str) -> float | None:
        return round(1e3 * row[name], 4) if ok and row.get(name) else None

    return {
        "model": row["_name"] or "spec",
        "shape": f"{spec.batch} x {spec.num_heads}/{spec.num_kv_heads} x {spec.seqlen_q}x{spec.seqlen_k} d{spec.head_dim}"
        + ("" if spec.head_dim == spec.head_dim_v else f"/{spec.head_dim_v}"),
        "dtype": spec.dtype,
        "target": row["_target"],
        "ours_ms": ms("p50_s"),
        "rival": row.get("baseline_name") if ok else None,
        "rival_ms": ms("baseline_p50_s"),
        "ratio": round(row["ratio_p50"], 3) if ok and row.get("ratio_p50") else None,
        "verdict": "verified" if ok else row["reason_code"],
        "row_id": row.get("row_id"),
    }
