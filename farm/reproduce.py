"""One row of a catalog again, here: from its stored source, or from its program where it never became source. Chooses no row."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.store import Catalog
from farm import rows, stages
from farm.config import load_config, usable_cache
from farm.console import InputError
from farm.devices import arch_for, device_for, devices_here
from farm.jobs import Built, Job, Row, Shop, new_run_id
from farm.quiet import StillBusy
from generator.spec import spec_from_plain
from generator.translate.records import Translated, launch_from_plain
from verifier.children import Limits
from verifier.compile import compile_translated
from verifier.records import Binary, CompileFailed

#: Columns that say where a program came from: a row that is made again keeps them.
_LINEAGE = (
    "author", "author_mode", "prompt_hash", "transcript_hash", "generation", "proposal", "sketch_hash", "tl_hash", "program_hash",
    "source_hash", "language", "launch", "schedule", "entry_point", "isa", "tuning",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What was and what came out now. same_binary: None where one of the two has none."""

    before: Row
    after: Row
    same_binary: bool | None

    @property
    def same_verdict(self) -> bool:
        return bool(self.before["reason_code"] == self.after["reason_code"])

    def lines(self) -> list[str]:
        """For people: verdict, binary and time, before and now."""
        said = [f"verdict: {self.before['reason_code']} before, {self.after['reason_code']} now"]
        if self.after.get("message"):
            said.append(f"    {self.after['message']}")
        if self.after.get("sanitizer"):
            said.append(f"sanitizer: {self.after['sanitizer']}")
        if self.same_binary is not None:
            said.append(f"binary: {'the same bytes' if self.same_binary else 'other bytes (another compiler, or other flags)'}")
        if self.before.get("device_key") != self.after.get("device_key"):
            names = (side.get("device_name") or "none" for side in (self.before, self.after))
            said.append("device: {} before, {} now".format(*names))
        for name, what in (("p50_s", "time, ms"), ("baseline_p50_s", "rival, ms")):
            if self.before.get(name) and self.after.get(name):
                said.append(f"{what}: {1e3 * self.before[name]:.3f} before, {1e3 * self.after[name]:.3f} now")
        if self.before.get("ratio_p50") and self.after.get("ratio_p50"):
            said.append(f"ratio: {self.before['ratio_p50']:.2f}x before, {self.after['ratio_p50']:.2f}x now")
        return said


def reproduce(opened: Catalog, row: Row, shop: Shop, measure_s: float = 1.0) -> Reproduction:
    """Compiles, judges and times a row again. Raises InputError for rows that hold nothing to run.

    shop.catalog: where the artifacts of the outcome go, `opened` itself where the outcome is to be a row of it.
    """
    job = _job(opened, row, measure_s)
    built = _built(opened, row, job, shop) if row["source_hash"] else stages.build(job, shop)
    if not isinstance(built, Built):
        return Reproduction(row, built, None)
    same = row["binary_hash"] == built.binary.hash if row["binary_hash"] else None
    device = device_for(job.target)
    if device is None:
        after = stages.row_unproven(built, "compiled_unverified", "no device here can run this target")
    else:
        after = _proved(built, shop, device.device)
    return Reproduction(row, after, same)


def _proved(built: Built, shop: Shop, device: str) -> Row:
    while True:
        try:
            return stages.prove(built, shop, device)
        except StillBusy as busy:
            print(f"waiting: {busy}", file=sys.stderr)


def _job(opened: Catalog, row: Row, measure_s: float) -> Job:
    if not row["program_hash"] and not row["source_hash"]:
        ended = f"{row['row_id'][:12]} ended as {row['reason_code']} before there was a program"
        raise InputError("ROW_ID", f"{ended}: nothing can be run")
    program = opened.artifacts.text(row["program_hash"]) if row["program_hash"] else ""
    isa = (row["isa"] or [None])[0]
    target = f"cpu-{isa}" if row["target"] == "cpu" and isa else row["target"]
    columns: dict[str, Any] = {name: row[name] for name in _LINEAGE if row[name] is not None}
    columns["parent_row_id"] = row["row_id"]
    spec = spec_from_plain(json.loads(row["spec"]) | {"name": row["spec_name"] or ""})
    number = row["attempt_no"] + 1
    return Job(row["attempt_key"], spec, target, program, measure_s, attempt_no=number, arch=arch_for(target), columns=columns)


def _built(opened: Catalog, row: Row, job: Job, shop: Shop) -> Built | Row:
    """The stored source compiled here: what the translator would write today is another matter."""
    store, outcome = opened.artifacts, rows.artifacts_at(shop.catalog)
    launch = launch_from_plain(json.loads(row["launch"]))
    source, schedule = store.text(row["source_hash"]), json.loads(row["schedule"] or "{}")
    translated = Translated(row["target"], row["language"], source, launch, row["program_hash"] or "", schedule)
    match compile_translated(translated, shop.cache, Limits(wall_s=shop.compile_wall_s), arch=job.arch):
        case CompileFailed() as no:
            columns = job.columns | rows.of_log(no.log, outcome) | {"compile_s": no.compile_s}
            return stages.row_of(job, shop, columns, no.reason, rows.last_error(no.log))
        case Binary() as binary:
            return Built(job, launch, binary, job.columns | rows.of_binary(binary, outcome))


def again(opened: Catalog, stale: Sequence[Row], say: Callable[[str], None]) -> list[Reproduction]:
    """Rows of an older translator or harness judged and timed once more on this device; each outcome is stored as the next try.

    Rows of other devices are left for those. Binaries are those of the stored sources.
    """
    config, here = load_config(), {device.key for device in devices_here()}
    shop = Shop(opened.uri, str(usable_cache(config)), "verify-again")
    results = []
    with opened.writer(new_run_id()) as writer:
        for number, row in enumerate(stale, 1):
            if row["device_key"] not in here:
                say(f"[{number}/{len(stale)}] {row['row_id'][:12]}: of another device, left alone")
                continue
            for _ in range(3):  # a disturbed measurement says nothing about the row
                result = reproduce(opened, opened.get(row["row_id"]), shop)
                if result.after["reason_code"] != "throttled":
                    break
            writer.append(result.after)
            results.append(result)
            say(f"[{number}/{len(stale)}] {row['row_id'][:12]}: {result.after['reason_code']}")
    return results
