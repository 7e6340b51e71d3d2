"""How far from the float64 answer a kernel may be: twice as far as a plain implementation in the same precision, plus rounding.

The plain implementation keeps scores in float32 and rounds P to the input's dtype. It runs in several orders of summation and
with several references, and the worst counts, so that luck of one sets no limit. This file compares nothing with a candidate;
`verifier.checks` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from generator.spec import TL_DTYPES, AttentionSpec
from verifier import oracle
from verifier.arena import DTYPES
from verifier.oracle import Block, Reference

#: Changes whenever the rule does; stored with a verdict.
RULE_ID = "twice-plain-3"
FACTOR = 2.0
#: Orders of summation: few rows say little about how far off their sums can be, so they are summed more often.
FEWEST_ORDERS, MOST_ORDERS, ENOUGH_ROWS, ENOUGH_SCORES = 3, 24, 1024, 1 << 20
#: The order in which sums are cut off as tensor units do it, and the terms that the smallest of their instructions adds at once.
CUT_ORDER, CUT_TERMS = -1, 8
#: Products of more terms than this are not summed one by one.
MOST_SINGLE_TERMS = 1 << 26
#: How far below a row's maximum the exponentials' reference may lie: running maxima stay behind by up to 2^8.
FARTHEST_REFERENCE = 8 * math.log(2)
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


# --------------------------------------------------------------------------------------------- the plain implementation


def plain_errors(spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor, reference: Reference) -> Errors:
    """The worst errors of the plain implementation over its orders of summation."""
    worst = Errors(0, 0, 0, 0, 0)
    num_rows = max(1, spec.batch * spec.num_heads * len(rows))
    enough = min(MOST_ORDERS, ENOUGH_ROWS // num_rows, ENOUGH_SCORES // (num_rows * max(1, spec.seqlen_k)))
    cut = () if spec.dtype == "fp32" else (CUT_ORDER,)
    for order in (*range(max(FEWEST_ORDERS, enough)), *cut):
        worst = worst.worst(errors(*plain_attention(spec, tensors, rows, order), reference))
    return worst


def plain_attention(spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor, order: int = 0) -> tuple[Tensor, Tensor]:
    """Attention as one writes it in torch: whole rows of scores, softmax, product.

    order 0: sums one after another, as a loop over them has it, which rounds most; 1: as torch sums them; CUT_ORDER: rounded
    towards zero after every few terms, as tensor units do; others: shuffled.
    Order 0 refers the exponentials to each row's maximum, whose weight is then 1 and needs no rounding; the others to any number
    up to `FARTHEST_REFERENCE` below, so that the largest weight is rounded like the rest, as it is wherever a running maximum
    stays behind or the product of maximum and scale is rounded.
    Returns O in the spec's dtype (B, H, R, Dv) and LSE (B, H, R) in float32.
    """
    dtype = DTYPES[TL_DTYPES[spec.dtype]]
    out = torch.zeros(spec.batch, spec.num_heads, len(rows), spec.head_dim_v, dtype=dtype)
    lse = torch.full(out.shape[:3], -torch.inf)
    shuffle = torch.Generator().manual_seed(order)
    dims, keys = torch.arange(spec.head_dim), torch.arange(spec.seqlen_k)
    if order > 1:
        dims, keys = dims[torch.randperm(len(dims), generator=shuffle)], keys[torch.randperm(len(keys), generator=shuffle)]
    for block, at in oracle.blocks(spec, tensors, rows):
        where = (block.batch, block.heads.flatten(), at)
        below = FARTHEST_REFERENCE * torch.rand(*out[where].shape[:2], 1, generator=shuffle) if order else torch.zeros(1, 1, 1)
        product = {0: _one_by_one, CUT_ORDER: _cut_off}.get(order, torch.matmul)
        out[where], lse[where] = _attend(block, tensors, dims, keys, below, dtype, product)
    return out, lse


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """a (G, R, n) @ b (n, C) in float32, terms added in turn (in small groups where there are very many)."""
    count = b.shape[0]
    step = max(1, min(16, a.shape[0] * a.shape[1] * b.shape[1] * count // MOST_SINGLE_TERMS))
    total = torch.zeros(*a.shape[:2], b.shape[1])
    for first in range(0, count, step):
        total += a[..., first : first + step] @ b[first : first + step]
    return total


def _cut_off(a: Tensor, b: Tensor) -> Tensor:
    """a (G, R, n) @ b (n, C): a few exact products at a time, the float32 sum rounded towards zero after each.

    At large scores that is all one way, and adds up where rounding to the nearest averages out.
    """
    total = torch.zeros(*a.shape[:2], b.shape[1])
    for first in range(0, b.shape[0], CUT_TERMS):
        exact = total.double() + a[..., first : first + CUT_TERMS].double() @ b[first : first + CUT_TERMS].double()
        total = exact.float()
        beyond = total.double().abs() > exact.abs()
        total = torch.where(beyond, torch.nextafter(total, torch.zeros_like(total)), total)
    return total


def _attend(
    block: Block,
    tensors: Mapping[str, Tensor],
    dims: Tensor,
    keys: Tensor,
    below: Tensor,
    dtype: torch.dtype,
    product: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    spec = block.spec
    seen = oracle.visible(block)[:, :, keys]
    used = seen.any(0).any(0)
    seen, keys = seen[:, :, used], keys[used]
    q = tensors["q"][block.batch, block.heads.flatten()].float()[:, block.rows.flatten()][..., dims]
    k, v = (tensors[name][block.batch, block.kv_head].float()[keys] for name in ("k", "v"))
    shuffled = replace(block, keys=keys.view(1, 1, -1))
    scores, logits = oracle.apply_scores(shuffled, product(q, k[:, dims].T) * oracle.as_f32(spec.scale))
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = logits.expand(*scores.shape[:2], -1)
    top = torch.cat([scores, logits], 2).amax(2, keepdim=True)
    reference = top.masked_fill(top == -torch.inf, 0) - below
    weights, other = torch.exp(scores - reference), torch.exp(logits - reference).sum(2, keepdim=True)
    rounded = weights.to(dtype).float()
    total = weights.sum(2, keepdim=True) + other
    out = torch.where(total > 0, product(rounded, v) / total, 0).to(dtype)
    return out, (reference + torch.log(rounded.sum(2, keepdim=True) + other)).squeeze(2)
