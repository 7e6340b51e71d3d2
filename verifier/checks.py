"""Compares a candidate's outputs with the reference, element by element, and says what is wrong in one sentence. Runs nothing.

A check returns None or a `Finding`; the order in `check_outputs` is the order of blame. Non-finite values never match
anything but themselves: O has to be finite everywhere, LSE may be -inf exactly where a row sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifier.oracle import Reference
from verifier.records import CaseError, Witness
from verifier.tolerance import Errors, errors

#: A rival that is so many times as far off as a candidate may be computes something else.
RIVAL_SLACK = 16.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason of the closed list, with its witness."""

    reason: str
    witness: Witness


@dataclass(frozen=True, slots=True)
class Outputs:
    """out (B, H, Sq, Dv), lse (B, H, Sq) or None; unwritten: name -> booleans of its shape, true where nobody wrote."""

    out: Tensor
    lse: Tensor | None
    unwritten: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """What an input should give on the query rows that are compared.

    rows: (R,) their indices among Sq. reference: out (B, H, R, Dv) and lse (B, H, R) in float64, at these rows. trusted: errors
    of the plain implementation; limits: what a candidate's may be.
    """

    input_name: str
    rows: Tensor
    reference: Reference
    trusted: Errors
    limits: Errors

    @property
    def for_a_rival(self) -> Expected:
        """With wider limits: a rival's error may be larger than a candidate's, since it is not the one judged."""
        return replace(self, limits=self.limits.times(RIVAL_SLACK))

    def of(self, outputs: Tensor) -> Tensor:
        """The compared rows of an output."""
        return outputs[:, :, self.rows]

    def place(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of the compared rows stands in the whole output."""
        return (*at[:2], int(self.rows[at[2]]), *at[3:])


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
    lse = None if outputs.lse is None else expected.of(outputs.lse)
    return errors(expected.of(outputs.out), lse, expected.reference)


def everything_written(outputs: Outputs, expected: Expected) -> Finding | None:
    """No element of an output still holds the poison that lay there before the call."""
    for name, missing in outputs.unwritten.items():
        if bool(missing.any()):
            share = f"{int(missing.sum())} of {missing.numel()} elements of {name} were never written"
            return _finding("unwritten_output", "written", share, expected, where=_first(missing))
    return None


def output_finite(outputs: Outputs, expected: Expected) -> Finding | None:
    """O is finite everywhere, in rows that are not compared too."""
    wrong = ~outputs.out.isfinite()
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message = f"O holds {int(wrong.sum())} values that are not finite"
    found = str(float(outputs.out[at]))
    return _finding("wrong_value", "finite", message, expected, where=at, found=found, should="a finite number")


def masked_rows_zero(outputs: Outputs, expected: Expected) -> Finding | None:
    """A row that sees nothing gives exactly 0."""
    out = expected.of(outputs.out)
    wrong = (expected.reference.magnitude == 0) & (expected.reference.out == 0) & (out != 0)
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message, found = "a row that sees nothing has to give exactly 0", str(float(out[at]))
    return _finding("wrong_value", "masked rows", message, expected, where=expected.place(at), found=found, should="0.0")


def lse_pattern(outputs: Outputs, expected: Expected) -> Finding | None:
    """-inf where a row sees nothing, finite elsewhere: the very same pattern."""
    if outputs.lse is None:
        return None
    lse, reference = expected.of(outputs.lse), expected.reference.lse
    wrong = torch.where(reference.isfinite(), ~lse.isfinite(), lse != reference)
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    message = "LSE has to be -inf where a row sees nothing and finite elsewhere"
    found, should = str(float(lse[at])), _seven_digits(reference[at])
    return _finding("wrong_value", "lse pattern", message, expected, where=expected.place(at), found=found, should=should)


#: Measures of `Errors` -> in words.
OUTPUT_MEASURES = {
    "max_abs": "the largest error",
    "rms": "the root mean square of the errors",
    "row": "the largest error of a row by the row's own scale",
}
LSE_MEASURES = ("lse_max", "lse_rms")


def output_close(outputs: Outputs, expected: Expected) -> Finding | None:
    """No measure of O's errors is over its limit."""
    found = _errors(outputs, expected)
    for measure, words in OUTPUT_MEASURES.items():
        if (over := _over(measure, found, expected)) is not None:
            out = expected.of(outputs.out).double()
            at = _worst(out, expected, by_row=measure == "row")
            return _off(measure, f"{words} of O is {over}", out, expected.reference.out, at, expected)
    return None


def lse_close(outputs: Outputs, expected: Expected) -> Finding | None:
    """No measure of the errors of LSE is over its limit."""
    if outputs.lse is None:
        return None
    found = _errors(outputs, expected)
    for measure in LSE_MEASURES:
        if (over := _over(measure, found, expected)) is not None:
            lse, reference = expected.of(outputs.lse).double(), expected.reference.lse
            at = _largest_at(torch.where(reference.isfinite(), (lse - reference).abs(), 0))
            return _off(measure, f"the error of LSE ({measure}) is {over}", lse, reference, at, expected)
    return None


CHECKS: tuple[Check, ...] = (everything_written, output_finite, masked_rows_zero, lse_pattern, output_close, lse_close)


def _finding(
    reason: str, check: str, message: str, expected: Expected, *, where: tuple[int, ...], found: str = "", should: str = ""
) -> Finding:
    """where: indices of an element of an output, in the order of its axes."""
    place = zip(("batch", "head", "query", "dim"), where, strict=False)
    message += " (" + ", ".join(f"{name} {index}" for name, index in place) + ")"
    return Finding(reason, Witness(check, message, expected.input_name, should, found))


def _off(check: str, message: str, found: Tensor, reference: Tensor, at: tuple[int, ...], expected: Expected) -> Finding:
    """A value that is too far from the reference's; `at` counts the compared rows."""
    values = {"found": _seven_digits(found[at]), "should": _seven_digits(reference[at])}
    return _finding("wrong_value", check, message, expected, where=expected.place(at), **values)


def _over(measure: str, found: Errors, expected: Expected) -> str | None:
    """What is to be said of an error over its limit; an error that is no number is over every limit."""
    value, limit, trusted = (getattr(e, measure) for e in (found, expected.limits, expected.trusted))
    if value <= limit:
        return None
    return f"{value:.3g}, over the limit {limit:.3g} (a plain implementation: {trusted:.3g})"


def _seven_digits(value: Tensor) -> str:
    return f"{float(value):.7g}"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _largest_at(off: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))


def _worst(out: Tensor, expected: Expected, *, by_row: bool) -> tuple[int, ...]:
    """The element of the compared rows that is the furthest off, by_row: measured by its row's own scale."""
    off = (out - expected.reference.out).abs()
    if by_row:
        off = off / expected.reference.magnitude.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return _largest_at(off)
