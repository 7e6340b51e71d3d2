"""How the operands of a call lie in memory: strides as a kernel addresses them, where the output goes. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from catalog.calls import PLAIN_TYPES, AttentionCall, Strides
from generator.binding import BoundTensor
from generator.spec import AttentionSpec

#: No captured tensors.
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Output:
    """Where the output goes. shape, strides: of what the caller gets; bhsd: its strides by (batch, heads, seqlen, head_dim).

    is_like_query: whether it is what torch.empty_like gives for the query.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bhsd: Strides
    is_like_query: bool = False


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
    return Output(shape, strides, strides if len(strides) == 4 else (math.prod(shape), *strides), keeps_order)


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
    if not isinstance(out, Tensor):
        raise ValueError(f"out: expected a tensor, found {type(out).__name__}")
    if out.layout is not torch.strided:
        raise ValueError(f"out: expected a strided tensor, found one of layout {out.layout}")
    for what, found, wanted in (
        ("shape", tuple(out.shape), shape),
        ("dtype", out.dtype, query.dtype),
        ("device", out.device, query.device),
    ):
        if found != wanted:
            raise ValueError(f"out: expected {what} {wanted}, found {found}")
    if out.shape[-1] != 1 and out.stride(-1) != 1:
        raise ValueError(f"out: expected a last dimension with stride 1, found {out.stride(-1)}")


def may_be_written(out: Tensor, *inputs: Tensor) -> bool:
    """Whether a kernel may write `out` while it reads the inputs, as if a new tensor had been copied there.

    Not where torch would have something to say (gradients, inference tensors, lazy negation), where an element has no place of
    its own, or where it might lie on an input: then a copy by torch does what is right.
    """
    if type(out) not in PLAIN_TYPES or out.layout is not torch.strided or out.requires_grad or out.is_neg() or out.is_conj():
        return False
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if not (out.is_contiguous() or _has_a_place_for_each(out)):
        return False
    if not all(x.layout is torch.strided and not x.is_nested for x in inputs):
        return False
    first = out.data_ptr()
    last = first + num_bytes(out)
    return not any(first < (begin := x.data_ptr()) + num_bytes(x) and begin < last for x in inputs)


def _has_a_place_for_each(x: Tensor) -> bool:
    """Whether no two elements share memory, as far as strides that grow with the sizes below them show."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def num_bytes(x: Tensor) -> int:
    """From the first element to the end of the last."""
    if x.is_contiguous():
        return x.nbytes
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
