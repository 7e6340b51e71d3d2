"""How an input's tensors lie in memory, and as a kernel addresses them. Makes no numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from generator.binding import Binding
from generator.spec import AttentionSpec
from verifier.arena import FAR_STRIDE, Slot
from verifier.dtypes import DTYPES
from verifier.inputs import ROW_BYTES, Case


def slots_of(case: Case, binding: Binding) -> tuple[Slot, ...]:
    """How each tensor of the call lies in memory. Names are those of the kernel's parameters."""
    return tuple(_slot(t.name, t.role, t.dtype, t.shape, t.written, case) for t in binding.tensors)


def _slot(name: str, role: str, dtype: str, shape: tuple[int, ...], written: bool, case: Case) -> Slot:
    if len(shape) < 4:  # LSE and captured vectors
        step = 2 if case.layout.startswith("sliced") else 1
        strides = tuple(s * step for s in _contiguous(shape))
        return Slot(name, dtype, shape, strides, 0, _span(shape, strides), written, case.place)
    match case.layout:
        case "plain":
            strides, offset = _contiguous(shape), 0
        case "bshd":
            batch, heads, seqlen, dim = shape
            strides, offset = (heads * seqlen * dim, dim, heads * dim, 1), 0
        case "sliced" | "sliced_4" | "sliced_8":
            step = max(1, ROW_BYTES.get(case.layout, 0) // DTYPES[dtype].itemsize)
            pitched = _contiguous((*shape[:-1], shape[-1] + 3 * step))
            strides = tuple(s if n > 1 else 987_654_321 for s, n in zip(pitched[:-1], shape[:-1], strict=True)) + (1,)
            offset = step
        case "expanded":
            strides, offset = _contiguous(shape), 0
            if role in ("k", "v"):
                strides = (0, 0, *strides[2:])
        case "far":
            row = shape[1] * shape[3]
            return Slot(name, dtype, shape, (row, shape[3], FAR_STRIDE, 1), 0, row, written, far=True)
    return Slot(name, dtype, shape, strides, offset, offset + _span(shape, strides), written, case.place)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last that the view touches."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def call_view(slot: Slot, view: str, spec: AttentionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides as the kernel addresses the tensor: `grouped` drops the one query and splits the heads."""
    if view == "standard":
        return slot.shape, slot.strides
    batch, head, _, *rest = slot.strides
    shape = (slot.shape[0], spec.num_kv_heads, spec.group, *slot.shape[3:])
    return shape, (batch, head * spec.group, head, *rest)


def fill(views: Mapping[str, Tensor], binding: Binding, values: Mapping[str, Tensor]) -> None:
    """Copy the values into the arena's views of the inputs."""
    for t in binding.tensors:
        if not t.written:
            view = views[t.name]
            value = values[t.role if t.role != "captured" else t.name]
            overlapping = tuple(slice(0, 1) if s == 0 else slice(None) for s in view.stride())
            view[overlapping].copy_(value[overlapping])
