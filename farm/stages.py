"""One attempt from spec to catalog row: what the design's table says, as plain functions. Knows no queue, no Ray and no plan.

    spec -> sketch -> code -> holes filled       the author and the search, before the job exists
    text -> checked program -> source -> binary  `build`: runs anywhere, runs no candidate
    binary -> verdict -> measurement -> row      `prove`: on the device, the candidate in a killable child

Every way out is a row with a reason of `verifier.records.REASONS`. `run_attempt` is both in turn.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from catalog.schema import make_row
from farm import rows
from farm.jobs import Built, Job, Row, Shop
from farm.quiet import compiling, measuring
from farm.variants import load_variants
from generator.tl.checker import check
from generator.tl.diagnostics import Diagnostic, render
from generator.tl.ir import Program
from generator.tl.parser import parse
from generator.translate import translate
from generator.translate.records import Translated, Untranslatable
from verifier.compile import compile_translated
from verifier.children import Limits
from verifier.environment import device_key
from verifier.records import Binary, CompileFailed, Failed, Measurement, Passed, Verdict, Witness


def run_attempt(job: Job, shop: Shop, device: str = "cpu") -> Row:
    """One job to its row."""
    built = build(job, shop)
    return prove(built, shop, device) if isinstance(built, Built) else built


def build(job: Job, shop: Shop) -> Built | Row:
    """The program read, checked, translated and compiled; or the row that says why not."""
    _prepare(shop)
    columns = job.columns | rows.of_texts(job, artifacts(shop))
    if job.trouble:
        return _row(job, columns, *job.trouble)
    program, faults = _read(job.program)
    if program is None:
        return _row(job, columns, "tl_rejected", _first(faults), log=render(faults, job.program, "program.tl"))
    match translate(program, job.target):
        case Untranslatable() as no:
            return _row(job, columns, no.reason, no.message)
        case Translated() as translated:
            columns |= rows.of_translated(translated, artifacts(shop))
    with compiling():
        result = compile_translated(translated, shop.cache, Limits(wall_s=shop.compile_wall_s))
    match result:
        case CompileFailed() as no:
            return _row(job, columns | {"compile_s": no.compile_s}, no.reason, rows.last_error(no.log), log=no.log, shop=shop)
        case Binary() as binary:
            return Built(job, translated.launch, binary, columns | rows.of_binary(binary, artifacts(shop)))


def prove(built: Built, shop: Shop, device: str = "cpu") -> Row:
    """The binary judged and, when it passed, measured beside its rivals."""
    _prepare(shop)
    job, columns = built.job, built.columns | _of_device(device)
    binary = rows.present(built.binary, artifacts(shop), Path(shop.cache))
    verdict = _judged(binary, built, device)
    columns |= rows.of_verdict(verdict)
    match verdict:
        case Failed() as no:
            return _row(job, columns, no.reason, no.witness.message)
        case Passed():
            pass
    started = time.monotonic()
    with measuring():
        result = measure(binary, built.launch, job.spec, rivals=job.rivals, budget_s=job.measure_s)
    columns["measure_s"] = time.monotonic() - started
    match result:
        case Failed() as no:
            return _row(job, columns | rows.of_witness(no.witness), no.reason, no.witness.message)
        case Measurement() as timed:
            return _row(job, columns | rows.of_measurement(timed), "ok", "")
