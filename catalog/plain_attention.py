"""Attention in plain torch operations: what answers when torch has no function of these semantics. Neither fast nor a kernel.

Works on any device, follows autograd, and needs memory linear in the sequence length: query rows go in blocks, and a block
touches only the keys that its rows may see. Order of operations: scale, softcap, bias, mask, softmax. A row that sees no key
gives output 0 and LSE -inf. LSE is the natural log, fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: torch's own, taken at import: replacing it in `torch.nn.functional` by ours stays safe.
torch_sdpa = torch._C._nn.scaled_dot_product_attention

#: Scores of one block hold at most about this many elements.
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class PlainRules:
    """How scores become weights. `window`: keys from i - left to i + right around the aligned position, None is unbounded.

    offset: the position of query row i among the keys is i + offset (bottom-right: seqlen_k - seqlen_q; top-left: 0).
    softcap: 0 is none. slopes: (H) or (B, H), ALiBi's -slope * distance. sinks: (H), a logit without a key in each row's softmax.
    mask: broadcasts to (B, H, Sq, Sk); booleans (True: may be seen) or numbers that are added. dropout: probability.
    """

    scale: float
    offset: int = 0
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0


def plain_attention(query: Tensor, key: Tensor, value: Tensor, rules: PlainRules) -> tuple[Tensor, Tensor]:
    """Output (B, H, Sq, Dv) in the query's dtype and LSE (B, H, Sq).

    query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), any strides, Hkv divides H.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    num_kv_heads, seqlen_k = key.shape[1], key.shape[2]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32

    def grouped(x: Tensor) -> Tensor:
        """(B or 1, H or 1, ...) with the heads split into key heads and group."""
        return x.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)) if x.shape[1] == num_heads else x.unsqueeze(1)

    slopes, sinks = (
        None if x is None else grouped(x.to(wide).expand(batch, num_heads))[..., None, None] for x in (rules.slopes, rules.sinks)
    )
    mask = None if rules.mask is None else rules.mask.expand(*(1,) * (4 - rules.mask.dim()), *rules.mask.shape)
    rows = max(16, BLOCK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    outs, lses = [], []
    for start in range(0, seqlen_q, rows):
        stop = min(seqlen_q, start + rows)
        low, high = _visible(start, stop, seqlen_k, rules)
        scores = _scores(grouped(query[:, :, start:stop]), key[:, :, low:high], (start, low), slopes, rules, wide)
        if mask is not None:
            part = mask.expand(-1, -1, seqlen_q, seqlen_k)[:, :, start:stop, low:high]
            scores = _masked(scores, grouped(part))
        out, lse = _softmax_pv(scores, value[:, :, low:high], sinks, rules.dropout, wide)
        outs.append(out.flatten(1, 2).to(query.dtype))
        lses.append(lse.flatten(1, 2))
    if not outs:
        return query.new_zeros(batch, num_heads, 0, value.shape[-1]), query.new_zeros(batch, num_heads, 0, dtype=wide)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def sdpa_in_window(query: Tensor, key: Tensor, value: Tensor, rules: PlainRules, enable_gqa: bool) -> Tensor:
    """The same output for rules that know only offset, window and dropout, by torch's fused function in blocks of rows."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"dropout_p": rules.dropout, "scale": rules.scale, "enable_gqa": enable_gqa}
    sees_all_before = rules.left is None or rules.left >= seqlen_k - 1
    if sees_all_before and (rules.right is None or rules.right >= seqlen_k - rules.offset - 1):
        return torch_sdpa(query, key, value, **options)
    if sees_all_before and rules.right == 0 and rules.offset == 0:
        return torch_sdpa(query, key, value, is_causal=True, **options)
    rows = max(16, BLOCK_ELEMENTS // max(1, seqlen_k))
    outs = []
    for start in range(0, seqlen_q, rows):
        stop = min(seqlen_q, start + rows)
        low, high = _visible(start, stop, seqlen_k, rules)
        row = torch.arange(start, stop, device=query.device)[:, None] + rules.offset
        distance = torch.arange(low, high, device=query.device)[None, :] - row
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen = seen if rules.left is None else seen & (distance >= -rules.left)
        seen = seen if rules.right is None else seen & (distance <= rules.right)
        outs.append(torch_sdpa(query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], attn_mask=seen, **options))
    return torch.cat(outs, 2) if outs else query.new_zeros(*query.shape[:3], value.shape[-1])


def _visible(start: int, stop: int, seqlen_k: int, rules: PlainRules) -> tuple[int, int]:
    """The range of keys that some row of start:stop may see."""
    low = 0 if rules.left is None else max(0, start + rules.offset - rules.left)
    high = seqlen_k if rules.right is None else min(seqlen_k, stop + rules.offset + rules.right)
    return min(low, seqlen_k), max(high, min(low, seqlen_k))


def _scores(
    query: Tensor, key: Tensor, origin: tuple[int, int], slopes: Tensor | None, rules: PlainRules, wide: torch.dtype
) -> Tensor:
    """(B, Hkv, group, rows, keys) of a block whose first row and first key are `origin`; hidden pairs are -inf."""
    scores = torch.matmul(query.to(wide), key.to(wide).unsqueeze(2).transpose(-1, -2)) * rules.scale
    if rules.softcap:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if slopes is None and rules.left is None and rules.right is None:
        return scores
    row = torch.arange(query.shape[-2], device=query.device)[:, None] + (origin[0] + rules.offset)
    distance = torch.arange(key.shape[-2], device=query.device)[None, :] + origin[1] - row  # > 0: a later key
    if slopes is not None:
        scores = scores - slopes * distance.abs()
    if rules.left is not None:
        scores = scores.masked_fill(distance < -rules.left, -math.inf)
    if rules.right is not None:
        scores = scores.masked_fill(distance > rules.right, -math.inf)
    return scores


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)


def _softmax_pv(scores: Tensor, value: Tensor, sinks: Tensor | None, dropout: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    num_keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    if scores.shape[-1] == 0:
        empty = scores.new_full(scores.shape[:-1], -math.inf)
        return scores.new_zeros(*scores.shape[:-1], value.shape[-1]), empty
    lse = torch.logsumexp(scores, -1)
    hidden = torch.isneginf(lse.detach())[..., None]
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)  # no NaN, in gradients neither
    weights = weights[..., :num_keys]
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
    return torch.matmul(weights, value.to(wide).unsqueeze(2)), lse
