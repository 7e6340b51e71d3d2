"""Tensor maps of a launch description (`cuTensorMapEncodeTiled`): which are allowed. Encodes none."""

from __future__ import annotations

from typing import Any

from generator.spec import AttentionSpec
from generator.translate.direct.expressions import expression
from generator.translate.direct.parameters import call_scalars, call_tensors
from generator.translate.direct.reading import Field
from generator.translate.facts import TensorMapFacts

ITEM_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}

#: Field -> what it holds.
MAP_FIELDS: dict[str, str] = {
    "tensor": "the tensor's name",
    "extents": "expressions, one an axis (1 to 5), innermost first",
    "strides": "of all axes but the innermost: a number k stands for the tensor's own stride of axis k, "
    '{"bytes": EXPRESSION} for a number of bytes',
    "box": "elements that one copy takes, one number an axis, at most 256",
    "swizzle_bytes": "0, 32, 64 or 128; a row of the box may not be longer",
}


def tensor_map(field: Field, spec: AttentionSpec) -> TensorMapFacts | None:
    """The map as the launcher takes it, or None."""
    fields = field.fields(MAP_FIELDS, MAP_FIELDS)
    if fields is None or len(fields) < len(MAP_FIELDS):
        return None
    tensors = call_tensors(spec)
    names = [n for n, s in call_scalars(spec).items() if s.dtype == "i32"]
    tensor = fields["tensor"].one_of(tensors)
    extents = fields["extents"].each(1, 5, "expressions", lambda f: expression(f, names))
    if tensor is None or extents is None:
        return None
    rank = len(extents)
    strides = fields["strides"].each(rank - 1, rank - 1, "strides", lambda f: _stride(f, tensors[tensor].ndim, names))
    box = fields["box"].each(rank, rank, "numbers", lambda f: f.whole(1, 256))
    swizzle = _swizzle(fields["swizzle_bytes"])
    if strides is None or box is None or swizzle is None:
        return None
    dtype = tensors[tensor].dtype
    row = box[0] * ITEM_BYTES[dtype]
    if row % 16 or (swizzle and row > swizzle):
        limit = f" and at most {swizzle}, its swizzle" if swizzle else ""
        return fields["box"].wrong(f"a row has {row} bytes; expected a multiple of 16{limit}")
    return {
        "tensor": tensor,
        "dtype": dtype,
        "extents": list(extents),
        "strides": list(strides),
        "box": list(box),
        "swizzle_bytes": swizzle,
    }


def _stride(field: Field, ndim: int, names: list[str]) -> int | dict[str, Any] | None:
    if not isinstance(field.value, dict):
        return field.whole(0, ndim - 1)
    fields = field.fields({"bytes": "give a number of bytes"}, ("bytes",))
    found = expression(fields["bytes"], names) if fields and "bytes" in fields else None
    return None if found is None else {"bytes": found}


def _swizzle(field: Field) -> int | None:
    if type(field.value) is int and field.value in (0, 32, 64, 128):
        return field.value
    return field.expected("0, 32, 64 or 128")
