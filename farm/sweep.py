"""Puts a sweep together: catalog, executor, searches, display, signals; and says at the end what came of it. Judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog import store
from catalog.store import Catalog
from farm.config import Config
from farm.console import InputError
from farm.executors import Executor, LocalExecutor, stages_of
from farm.guardian import Guardian
from farm.jobs import Row, Shop
from farm.plan import Plan
from farm.progress import PlainDisplay, Tally, make_display
from farm.scheduler import Counts, Search, Sweep
from farm.search import RuleSearch, Versions
from generator.canonical import digest
from verifier.environment import cores_given

#: What is kept in memory of attempts that ended in earlier starts.
_KNOWN = (
    "row_id", "attempt_key", "attempt_no", "reason_code", "message", "p50_s", "baseline_name", "baseline_p50_s", "ratio_p50",
    "ratio_low", "ratio_high", "generation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a plan here: where rows go and on what the work runs."""

    catalog: str
    executor: str = "ray"
    address: str = "local"
    quiet: bool = False
    stages: str = "farm.stages"


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of one start."""

    catalog: str
    run_id: str
    counts: Counts
    tally: Tally
    wall_s: float
    stop_reason: str

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
            "best": [table_row(row) for row in self.tally.best.values()],
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
    opened = store.open(options.catalog, create=True)
    config.cache.mkdir(parents=True, exist_ok=True)
    run_id = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(4)
    sweep_id = f"{plan.name}-{digest(dataclasses.asdict(plan))[:8]}"
    shop = Shop(opened.uri, str(config.cache), sweep_id, plan.variants, stages=options.stages)
    started = time.monotonic()
    with _executor(options, shop, plan, run_id) as executor, opened.writer(run_id) as writer:
        tally = Tally(expected=_expected(plan))
        with make_display(tally, executor.state, options.quiet) as display:
            sweep = Sweep(
                executor, writer, KnownRows(opened), display, plan.budget, stages_of(shop).row_without_verdict
            )
            counts = asyncio.run(_run(sweep, plan, shop, display))
    opened.record_run(run_id, sweep_id, counts.planned, counts.known)
    return Summary(opened.uri, run_id, counts, tally, time.monotonic() - started, sweep.stop_reason)


async def _run(sweep: Sweep, plan: Plan, shop: Shop, display: PlainDisplay) -> Counts:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, functools.partial(_stop, sweep, display, signal.Signals(number).name))
    return await sweep.run(_searches(plan, shop))


def _stop(sweep: Sweep, display: PlainDisplay, name: str) -> None:
    display.note(f"{name}: stopping; what has ended is in the catalog, and the same command goes on from there")
    sweep.stop(f"stopped by {name}")


def _searches(plan: Plan, shop: Shop) -> Iterator[Search]:
    versions = Versions(*stages_of(shop).versions(), device_keys=stages_of(shop).device_keys(plan.targets))
    match plan.author:
        case "rules":
            author = RuleSearch(plan, versions)
        case other:
            raise InputError("author", f"{other} is not built in yet; rules is")
    for spec, target in plan.problems():
        yield functools.partial(author.solve, spec, target)


def _expected(plan: Plan) -> int:
    """Attempts, if every candidate is measured and every rung is full: what the time left is reckoned from."""
    rungs, each = plan.tuning.candidates, plan.tuning.candidates
    while rungs > 1:
        rungs = max(1, int(rungs * plan.tuning.keep))
        each += rungs
    problems = sum(len(m.shapes) * len(m.dtypes) for m in plan.models) + len(plan.raw_specs)
    return problems * len(plan.targets) * each


@contextlib.contextmanager
def _executor(options: Options, shop: Shop, plan: Plan, run_id: str) -> Iterator[Executor]:
    """The executor that the options ask for; when this ends, so do all its processes."""
    if options.executor == "local":
        local = LocalExecutor(shop)
        try:
            yield local
        finally:
            local.close()
        return
    guardian = Guardian(run_id)
    try:
        from farm import actors
        from farm.ray_executor import RayExecutor, local_wishes

        folder = actors.start_session(options.address, cores_given())
        if folder:
            guardian.watch_folder(folder)
        executor = RayExecutor(shop, local_wishes(plan.targets), cores_given())
        try:
            yield executor
        finally:
            executor.close()
            actors.stop_session()
    finally:
        guardian.close()


# ------------------------------------------------------------------------------------------------------------ the table


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
        "target": row.get("target") or "",
        "ours_ms": ms("p50_s"),
        "rival": row.get("baseline_name") if ok else None,
        "rival_ms": ms("baseline_p50_s"),
        "ratio": round(row["ratio_p50"], 3) if ok and row.get("ratio_p50") else None,
        "verdict": "verified" if ok else row["reason_code"],
        "row_id": row.get("row_id"),
    }
