"""What only `flash_attn_with_kvcache` takes, and whether it makes a call; if not, why, in a sentence. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from catalog.flash_checks import check_ranks

_WHOLE_NUMBERS = (torch.int32, torch.int64)


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


def row_of(b: int, cache: CacheArguments) -> int:
    return b if cache.cache_batch_idx is None else int(cache.cache_batch_idx[b])


def pads_of(batch: int, cache: CacheArguments) -> list[int]:
    return [0] * batch if cache.cache_leftpad is None else [int(n) for n in cache.cache_leftpad.tolist()]


def held_by(batch: int, k_cache: Tensor, cache: CacheArguments) -> list[int]:
    """Tokens that the caches hold before the call."""
    match cache.cache_seqlens:
        case None:
            return [capacity_of(k_cache, cache.block_table)] * batch
        case int():
            return [cache.cache_seqlens] * batch
        case Tensor() as lengths if lengths.dtype in (torch.int32, torch.int64) and tuple(lengths.shape) in ((), (1,), (batch,)):
            return [int(n) for n in lengths.expand(batch).tolist()]
        case Tensor() as lengths:
            raise ValueError(
                f"cache_seqlens: expected ({batch},) numbers of int32, found {tuple(lengths.shape)} of {lengths.dtype}"
            )
        case other:
            raise ValueError(f"cache_seqlens: expected a number or a tensor of ({batch},), found {other!r}")


def capacity_of(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def check_cache(query: Tensor, k_cache: Tensor, v_cache: Tensor, cache: CacheArguments, num_turned: int) -> None:
    """query (B, Sq, H, D); caches (Bc, Sc, Hkv, D), or (blocks, page, Hkv, D) with block_table. num_turned: rows of a query that
    are rotated each by its own position.

    Raises ValueError for what contradicts itself or does not fit: a cache that was written in part is of no use to anybody.
    """
    form = "(batch, seqlen, heads, head_dim)" if cache.block_table is None else "(blocks, page, heads, head_dim)"
    check_ranks((("k_cache", k_cache), ("v_cache", v_cache)), 4, form)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"k_cache, v_cache: sizes do not fit: {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    _check_together(cache)
    new = _check_new(query, k_cache, v_cache, cache)
    capacity = capacity_of(k_cache, cache.block_table)
    held, pads = held_by(query.shape[0], k_cache, cache), _check_rows(query, k_cache, cache)
    for b, (tokens, pad) in enumerate(zip(held, pads, strict=True)):
        if tokens < 0 or tokens + new > capacity:
            raise ValueError(f"cache_seqlens[{b}]: {tokens} held and {new} new tokens do not fit the cache of {capacity}")
        if not 0 <= pad <= tokens:
            raise ValueError(f"cache_leftpad[{b}]: expected a number from 0 to the {tokens} tokens held, found {pad}")
    if cache.block_table is not None:
        _check_pages(k_cache, cache.block_table, [tokens + new for tokens in held])
    if cache.rotary_cos is not None and held:
        first = max(tokens - pad for tokens, pad in zip(held, pads, strict=True))
        _check_rotary(cache, query.shape[3], first + max(new, num_turned))


def _check_together(cache: CacheArguments) -> None:
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


def _check_new(query: Tensor, k_cache: Tensor, v_cache: Tensor, cache: CacheArguments) -> int:
    """The number of new tokens of each sequence."""
    if cache.k is None or cache.v is None:
        return 0
    check_ranks((("k", cache.k), ("v", cache.v)), 4, "(batch, new tokens, heads, head_dim)")
    new = cache.k.shape[1]
    for name, fresh, held in (("k", cache.k, k_cache), ("v", cache.v, v_cache)):
        if tuple(fresh.shape) != (wanted := (query.shape[0], new, *held.shape[2:])):
            raise ValueError(f"{name}: expected {wanted}, found {tuple(fresh.shape)}")
        if (fresh.dtype, fresh.device) != (held.dtype, held.device):
            raise ValueError(
                f"{name}: expected {held.dtype} on {held.device}, as {name}_cache, found {fresh.dtype} on {fresh.device}"
            )
    return new


def _check_rows(query: Tensor, k_cache: Tensor, cache: CacheArguments) -> list[int]:
    """The tokens left out at the left of each sequence. Each has a row of the cache, or of the table."""
    batch = query.shape[0]
    for name, given in (("cache_batch_idx", cache.cache_batch_idx), ("cache_leftpad", cache.cache_leftpad)):
        if given is not None:
            check_ranks(((name, given),), 1, f"({batch},) whole numbers")
            if tuple(given.shape) != (batch,) or given.dtype not in _WHOLE_NUMBERS:
                raise ValueError(f"{name}: expected ({batch},) numbers of int32, found {tuple(given.shape)} of {given.dtype}")
    if (chosen := cache.cache_batch_idx) is not None:
        if batch and not 0 <= int(chosen.min()) <= int(chosen.max()) < k_cache.shape[0]:
            raise ValueError(f"cache_batch_idx: expected rows from 0 to {k_cache.shape[0] - 1}, found {chosen.tolist()}")
    elif cache.block_table is None and batch > k_cache.shape[0]:
        raise ValueError(f"k_cache: expected a row for each of {batch} sequences, found {k_cache.shape[0]}")
    return pads_of(batch, cache)


def _check_pages(k_cache: Tensor, table: Tensor, totals: list[int]) -> None:
    if table.shape[0] < len(totals):
        raise ValueError(f"block_table: expected a row for each of {len(totals)} sequences, found {table.shape[0]}")
    blocks, page = k_cache.shape[:2]
    for b, total in enumerate(totals):
        used = table[b, : -(-total // page)].tolist() if page else []
        if not all(0 <= block < blocks for block in used):
            raise ValueError(f"block_table: expected pages from 0 to {blocks - 1}, found {used}")


def _check_rotary(cache: CacheArguments, head_dim: int, num_positions: int) -> None:
    assert cache.rotary_cos is not None and cache.rotary_sin is not None
    form = "(positions, rotary_dim / 2)"
    check_ranks((("rotary_cos", cache.rotary_cos), ("rotary_sin", cache.rotary_sin)), 2, form)
    length, half = cache.rotary_cos.shape
    if cache.rotary_sin.shape != cache.rotary_cos.shape:
        raise ValueError(f"rotary_sin: expected {(length, half)}, as rotary_cos, found {tuple(cache.rotary_sin.shape)}")
    if 2 * half > head_dim:
        raise ValueError(f"rotary_cos: expected at most {head_dim // 2} columns for head dimension {head_dim}, found {half}")
    if length < num_positions:
        raise ValueError(f"rotary_cos: expected a row for each of {num_positions} positions, found {length}")
