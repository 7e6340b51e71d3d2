"""FlashAttention's three functions in plain torch, exact in semantics: the fallback where no kernel fits. Chooses nothing.

Layouts are FlashAttention's: (B, S, H, D) dense, (total, H, D) packed. Causal is aligned bottom-right, windows are inclusive
and -1 or None is unbounded. LSE is natural log, fp32; a row that sees no key gives output 0 and LSE -inf (FlashAttention-2
itself says +inf).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from catalog.plain_attention import PlainRules, plain_attention, sdpa_in_window

Window = tuple[int | None, int | None] | None


class FlashArguments(NamedTuple):
    """What the functions share. softmax_scale None: 1 / sqrt(D). alibi_slopes: (H) or (B, H) fp32. sinks: (H) fp32.

    A tuple, since one is made in every call.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None

    @property
    def captured(self) -> dict[str, Tensor]:
        """What a kernel reads besides q, k and v, by the names of the rules."""
        given = {"Slopes": self.alibi_slopes, "SinkLogit": self.sinks}
        return {name: x for name, x in given.items() if x is not None}


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

    Output (total_q, H, Dv), LSE (H, total_q). Sequence b is rows cu_seqlens[b]:cu_seqlens[b + 1].
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        queries = query[None, starts_q[b] : starts_q[b + 1]]
        keys, values = (_sequence(x, b, starts_k[b], starts_k[b + 1], block_table) for x in (key, value))
        out, lse = dense(queries, keys, values, _for_sequence(arguments, b))
        outs.append(out[0])
        lses.append(lse[0])
    if not outs:
        return query.new_zeros(0, query.shape[1], value.shape[-1]), query.new_zeros(query.shape[1], 0, dtype=torch.float32)
    return torch.cat(outs), torch.cat(lses, 1)


def _sequence(x: Tensor, b: int, start: int, stop: int, block_table: Tensor | None) -> Tensor:
    """(1, length, Hkv, D) of sequence b, gathered from its pages where there are pages."""
    return x[None, start:stop] if block_table is None else _gather_pages(x, block_table[b], stop - start)[None]


def _for_sequence(arguments: FlashArguments, b: int) -> FlashArguments:
    slopes = arguments.alibi_slopes
    return arguments if slopes is None or slopes.dim() == 1 else arguments._replace(alibi_slopes=slopes[b])


def _gather_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """(length, Hkv, D) from pages (blocks, page, Hkv, D) in the order of `table`."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]


# --------------------------------------------------------------------------------------------------------- with a cache


@dataclass(frozen=True, slots=True)
class CacheArguments:
    """What only `flash_attn_with_kvcache` has; shapes and meaning as there."""

    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    rotary_interleaved: bool = True


def with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: FlashArguments, cache: CacheArguments
) -> tuple[Tensor, Tensor]:
    """query (B, Sq, H, D); caches (Bc, Sc, Hkv, D), or (blocks, page, Hkv, D) with block_table.
    Writes k and v into the caches if given.

    Output (B, Sq, H, Dv), LSE (B, H, Sq). Raises ValueError for arguments that contradict each other.
    """
    _check_cache(query, k_cache, cache)
    batch, seqlen_q = query.shape[:2]
    held = _lengths(cache.cache_seqlens, batch, _capacity(k_cache, cache.block_table))
    pads = [0] * batch if cache.cache_leftpad is None else cache.cache_leftpad.tolist()
    turned = arguments.causal or window_limits(arguments.window_size, False) != (None, None)
    outs, lses = [], []
    for b in range(batch):
        row = b if cache.cache_batch_idx is None else int(cache.cache_batch_idx[b])
        queries, total = query[b : b + 1], held[b]
        if cache.k is not None and cache.v is not None:
            first = held[b] - pads[b]
            fresh, total = cache.k[b], held[b] + cache.k.shape[1]
            if cache.rotary_cos is not None and cache.rotary_sin is not None:
                steps = torch.arange(seqlen_q, device=query.device) * int(turned)
                queries = _rotate(queries[0], first + steps, cache)[None]
                fresh = _rotate(fresh, first + torch.arange(fresh.shape[0], device=query.device), cache)
            table = None if cache.block_table is None else cache.block_table[b]
            _write(k_cache, fresh, row, held[b], table)
            _write(v_cache, cache.v[b], row, held[b], table)
        if cache.block_table is None:
            keys, values = k_cache[row, pads[b] : total], v_cache[row, pads[b] : total]
        else:
            keys, values = (_gather_pages(x, cache.block_table[b], total)[pads[b] :] for x in (k_cache, v_cache))
        out, lse = dense(queries, keys[None], values[None], _for_sequence(arguments, b))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def _lengths(cache_seqlens: int | Tensor | None, batch: int, capacity: int) -> list[int]:
    match cache_seqlens:
        case None:
            return [capacity] * batch
        case int():
            return [cache_seqlens] * batch
        case _:
            return [int(n) for n in cache_seqlens.expand(batch).tolist()]


def _check_cache(query: Tensor, k_cache: Tensor, cache: CacheArguments) -> None:
    if (cache.k is None) != (cache.v is None):
        raise ValueError("k, v: expected both or neither of the new keys and values")
    if cache.k is not None and cache.cache_seqlens is None:
        raise ValueError("cache_seqlens: expected the lengths already held, since k and v are appended after them")
    if (cache.rotary_cos is None) != (cache.rotary_sin is None):
        raise ValueError("rotary_cos, rotary_sin: expected both or neither")
    if cache.rotary_cos is not None and cache.k is None:
        raise ValueError("rotary_cos: expected new keys k and v as well, since the rotation is applied to those")
    if cache.block_table is not None and cache.cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: not together with block_table, which already names the pages of each sequence")
    new = 0 if cache.k is None else cache.k.shape[1]
    capacity = _capacity(k_cache, cache.block_table)
    for b, held in enumerate(_lengths(cache.cache_seqlens, query.shape[0], capacity)):
        if held < 0 or held + (new if cache.k is not None else 0) > capacity:
            raise ValueError(f"cache_seqlens[{b}]: {held} held and {new} new tokens do not fit the cache of {capacity}")


def _write(cache: Tensor, fresh: Tensor, row: int, start: int, table: Tensor | None) -> None:
    if table is None:
        cache[row, start : start + fresh.shape[0]] = fresh
        return
    at = torch.arange(start, start + fresh.shape[0], device=cache.device)
    cache[table[at // cache.shape[1]].long(), at % cache.shape[1]] = fresh


def _rotate(x: Tensor, positions: Tensor, cache: CacheArguments) -> Tensor:
    """x (S, H, D) turned by the rows `positions` of cos and sin (length, rotary_dim / 2); dims beyond rotary_dim stay."""
    assert cache.rotary_cos is not None and cache.rotary_sin is not None
    cos, sin = (t[positions].to(torch.float32)[:, None, :] for t in (cache.rotary_cos, cache.rotary_sin))
    half = cos.shape[-1]
    wide = x[..., : 2 * half].to(torch.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if cache.rotary_interleaved else (wide[..., :half], wide[..., half:])
    turned = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(turned, -1).flatten(-2) if cache.rotary_interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), -1)
