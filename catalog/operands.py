"""How the operands of a call lie in memory: strides as a kernel addresses them, where the output goes. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from catalog.calls import AttentionCall, Strides
from generator.binding import BoundTensor
from generator.spec import AttentionSpec

#: No captured tensors.
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Output:
    """Where the output goes. shape, strides: of what the caller gets; bhsd: its strides by (batch, heads, seqlen, head_dim)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bhsd: Strides


def strides_of(
    tensor: BoundTensor, call: AttentionCall, spec: AttentionSpec, out: Output, captured: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """The strides of one parameter as the kernel addresses it."""
    match tensor.role:
        case "captured":
            return tuple(captured[tensor.name].stride())
        case "lse":
            strides: tuple[int, ...] = (call.num_heads * call.seqlen_q, call.seqlen_q, 1)
        case "q" | "k" | "v":
            strides = _unit(call.strides["qkv".index(tensor.role)])
        case "o":
            strides = _unit(out.bhsd)
    if tensor.view == "grouped":  # (batch, heads, one query, ...) as (batch, key heads, group, ...)
        return (strides[0], strides[1] * spec.group, strides[1], *strides[3:])
    return strides


def _unit(strides: Strides) -> Strides:
    """The last stride counts as one: that of a dimension of size one may be anything."""
    return (*strides[:3], 1)


def sdpa_output(query: Tensor, head_dim_v: int) -> Output:
    """Shape and strides of what torch's function would give for this query: its order of dimensions, or contiguous.

    Read from torch 2.13 on a CPU: four dimensions with equal head dimensions keep the query's order, all else is contiguous.
    """
    shape = (*query.shape[:-1], head_dim_v)
    keeps_order = query.dim() == 4 and head_dim_v == query.shape[-1]
    strides = torch.empty_like(query, device="meta").stride() if keeps_order else contiguous_strides(shape)
    return Output(shape, strides, strides if len(strides) == 4 else (math.prod(shape), *strides))


def flash_output(query: Tensor, head_dim_v: int, out: Tensor | None) -> Output:
    """(B, S, H, Dv): contiguous, or the tensor that the caller gave. Raises ValueError where that one does not fit."""
    shape = (*query.shape[:-1], head_dim_v)
    if out is None:
        strides = contiguous_strides(shape)
    else:
        check_out(out, shape, query)
        strides = out.stride()
    return Output(shape, strides, (strides[0], strides[2], strides[1], strides[3]))


def check_out(out: Tensor, shape: tuple[int, ...], query: Tensor) -> None:
    """Raises ValueError naming what of `out` does not fit."""
    for what, found, wanted in (
        ("shape", tuple(out.shape), shape),
        ("dtype", out.dtype, query.dtype),
        ("device", out.device, query.device),
    ):
        if found != wanted:
            raise ValueError(f"out: expected {what} {wanted}, found {found}")
    if out.shape[-1] != 1 and out.stride(-1) != 1:
        raise ValueError(f"out: expected a last dimension with stride 1, found {out.stride(-1)}")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
