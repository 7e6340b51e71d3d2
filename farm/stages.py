"""One attempt from spec to catalog row: what the design's table says, as plain functions. Knows no queue, no Ray and no plan.

    spec -> sketch -> code -> holes filled       the author and the search (farm.search), before the job exists
    text -> checked program -> source -> binary  `build`: runs anywhere, runs no candidate; or the author's own source
    binary -> verdict -> measurement -> row      `prove`: on the device, the candidate in a killable child

Every way out is a row with a reason of `verifier.records.REASONS`. `run_attempt` is both in turn.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from catalog.schema import make_row
from farm import rows
from farm.devices import LocalDevice, devices_here, local_device, slot_of
from farm.foreign import Refused, read_source
from farm.gpu_tools import profiled, sanitized
from farm.jobs import ASIDE, Built, Job, Row, Shop, device_seconds
from farm.neighbours import strangers_on
from farm.quiet import StillBusy, measuring, working
from farm.variants import load_variants
from farm.versions import harness_version, translator_version
from generator.occupancy import cannot_run, not_worth_it, occupancy_of
from generator.spec import SpecError
from generator.targets import find_target
from generator.tl.checker import parse_and_check
from generator.tl.diagnostics import Diagnostic, render
from generator.translate import translate
from generator.translate.records import Translated, Untranslatable
from verifier.benchmark import measure
from verifier.children import Limits
from verifier.compile import compile_translated
from verifier.environment import NoDevice
from verifier.judge import judge
from verifier.patience import Patience
from verifier.rates import ensure_rates
from verifier.records import Binary, CompileFailed, Failed, Measurement, Passed, Verdict
from verifier.selftest import ensure_selftest

#: Verdicts of this process by (binary, spec), with the attempt that asked first: a later rung of a search measures the same bytes
#: for longer.
_VERDICTS: OrderedDict[tuple[str, str], tuple[Passed, str]] = OrderedDict()
_KEPT_VERDICTS = 256
#: A sweep times beside our kernel only rivals that are at most so many times as slow as the fastest of them.
NEAR = 1.5


def run_attempt(job: Job, shop: Shop, device: str = "cpu") -> Row:
    """One job to its row, however long others keep the device."""
    built = build(job, shop)
    while isinstance(built, Built):
        with contextlib.suppress(StillBusy):
            return prove(built, shop, device)
    return built


def build(job: Job, shop: Shop) -> Built | Row:
    """The program read, checked, translated and compiled; or the row that says why not."""
    _know_variants(shop)
    store = rows.artifacts_at(shop.catalog)
    columns = job.columns | rows.of_texts(job, store)
    if job.trouble:
        return row_of(job, shop, columns, *job.trouble)
    match read_source(job) if job.source else _translated(job):
        case Refused() as refused:
            return row_of(job, shop, columns | rows.of_log(refused.log, store), refused.reason, refused.message)
        case Translated() as translated:
            columns |= rows.of_translated(translated, store)
    with working():
        result = compile_translated(translated, shop.cache, Limits(wall_s=shop.compile_wall_s), arch=job.arch)
    match result:
        case CompileFailed() as no:
            columns |= rows.of_log(no.log, store) | {"compile_s": no.compile_s}
            return row_of(job, shop, columns, no.reason, rows.last_error(no.log))
        case Binary() as binary:
            columns |= rows.of_binary(binary, store)
            if why := _put_aside(job, translated, binary):
                return row_of(job, shop, columns, "does_not_fit", why)
            return Built(job, translated.launch, binary, columns)


def prove(built: Built, shop: Shop, device: str = "cpu") -> Row:
    """The binary judged and, when it passed, measured beside its rivals. Raises `farm.quiet.StillBusy` where somebody else keeps
    the device for longer than the shop waits; asked again, it goes on from the verdict.
    """
    row = _proved(built, shop, device)
    if device != "cpu":
        row["gpu_s"] = (row["gpu_s"] or 0.0) + device_seconds(row)
    return row


def _proved(built: Built, shop: Shop, device: str) -> Row:
    """As `prove`; gpu_s has what tools took that look at a kernel besides."""
    _know_variants(shop)
    job, columns = built.job, built.columns | dict(rows.device_columns(device))
    columns |= rows.of_borrowed(built.binary, find_target(job.target).isa, columns["device_name"])
    binary = rows.present(built.binary, rows.artifacts_at(shop.catalog), Path(shop.cache))
    try:
        with working(slot_of(device), shop.slot_wait_s):
            verdict = _judged(binary, built, device)
        columns |= rows.of_verdict(verdict)
        if isinstance(verdict, Passed) and shop.sanitize:
            verdict = sanitized(binary, built, device, columns) or verdict
        if isinstance(verdict, Failed):
            return row_of(job, shop, columns, verdict.reason, verdict.witness.message)
        result, strangers = _measured_alone(binary, built, device, shop, columns)
        if job.profile and not job.source and isinstance(result, Measurement):  # foreign code runs in the sandbox only
            columns |= profiled(binary, built, device, shop, columns)
    except SpecError as error:
        return row_of(job, shop, columns, "not_run", f"this problem cannot be judged: {error}")
    except NoDevice as error:
        return row_of(job, shop, columns, "missing_device", str(error))
    if strangers:
        return row_of(job, shop, columns, "throttled", f"on the device while it was timed, and none of ours: {strangers}")
    match result:
        case Failed() as no:
            return row_of(job, shop, columns | rows.of_witness(no.witness), no.reason, no.witness.message)
        case Measurement() as timed:
            return row_of(job, shop, columns | rows.of_measurement(timed), "ok", "")


def row_unproven(built: Built, reason: str, message: str) -> Row:
    """The row of a binary that no device here can run."""
    return row_of(built.job, None, built.columns, reason, message)


def row_without_verdict(job: Job, reason: str, message: str) -> Row:
    """The row of a job that was lost or stopped on its way."""
    return row_of(job, None, job.columns, reason, message)


def row_of(job: Job, shop: Shop | None, columns: dict[str, Any], reason: str, message: str) -> Row:
    """The row of a job that ended for a reason, on a device or before it came to the one that it was for."""
    return make_row(
        **({"device_key": job.device_key} | columns),
        attempt_key=job.key,
        attempt_no=job.attempt_no,
        reason_code=reason,
        message=message or None,
        spec=job.spec,
        spec_name=job.spec.name or None,
        target=find_target(job.target).name,
        translator_version=translator_version(),
        harness_version=harness_version(),
        sweep_id=shop.sweep_id if shop else None,
    )


def inspect_device(device: str, shop: Shop, expected_class: str = "") -> tuple[LocalDevice, tuple[str, ...]]:
    """What a device says of itself on start, and what keeps it from serving.

    Nothing is judged on a machine that does not refuse the traps and accept a known good kernel; what it gives to torch is then
    measured (`verifier.rates`) and told with its facts. expected_class: what the
    cluster's configuration says that this node has.
    """
    found = local_device(device)
    if expected_class and found.device_class != expected_class:
        return found, (f"the node's resources say {expected_class}, and its device is {found.name} ({found.device_class})",)
    checks = ensure_selftest(shop.cache, device=device)
    if failed := tuple(f"self-test: {c.name}: expected {c.expected}, found {c.found}" for c in checks if not c.ok):
        return found, failed
    try:
        with measuring(slot_of(device), shop.slot_wait_s):
            rates = ensure_rates(shop.cache, device)
    except StillBusy:
        return found, ()  # others measure there: its rates are told by the next start
    except NoDevice as error:
        return found, (str(error),)
    return replace(found, facts=(*found.facts, *asdict(rates).items())), ()


def versions() -> tuple[str, str]:
    """Translator and harness, as rows name them."""
    return translator_version(), harness_version()


def devices() -> tuple[LocalDevice, ...]:
    """The devices of this machine."""
    return devices_here()


def _translated(job: Job) -> Translated | Refused:
    """The program read, checked and translated by our own translator."""
    parsed = parse_and_check(job.program, filled=True)
    if parsed.program is None:
        return Refused("tl_rejected", _first(parsed.diagnostics), render(parsed.diagnostics, job.program, "program.tl"))
    found = translate(parsed.program, find_target(job.target))
    return Refused(found.reason, _with_statement(found, job.program)) if isinstance(found, Untranslatable) else found


def _judged(binary: Binary, built: Built, device: str) -> Verdict:
    """The verdict on these bytes for this problem; one that passed a moment ago in this process is not asked for again, and costs
    another attempt nothing.
    """
    key = (binary.hash, built.job.spec.hash)
    if (known := _VERDICTS.get(key)) is not None:
        passed, asked_by = known
        return passed if asked_by == built.job.key else replace(passed, verify_s=0.0)
    verdict = judge(binary, built.launch, built.job.spec, device=device)
    if isinstance(verdict, Passed):
        _VERDICTS[key] = verdict, built.job.key
        while len(_VERDICTS) > _KEPT_VERDICTS:
            _VERDICTS.popitem(last=False)
    return verdict


def _put_aside(job: Job, translated: Translated, binary: Binary) -> str:
    """Why a cubin is not worth a device's time: it cannot run, or the search has better ones. "" for all others."""
    target = find_target(job.target)
    found = occupancy_of(target.name, target.compute_capability, translated.launch.target_facts, binary.resources)
    if why := cannot_run(found):
        return why
    why = not_worth_it(found, binary.resources) if job.prune else ""
    return f"{ASIDE}{why}" if why else ""


def _measured_alone(
    binary: Binary, built: Built, device: str, shop: Shop, columns: dict[str, Any]
) -> tuple[Measurement | Failed, str]:
    """The times, and who else was on the device meanwhile ("": nobody). The seconds that it took go into the row's columns."""
    asked = time.monotonic()
    with measuring(slot_of(device), shop.slot_wait_s):
        started, strangers = time.monotonic(), strangers_on(device)
        result = _measured(binary, built, device)
        strangers |= strangers_on(device)
        again_s = result.environment["again_s"] if isinstance(result, Measurement) else result.again_s
        columns |= {"measure_s": max(0.0, time.monotonic() - started - again_s), "again_s": again_s}
        columns["queue_s"] = columns.get("queue_s", 0.0) + started - asked
    return result, ", ".join(f"{name} ({pid})" for pid, name in sorted(strangers.items()))


def _measured(binary: Binary, built: Built, device: str) -> Measurement | Failed:
    job = built.job
    patience = Patience(budget_s=job.measure_s, near=NEAR)
    return measure(binary, built.launch, job.spec, patience=patience, device=device, rivals=job.rivals)


def _with_statement(no: Untranslatable, program: str) -> str:
    """The message with the statement that it is about: its line's number is the canonical text's, not its author's."""
    lines = program.split("\n")
    return f"{no.message} (in: {lines[no.line - 1].strip()})" if 0 < no.line <= len(lines) else no.message


def _first(diagnostics: Sequence[Diagnostic]) -> str:
    errors = [d for d in diagnostics if d.severity == "error"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{errors[0]}{more}" if errors else "no program"


@functools.lru_cache(maxsize=4)
def _load(path: str) -> None:
    load_variants(path)


def _know_variants(shop: Shop) -> None:
    if shop.variants:
        _load(shop.variants)
