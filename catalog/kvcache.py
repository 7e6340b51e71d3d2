"""What `flash_attn_with_kvcache` does besides attention (appends, rotates), and its fallback in plain torch. Chooses nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from catalog.cache_arguments import CacheArguments, check_cache, held_by, pads_of, row_of
from catalog.flash_checks import check_ranks
from catalog.flash_fallback import FlashArguments, dense, for_sequence, gather_pages, window_limits


def update(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: FlashArguments, cache: CacheArguments
) -> tuple[Tensor, tuple[int, ...]]:
    """Writes k and v into the caches, rotated, if given. Gives the rotated query, and how many tokens each sequence has then.

    query (B, Sq, H, D); caches (Bc, Sc, Hkv, D), or (blocks, page, Hkv, D) with block_table. Raises ValueError for arguments that
    contradict each other, before anything is written.
    """
    check_ranks((("q", query),), 4, "(batch, seqlen, heads, head_dim)")
    # FlashAttention turns all rows by the first new position where every row sees the same keys.
    turned = arguments.causal or window_limits(arguments.window_size, False) != (None, None)
    check_cache(query, k_cache, v_cache, cache, query.shape[1] if turned else 1)
    if cache.k is None or cache.v is None:
        return query, totals(query, k_cache, cache)
    held = held_by(query.shape[0], k_cache, cache)
    queries = []
    for b, (first, pad) in enumerate(zip(held, pads_of(query.shape[0], cache), strict=True)):
        fresh, q = cache.k[b], query[b]
        if cache.rotary_cos is not None:
            steps = torch.arange(fresh.shape[0], device=query.device)
            q = _rotate(q, first - pad + torch.arange(q.shape[0], device=query.device) * int(turned), cache)
            fresh = _rotate(fresh, first - pad + steps, cache)
        table = None if cache.block_table is None else cache.block_table[b]
        _write(k_cache, fresh, row_of(b, cache), first, table)
        _write(v_cache, cache.v[b], row_of(b, cache), first, table)
        queries.append(q)
    return torch.stack(queries), totals(query, k_cache, cache)


def totals(query: Tensor, k_cache: Tensor, cache: CacheArguments) -> tuple[int, ...]:
    """Tokens of each sequence once the new ones are written."""
    new = 0 if cache.k is None else cache.k.shape[1]
    return tuple(n + new for n in held_by(query.shape[0], k_cache, cache))


def as_dense(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: tuple[int, ...], arguments: FlashArguments, cache: CacheArguments
) -> tuple[Tensor, Tensor, FlashArguments] | None:
    """The same call without a cache: keys, values and arguments; None where no rule says it (pages, paddings on the left, ...).

    Sequences of one length: the part of the caches that is filled. Of several: the padding rule, where alignment says nothing.
    """
    if cache.block_table is not None or cache.cache_batch_idx is not None or cache.cache_leftpad is not None or not lengths:
        return None
    keys, values = k_cache[: len(lengths)], v_cache[: len(lengths)]
    if min(lengths) == max(lengths):
        return keys[:, : lengths[0]], values[:, : lengths[0]], arguments
    unbounded = window_limits(arguments.window_size, False) == (None, None)
    if not unbounded or arguments.alibi_slopes is not None or (arguments.causal and query.shape[1] != 1):
        return None
    held = torch.tensor(lengths, dtype=torch.int32, device=query.device)
    return keys, values, arguments._replace(lengths=held, causal=False)


def attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: tuple[int, ...], arguments: FlashArguments, cache: CacheArguments
) -> tuple[Tensor, Tensor]:
    """Output (B, Sq, H, Dv), LSE (B, H, Sq), one sequence after another, in plain torch."""
    outs, lses = [], []
    for b, (total, pad) in enumerate(zip(lengths, pads_of(query.shape[0], cache), strict=True)):
        if cache.block_table is None:
            keys, values = (x[row_of(b, cache), pad:total] for x in (k_cache, v_cache))
        else:
            keys, values = (gather_pages(x, cache.block_table[b], total)[pad:] for x in (k_cache, v_cache))
        out, lse = dense(query[b : b + 1], keys[None], values[None], for_sequence(arguments, b))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


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
