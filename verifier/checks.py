"""Compares a candidate's outputs with the reference, element by element, and says what is wrong in one sentence. Runs nothing.

A check returns None or a `Finding`; the order in `check_outputs` is the order of blame. Non-finite values never match
anything but themselves: O has to be finite everywhere, LSE may be -inf exactly where a row sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.oracle import Reference
from verifier.records import CaseError, Witness
from verifier.tolerance import Errors, errors


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason of the closed list, with its witness."""

    reason: str
    witness: Witness


@dataclass(frozen=True, slots=True)
class Outputs:
    """out (B, H, Sq, Dv), lse (B, H, Sq) or None, and which elements of each were never written."""

    out: Tensor
    lse: Tensor | None
    unwritten: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """What an input should give on the query rows that are compared."""

    input_name: str
    rows: Tensor
    reference: Reference
    trusted: Errors
    limits: Errors


Check = Callable[[Outputs, Expected], Finding | None]


def check_outputs(outputs: Outputs, expected: Expected) -> Finding | None:
    """The first check that fails, or None."""
    for check in CHECKS:
        if (finding := check(outputs, expected)) is not None:
            return finding
    return None


def case_error(outputs: Outputs, expected: Expected) -> CaseError:
    """The measured errors beside their limits, for the row."""
    found = _errors(outputs, expected)
    return CaseError(
        expected.input_name, found.rms, found.max_abs, expected.trusted.rms, expected.trusted.max_abs, expected.limits.rms,
        expected.limits.max_abs, found.row, expected.limits.row, found.lse_max, expected.limits.lse_max,
    )  # fmt: skip


def _errors(outputs: Outputs, expected: Expected) -> Errors:
    out = outputs.out[:, :, expected.rows]
    return errors(out, None if outputs.lse is None else outputs.lse[:, :, expected.rows], expected.reference)


# --------------------------------------------------------------------------------------------------------------- checks


def everything_written(outputs: Outputs, expected: Expected) -> Finding | None:
    for name, missing in outputs.unwritten.items():
        if bool(missing.any()):
            share = f"{int(missing.sum())} of {missing.numel()} elements of {name} were never written"
            return _finding("unwritten_output", "written", share, expected, where=_first(missing))
    return None


def output_finite(outputs: Outputs, expected: Expected) -> Finding | None:
    wrong = ~outputs.out.isfinite()
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message = f"O holds {int(wrong.sum())} values that are not finite"
    return _finding(
        "wrong_value", "finite", message, expected, where=at, found=str(float(outputs.out[at])), should="a finite number"
    )


def masked_rows_zero(outputs: Outputs, expected: Expected) -> Finding | None:
    out = outputs.out[:, :, expected.rows]
    wrong = (expected.reference.magnitude == 0) & (expected.reference.out == 0) & (out != 0)
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message = "a row that sees nothing has to give exactly 0"
    return _finding("wrong_value", "masked rows", message, expected, where=at, found=str(float(out[at])), should="0.0")


def lse_pattern(outputs: Outputs, expected: Expected) -> Finding | None:
    """-inf where a row sees nothing, finite elsewhere: the very same pattern."""
    if outputs.lse is None:
        return None
    lse, reference = outputs.lse[:, :, expected.rows], expected.reference.lse
    wrong = torch.where(reference.isfinite(), ~lse.isfinite(), lse != reference)
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message = "LSE has to be -inf where a row sees nothing and finite elsewhere"
    return _finding(
        "wrong_value", "lse pattern", message, expected, where=at, found=str(float(lse[at])), should=f"{float(reference[at]):.7g}"
    )


def output_close(outputs: Outputs, expected: Expected) -> Finding | None:
    found, limits = _errors(outputs, expected), expected.limits
    for measure, words in (
        ("max_abs", "the largest error"),
        ("rms", "the root mean square of the errors"),
        ("row", "the largest error of a row by the row's own scale"),
    ):
        value, limit = getattr(found, measure), getattr(limits, measure)
        if not value <= limit:
            out = outputs.out[:, :, expected.rows].double()
            at = _worst(out, expected, by_row=measure == "row")
            message = f"{words} of O is {_over(measure, value, expected)}"
            should = f"{float(expected.reference.out[at]):.7g}"
            return _finding("wrong_value", measure, message, expected, where=at, found=f"{float(out[at]):.7g}", should=should)
    return None


def lse_close(outputs: Outputs, expected: Expected) -> Finding | None:
    if outputs.lse is None:
        return None
    found, limits = _errors(outputs, expected), expected.limits
    for measure in ("lse_max", "lse_rms"):
        value, limit = getattr(found, measure), getattr(limits, measure)
        if not value <= limit:
            lse, reference = outputs.lse[:, :, expected.rows].double(), expected.reference.lse
            off = torch.where(reference.isfinite(), (lse - reference).abs(), 0)
            at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
            message = f"the error of LSE ({measure}) is {_over(measure, value, expected)}"
            return _finding(
                "wrong_value",
                measure,
                message,
                expected,
                where=at,
                found=f"{float(lse[at]):.7g}",
                should=f"{float(reference[at]):.7g}",
            )
    return None


CHECKS: tuple[Check, ...] = (everything_written, output_finite, masked_rows_zero, lse_pattern, output_close, lse_close)


def _finding(
    reason: str, check: str, message: str, expected: Expected, *, where: tuple[int, ...], found: str = "", should: str = ""
) -> Finding:
    """`where` counts rows among those compared; the message gives the query's own index."""
    if len(where) >= 3 and reason == "wrong_value" and check != "finite":
        where = (*where[:2], int(expected.rows[where[2]]), *where[3:])
    place = dict(zip(("batch", "head", "query", "dim"), where, strict=False))
    message += " (" + ", ".join(f"{name} {index}" for name, index in place.items()) + ")"
    return Finding(reason, Witness(check, message, expected.input_name, should, found))


def _over(measure: str, value: float, expected: Expected) -> str:
    limit, trusted = getattr(expected.limits, measure), getattr(expected.trusted, measure)
    return f"{value:.3g}, over the limit {limit:.3g} (a plain implementation: {trusted:.3g})"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _worst(out: Tensor, expected: Expected, *, by_row: bool) -> tuple[int, ...]:
    off = (out - expected.reference.out).abs()
    if by_row:
        off = off / expected.reference.magnitude.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
