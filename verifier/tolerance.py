"""How far from the float64 answer a kernel may be: twice as far as a plain implementation in the same precision, plus rounding.

The plain implementation (`verifier.plain`) runs in several orders of summation and with several references, and the worst counts,
so that luck of one sets no limit. This file compares nothing with a candidate; `verifier.checks` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from generator.spec import AttentionSpec
from verifier.oracle import Pairs, Reference
from verifier.plain import CUT_ORDER, plain_attention

#: Changes whenever the rule does; stored with a verdict.
RULE_ID = "twice-plain-3"
FACTOR = 2.0
#: Orders of summation: few rows say little about how far off their sums can be, so they are summed more often.
FEWEST_ORDERS, MOST_ORDERS, ENOUGH_ROWS, ENOUGH_SCORES = 3, 24, 1024, 1 << 20
#: Half the spacing of numbers near 1.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, slots=True)
class Errors:
    """Distances from the float64 answer, or limits of them.

    rms and max_abs: over all elements of O. row: the largest over rows of |error| / |sum of |p v||, a scale that cancellation
    does not shrink, so that one small wrong row among large right ones shows. lse_rms, lse_max: over the finite LSE.
    """

    rms: float
    max_abs: float
    row: float
    lse_rms: float
    lse_max: float

    def times(self, factor: float) -> Errors:
        return Errors(*(factor * getattr(self, f) for f in Errors.__slots__))

    def worst(self, other: Errors) -> Errors:
        return Errors(*(max(getattr(self, f), getattr(other, f)) for f in Errors.__slots__))


def errors(out: Tensor, lse: Tensor | None, reference: Reference) -> Errors:
    """Of `out` (B, H, R, Dv) and `lse` (B, H, R); both finite wherever the reference is. NaN counts as infinitely far."""
    off = (out.double() - reference.out).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    size = reference.magnitude.norm(dim=-1)
    per_row = off.norm(dim=-1) / size.clamp(min=torch.finfo(torch.float64).tiny)
    per_row = per_row.masked_fill((size == 0) & (off.norm(dim=-1) == 0), 0)
    lse_off = torch.zeros(1, dtype=torch.float64)
    if lse is not None:
        finite = reference.lse.isfinite()
        lse_off = (lse.double() - reference.lse)[finite].nan_to_num(nan=torch.inf)
    return Errors(_rms(off), _largest(off), _largest(per_row), _rms(lse_off), _largest(lse_off))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def limits(trusted: Errors, reference: Reference, dtype: torch.dtype) -> Errors:
    """What a kernel may reach, from the plain implementation's errors.

    Rounding: one of the output, four of float32 arithmetic on the sum's own scale, and for LSE one of a weight in the input's
    dtype.
    """
    out_u, sum_u = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[torch.float32]
    weight_u = out_u if dtype != torch.float32 else 4 * sum_u
    lse = reference.lse[reference.lse.isfinite()]
    return Errors(
        FACTOR * trusted.rms + out_u * _rms(reference.out) + 4 * sum_u * _rms(reference.magnitude),
        FACTOR * trusted.max_abs + out_u * _largest(reference.out) + 4 * sum_u * _largest(reference.magnitude),
        FACTOR * trusted.row + out_u + 4 * sum_u,
        FACTOR * trusted.lse_rms + sum_u * _rms(lse) + weight_u,
        FACTOR * trusted.lse_max + sum_u * _largest(lse) + weight_u,
    )


def plain_errors(
    spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor, reference: Reference, pairs: Pairs | None = None
) -> Errors:
    """The worst errors of the plain implementation over its orders of summation. reference: of the same rows and pairs."""
    worst = Errors(0, 0, 0, 0, 0)
    num_rows = max(1, reference.lse.numel())
    enough = min(MOST_ORDERS, ENOUGH_ROWS // num_rows, ENOUGH_SCORES // (num_rows * max(1, spec.seqlen_k)))
    cut = () if spec.dtype == "fp32" else (CUT_ORDER,)
    for order in (*range(max(FEWEST_ORDERS, enough)), *cut):
        worst = worst.worst(errors(*plain_attention(spec, tensors, rows, order, pairs), reference))
    return worst
