"""Attention as one writes it in torch: scores in float32, P rounded to the input's dtype, in one of several orders of summation.

Its distance from the float64 answer is what `verifier.tolerance` derives limits from. No candidate is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from generator.spec import AttentionSpec
from verifier import oracle
from verifier.dtypes import torch_dtype
from verifier.oracle import Block

#: The order in which sums are cut off as tensor units do it, and the terms that the smallest of their instructions adds at once.
CUT_ORDER, CUT_TERMS = -1, 8
#: Products of more terms than this are not summed one by one.
MOST_SINGLE_TERMS = 1 << 26
#: How far below a row's maximum the exponentials' reference may lie: running maxima stay behind by up to 2^8.
FARTHEST_REFERENCE = 8 * math.log(2)
#: The low half of a float64's fraction, which float32 has no room for.
BELOW_FLOAT32 = (1 << 29) - 1

#: a (N, M, n), b (N, n, C), both float32 -> (N, M, C) in float32.
Product = Callable[[Tensor, Tensor], Tensor]


def plain_attention(
    spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor, order: int = 0, pairs: oracle.Pairs | None = None
) -> tuple[Tensor, Tensor]:
    """Whole rows of scores, softmax, product.

    order 0: sums one after another, as a loop over them has it, which rounds most; 1: as torch sums them; CUT_ORDER: rounded
    towards zero after every few terms, as tensor units do; others: shuffled.
    Order 0 refers the exponentials to each row's maximum, whose weight is then 1 and needs no rounding; the others to any number
    up to `FARTHEST_REFERENCE` below, so that the largest weight is rounded like the rest, as it is wherever a running maximum
    stays behind or the product of maximum and scale is rounded.
    Returns O in the spec's dtype (B, H, R, Dv) and LSE (B, H, R) in float32; of some pairs, as `oracle.heads_of` has them.
    """
    dtype = torch_dtype(spec)
    out = torch.zeros(spec.batch, spec.num_heads, len(rows), spec.head_dim_v, dtype=dtype)
    lse = torch.full(out.shape[:3], -torch.inf)
    shuffle = torch.Generator().manual_seed(order)
    dims, keys = torch.arange(spec.head_dim), torch.arange(spec.seqlen_k)
    if order > 1:
        dims, keys = dims[torch.randperm(len(dims), generator=shuffle)], keys[torch.randperm(len(keys), generator=shuffle)]
    product = {0: one_by_one, CUT_ORDER: cut_off}.get(order, torch.matmul)
    for bundle in _bundles(oracle.blocks(spec, tensors, rows, pairs), spec):
        weighed, places = [], []
        for block, at in bundle:
            where = (block.batch, block.heads.flatten(), at)
            shape = out[where].shape[:2]
            below = FARTHEST_REFERENCE * torch.rand(*shape, 1, generator=shuffle) if order else torch.zeros(1, 1, 1)
            weighed.append(_weigh(block, tensors, dims, keys, below, dtype, product))
            places.append(where)
        for where, one, sums in zip(places, weighed, _summed(weighed, product), strict=True):
            out[where] = torch.where(one.total > 0, sums.view(*one.total.shape[:2], -1) / one.total, 0).to(dtype)
            lse[where] = one.lse
    return oracle.heads_of(out, spec, pairs), oracle.heads_of(lse, spec, pairs)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A block's rounded weights (G * R, n) of the n keys that somebody sees, their V (n, Dv), sums (G, R, 1), and LSE (G, R)."""

    weights: Tensor
    v: Tensor
    total: Tensor
    lse: Tensor


def _weigh(
    block: Block, tensors: Mapping[str, Tensor], dims: Tensor, keys: Tensor, below: Tensor, dtype: torch.dtype, product: Product
) -> _Weighed:
    spec = block.spec
    seen = oracle.visible(block)[:, :, keys]
    used = seen.any(0).any(0)
    seen, keys = seen[:, :, used], keys[used]
    q = tensors["q"][block.batch, block.heads.flatten()].float()[:, block.rows.flatten()][..., dims]
    k, v = (tensors[name][block.batch, block.kv_head].float()[keys] for name in ("k", "v"))
    shuffled = replace(block, keys=keys.view(1, 1, -1))
    products = product(q.reshape(1, -1, len(dims)), k[:, dims].T[None]).view(*q.shape[:2], -1)
    scores, logits = oracle.apply_scores(shuffled, products * oracle.as_f32(spec.scale))
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = logits.expand(*scores.shape[:2], -1)
    top = torch.cat([scores, logits], 2).amax(2, keepdim=True)
    reference = top.masked_fill(top == -torch.inf, 0) - below
    weights, other = torch.exp(scores - reference), torch.exp(logits - reference).sum(2, keepdim=True)
    rounded = weights.to(dtype).float()
    lse = (reference + torch.log(rounded.sum(2, keepdim=True) + other)).squeeze(2)
    return _Weighed(rounded.flatten(0, 1), v, weights.sum(2, keepdim=True) + other, lse)


def _bundles(blocks: Iterable[tuple[Block, slice]], spec: AttentionSpec) -> Iterator[list[tuple[Block, slice]]]:
    """Blocks with as many rows, so many that their scores together are no more than a block's may be: one loop sums for all."""
    bundle: list[tuple[Block, slice]] = []
    for block, at in blocks:
        scores = spec.group * block.rows.numel() * spec.seqlen_k
        if bundle and (bundle[0][0].rows.numel() != block.rows.numel() or (len(bundle) + 1) * scores > oracle.BLOCK_ELEMENTS):
            yield bundle
            bundle = []
        bundle.append((block, at))
    if bundle:
        yield bundle


def _summed(weighed: list[_Weighed], product: Product) -> Tensor:
    """Weights times V of each, (N, G * R, Dv). Where a block uses fewer keys than another, zeros are added at the end."""
    most = max(len(one.v) for one in weighed)
    weights = torch.stack([pad(one.weights, (0, most - len(one.v))) for one in weighed])
    return product(weights, torch.stack([pad(one.v, (0, 0, 0, most - len(one.v))) for one in weighed]))


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """a (N, M, n) @ b (N, n, C) in float32, terms added in turn (in small groups where there are very many)."""
    count = b.shape[1]
    step = max(1, min(16, a.shape[1] * b.shape[2] * count // MOST_SINGLE_TERMS))
    total = torch.zeros(*a.shape[:2], b.shape[2])
    if step > 1:
        for first in range(0, count, step):
            total += a[..., first : first + step] @ b[:, first : first + step]
        return total
    left, right, term = a.permute(2, 0, 1).contiguous(), b.transpose(0, 1).contiguous(), torch.empty_like(total)
    for i in range(count):
        total += torch.mul(left[i].unsqueeze(2), right[i].unsqueeze(1), out=term)
    return total


def cut_off(a: Tensor, b: Tensor) -> Tensor:
    """a (N, M, n) @ b (N, n, C): a few exact products at a time, the float32 sum rounded towards zero after each.

    At large scores that is all one way, and adds up where rounding to the nearest averages out.
    """
    a, b = a.double(), b.double()
    total = torch.zeros(*a.shape[:2], b.shape[2], dtype=torch.float64)  # of numbers that float32 has
    for first in range(0, b.shape[1], CUT_TERMS):
        total = torch.baddbmm(total, a[..., first : first + CUT_TERMS], b[:, first : first + CUT_TERMS])
        total.view(torch.int64).bitwise_and_(~BELOW_FLOAT32)
    largest = torch.finfo(torch.float32).max
    return total.clamp_(-largest, largest).float()
