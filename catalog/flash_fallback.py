"""FlashAttention's functions in plain torch, exact in semantics: the fallback where no kernel fits. Chooses nothing.

Layouts are FlashAttention's: (B, S, H, D) dense, (total, H, D) packed. Causal is aligned bottom-right, windows are inclusive
and -1 or None is unbounded. LSE is natural log, fp32; a row that sees no key gives output 0 and LSE -inf (FlashAttention-2
itself says +inf).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from catalog.plain_attention import PlainRules, plain_attention, sdpa_in_window

Window = tuple[int | None, int | None] | None


class FlashArguments(NamedTuple):
    """What the functions share. softmax_scale None: 1 / sqrt(D). alibi_slopes: (H) or (B, H) fp32. sinks: (H) fp32.

    For kernels only, int32: lengths (B), keys of each sequence; documents, first and one past the last key of each row (B, Sq).
    A tuple, since one is made in every call.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None
    lengths: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None

    @property
    def captured(self) -> dict[str, Tensor]:
        """What a kernel reads besides q, k and v, by the names of the rules."""
        if self[6:] == _NO_TENSORS and self.alibi_slopes is None:
            return {}
        first, last = self.documents or (None, None)
        given = {"Slopes": self.alibi_slopes, "SinkLogit": self.sinks, "KvLen": self.lengths, "DocStart": first, "DocEnd": last}
        return {name: x for name, x in given.items() if x is not None}


_NO_TENSORS = (None, None, None)


def window_limits(window: Window, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) with None for unbounded, causal folded in: nothing to the right of the aligned position."""
    left, right = (None, None) if window is None else window
    left = None if left is None or left < 0 else int(left)
    right = None if right is None or right < 0 else int(right)
    return left, 0 if causal else right


def plain_rules(arguments: FlashArguments, head_dim: int, seqlen_q: int, seqlen_k: int) -> PlainRules:
    left, right = window_limits(arguments.window_size, arguments.causal)
    scale = head_dim**-0.5 if arguments.softmax_scale is None else float(arguments.softmax_scale)
    return PlainRules(
        scale, seqlen_k - seqlen_q, left, right, float(arguments.softcap or 0.0), arguments.alibi_slopes, arguments.sinks,
        dropout=arguments.dropout_p,
    )  # fmt: skip


def dense(query: Tensor, key: Tensor, value: Tensor, arguments: FlashArguments) -> tuple[Tensor, Tensor]:
    """query (B, Sq, H, D), key and value (B, Sk, Hkv, D) -> output (B, Sq, H, Dv), LSE (B, H, Sq)."""
    rules = plain_rules(arguments, query.shape[-1], query.shape[1], key.shape[1])
    out, lse = plain_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), rules)
    return out.transpose(1, 2).contiguous(), lse.to(torch.float32)


def dense_output(query: Tensor, key: Tensor, value: Tensor, arguments: FlashArguments) -> Tensor:
    """As `dense` without the LSE: torch's own fused function where it can say the same."""
    rules = plain_rules(arguments, query.shape[-1], query.shape[1], key.shape[1])
    if rules.softcap or rules.slopes is not None or rules.sinks is not None:
        return dense(query, key, value, arguments)[0]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = sdpa_in_window(q, k, v, rules, enable_gqa=query.shape[2] != key.shape[2])
    return out.transpose(1, 2).contiguous()


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    arguments: FlashArguments,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """query (total_q, H, D), key and value (total_k, Hkv, D), or (blocks, page, Hkv, D) with block_table (B, most blocks).

    Output (total_q, H, Dv), LSE (H, total_q). Sequence b is rows cu_seqlens[b]:cu_seqlens[b + 1]; rows behind see nothing.
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        queries = query[None, starts_q[b] : starts_q[b + 1]]
        keys, values = (_sequence(x, b, starts_k[b], starts_k[b + 1], block_table) for x in (key, value))
        out, lse = dense(queries, keys, values, for_sequence(arguments, b))
        outs.append(out[0])
        lses.append(lse[0])
    if behind := query.shape[0] - starts_q[-1]:
        outs.append(query.new_zeros(behind, query.shape[1], value.shape[-1]))
        lses.append(query.new_full((query.shape[1], behind), -torch.inf, dtype=torch.float32))
    if not outs:
        return query.new_zeros(0, query.shape[1], value.shape[-1]), query.new_zeros(query.shape[1], 0, dtype=torch.float32)
    return torch.cat(outs), torch.cat(lses, 1)


def _sequence(x: Tensor, b: int, start: int, stop: int, block_table: Tensor | None) -> Tensor:
    """(1, length, Hkv, D) of sequence b, gathered from its pages where there are pages."""
    return x[None, start:stop] if block_table is None else gather_pages(x, block_table[b], stop - start)[None]


def for_sequence(arguments: FlashArguments, b: int) -> FlashArguments:
    slopes = arguments.alibi_slopes
    return arguments if slopes is None or slopes.dim() == 1 else arguments._replace(alibi_slopes=slopes[b])


def gather_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """(length, Hkv, D) from pages (blocks, page, Hkv, D) in the order of `table`. Raises ValueError for absent pages."""
    chosen = table[: -(-length // cache.shape[1])].long()
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < cache.shape[0]:
        raise ValueError(f"block_table: expected pages from 0 to {cache.shape[0] - 1}, found {chosen.tolist()}")
    return cache[chosen].flatten(0, 1)[:length]


def documents_of(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(1, total) int32 each: where the sequence of each packed row begins and ends."""
    bounds = cu_seqlens.long()
    lengths = bounds[1:] - bounds[:-1]
    first, last = (torch.repeat_interleave(b, lengths).to(torch.int32)[None] for b in (bounds[:-1], bounds[1:]))
    return first, last
