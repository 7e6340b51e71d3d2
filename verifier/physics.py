"""What no machine of this kind can beat: operations and bytes of an attention call, and a floor of its time. Measures nothing.

The peaks are generous upper bounds from data sheets (the highest clock sold, every unit busy, the fastest memory), so that a time
below the floor is a fault of the measurement or of the kernel, never a good kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from generator.gpus import Gpu
from generator.spec import TL_DTYPES, AttentionSpec
from verifier import oracle
from verifier.dtypes import torch_dtype
from verifier.environment import cache_bytes, cpu_flags

HIGHEST_CLOCK_HZ = 6.5e9
#: How far above its data sheet's rate a GPU may run.
CLOCK_SLACK = 1.15
#: Bytes a second of the fastest memory on a socket (HBM).
HIGHEST_BANDWIDTH = 2e12


@dataclass(frozen=True, slots=True)
class Work:
    """flops: multiplications and additions of the two products, over the pairs that the masks leave. num_bytes: Q, K, V and O
    once each, LSE not counted.
    """

    flops: float
    num_bytes: int


def work_of(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Work:
    return work_of_pairs(spec, oracle.visible_pairs(spec, captured))


def work_of_pairs(spec: AttentionSpec, pairs: float) -> Work:
    """The work for so many visible pairs, over batch and query heads."""
    queries = spec.batch * spec.num_heads * spec.seqlen_q * (spec.head_dim + spec.head_dim_v)
    keys = spec.batch * spec.num_kv_heads * spec.seqlen_k * (spec.head_dim + spec.head_dim_v)
    return Work(2.0 * pairs * (spec.head_dim + spec.head_dim_v), (queries + keys) * torch_dtype(spec).itemsize)


def sampled_work(spec: AttentionSpec, captured: Mapping[str, Tensor], num_rows: int = 512) -> Work:
    """As `work_of`, from so many query rows evenly spread over the sequence, and one head: for long sequences. Exact where the
    number of keys that a row sees is a straight line over the rows, as with causal masks.
    """
    if not spec.masks:
        pairs = float(spec.batch * spec.num_heads * spec.seqlen_q * spec.seqlen_k)
    else:
        count = min(num_rows, spec.seqlen_q)
        rows = ((torch.arange(count) + 0.5) * spec.seqlen_q / count).long().view(1, -1, 1)
        keys = torch.arange(spec.seqlen_k).view(1, 1, -1)
        seen = [float(oracle.visible(oracle.Block(spec, b, 0, rows, keys, captured)).float().mean()) for b in range(spec.batch)]
        pairs = sum(seen) * spec.num_heads * spec.seqlen_q * spec.seqlen_k
    return work_of_pairs(spec, pairs)


def gpu_floor_s(spec: AttentionSpec, work: Work, card: Gpu | None) -> float:
    """Seconds that a call takes at least on a card, by its data sheet; 0 for a card without one.

    Data sheets state rates at a boost clock that boards may exceed: CLOCK_SLACK. Memory counts where the caches cannot hold it.
    """
    if card is None:
        return 0.0
    peak = card.peak_flops.get(TL_DTYPES[spec.dtype], max(card.peak_flops.values()))
    arithmetic = work.flops / (CLOCK_SLACK * peak)
    beyond_cache = work.num_bytes > 4 * card.l2_bytes
    return max(arithmetic, work.num_bytes / (CLOCK_SLACK * card.memory_bytes_per_s) if beyond_cache else 0.0)


def flops_per_cycle(dtype: str) -> int:
    """Of one core, by the widest units that its flags name."""
    flags = cpu_flags()
    vector = 64 if "avx512f" in flags else 32
    if dtype == "bf16":
        return 2048 if "amx_bf16" in flags else 4 * vector if "avx512_bf16" in flags else vector
    if dtype == "fp16":
        return 2048 if "amx_bf16" in flags else 2 * vector if "avx512_fp16" in flags else vector
    return vector


def floor_s(spec: AttentionSpec, work: Work, num_threads: int) -> float:
    """Seconds that a call takes at least on this machine's kind of CPU.

    Memory counts for working sets that the last cache cannot hold: what it holds may never move.
    """
    arithmetic = work.flops / (HIGHEST_CLOCK_HZ * flops_per_cycle(spec.dtype) * num_threads)
    beyond_cache = work.num_bytes > 4 * (cache_bytes()["l3"] or cache_bytes()["l2"] or 1)
    return max(arithmetic, work.num_bytes / HIGHEST_BANDWIDTH if beyond_cache else 0.0)


def too_large(spec: AttentionSpec, num_threads: int, limit_s: float) -> str:
    """Why no kernel for a spec can be judged on this machine, whatever it does; "" where one may be.

    Counts what is certain: half the pairs of a causal mask, none of other masks'.
    """
    share = {frozenset(): 1.0, frozenset({"causal"}): 0.5}.get(frozenset(rule.name for rule in spec.masks), 0.0)
    work = work_of_pairs(spec, share * spec.batch * spec.num_heads * spec.seqlen_q * spec.seqlen_k)
    if (least_s := floor_s(spec, work, num_threads)) > limit_s:
        return f"one call takes at least {least_s:,.0f} s on a processor of this kind; a call may take {limit_s:g} s"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * work.num_bytes > memory:
        needed, here = work.num_bytes / (1 << 30), memory / (1 << 30)
        return f"its tensors take {needed:.1f} GiB; judging needs four times that, and this machine has {here:.1f}"
    return ""
