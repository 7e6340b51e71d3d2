"""What a row says to the author of its program: feedback as text. Judges nothing: the row has the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farm.jobs import Row
from generator.feedback import Feedback, FeedbackKind
from generator.tl.checker import parse_and_check
from generator.tl.diagnostics import Diagnostic, render
from verifier.reviewer import Wrong

_KINDS: dict[str, FeedbackKind] = {
    "ok": "measured",
    "tl_rejected": "tl_rejected",
    "source_rejected": "source_rejected",
    "author_failed": "no_program",
    "translate_failed": "translate_failed",
    "unsupported_dtype": "translate_failed",
    "does_not_fit": "translate_failed",
    "compile_error": "compile_failed",
    "compile_timeout": "compile_failed",
    "compile_oom": "compile_failed",
    "wrong_value": "wrong_value",
    **dict.fromkeys(("crash", "timeout", "mutates_inputs", "unwritten_output", "out_of_bounds", "nondeterministic"), "fault"),
    "implausible_time": "fault",
}

_MEANINGS = {
    "crash": "the kernel crashed",
    "timeout": "the kernel did not end in time",
    "mutates_inputs": "the kernel writes to its inputs",
    "unwritten_output": "parts of the output are never written",
    "out_of_bounds": "the kernel reads or writes outside its tensors",
    "nondeterministic": "two runs on the same input differ",
    "implausible_time": "the time is below what the hardware can do",
    "wrong_value": "values are wrong",
}


#: Columns of a row that feedback is made from, besides times and reasons.
TOLD_COLUMNS = (
    "witness_input", "witness_expected", "witness_found", "log_hash", "source_hash", "floor_s", "num_threads", "registers",
    "spill_bytes", "shared_bytes", "tuning", "resources",
)  # fmt: skip
#: Reasons of waiting that are told.
MOST_WAITS = 4


def of_row(row: Row, log: str = "") -> Feedback:
    """Feedback on an attempt from its row; `log` is the compiler's where there is one."""
    reason = row["reason_code"]
    kind = _KINDS.get(reason, "not_judged")
    text = _measured(row) if reason == "ok" else _failed(row, log)
    return Feedback(kind, text, row.get("p50_s") if reason == "ok" else None, reason, {"row_id": row.get("row_id")})


def of_sketch(sketch: str) -> str:
    """What is wrong with a sketch: errors only, since a sketch may hold prose; "" where there are none."""
    errors = [d for d in parse_and_check(sketch, "sketch").diagnostics if d.severity == "error"]
    return render(errors, sketch) if errors else ""


def of_diagnostics(diagnostics: Sequence[Diagnostic], text: str, remarks: Sequence[str] = ()) -> Feedback:
    """What the parser and checker found, with lines, carets and hints; first how the answer itself went wrong."""
    found = "\n".join([*(f"{remark}." for remark in remarks), render(diagnostics, text)])
    return Feedback("tl_rejected", found, reason="tl_rejected")


def of_review(wrong: Wrong, text: str) -> Feedback:
    """What the interpreter found, with the line it points at."""
    lines = text.split("\n")
    where = f"line {wrong.line}: {lines[wrong.line - 1].strip()}\n" if 0 < wrong.line <= len(lines) else ""
    input_name = f" (smallest input that shows it: {wrong.input_name})" if wrong.input_name else ""
    return Feedback("wrong_tile", f"{where}{wrong.message}{input_name}", reason="wrong_value")


def _failed(row: Row, log: str) -> str:
    reason = row["reason_code"]
    lines = [f"{reason}: {row.get('message') or _MEANINGS.get(reason, '')}".rstrip(": ")]
    for name, title in (("witness_input", "input"), ("witness_expected", "expected"), ("witness_found", "found")):
        if row.get(name):
            lines.append(f"{title}: {row[name]}")
    if log.strip() and reason.startswith("compile"):
        lines += ["compiler:", log.strip()]
    if log.strip() and reason == "source_rejected":
        lines += ["everything that was found:", log.strip()]
    return "\n".join(lines)


def _measured(row: Row) -> str:
    """Measured facts that tell where time goes: never a judgement of how good that is."""

    def us(name: str) -> str:
        return f"{1e6 * row[name]:,.1f} us"

    facts: list[str] = [f"median time of a call: {us('p50_s')}"]
    if row.get("floor_s"):
        facts.append(f"no right kernel can be faster than: {us('floor_s')}")
    if row.get("baseline_p50_s"):
        facts.append(f"{row['baseline_name']} in the same run: {us('baseline_p50_s')} ({row['ratio_p50']:.2f} times ours)")
    if row.get("num_threads"):
        facts.append(f"threads: {row['num_threads']}")
    for name, unit in (
        ("registers", "registers a thread"),
        ("spill_bytes", "bytes spilled a thread"),
        ("shared_bytes", "bytes of shared memory a block"),
    ):
        if row.get(name) is not None:
            facts.append(f"{row[name]} {unit}")
    if tuning := _mapping(row.get("tuning")):
        facts.append(f"constants: {', '.join(f'{k} = {v}' for k, v in tuning.items())}")
    return "\n".join(facts + _stalls(_mapping(row.get("resources")).get("stalls")))


def _stalls(found: Any) -> list[str]:
    """What the profiler saw, where there is one: what warps wait for most, and what was busy."""
    if not found or not found["waiting"]:
        return []
    waits = ", ".join(f"{reason.replace('_', ' ')} {share:.0%}" for reason, share in found["waiting"][:MOST_WAITS])
    busy = ", ".join(f"{what} {share:.0%}" for what, share in found["busy"])
    return [
        f"between two instructions a warp waits for: {waits}",
        *([f"busy, of what the device can do: {busy}"] if busy else []),
    ]


def _mapping(value: Any) -> dict[str, Any]:
    """A column of JSON as its value: fresh rows hold it as text."""
    found = json.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else {}
