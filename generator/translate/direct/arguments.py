"""The arguments of a CUDA kernel in a launch description, laid out as the compiler lays them out. Fills in no value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from generator.translate.direct.expressions import expression
from generator.translate.direct.reading import Field
from generator.translate.facts import ParameterBlock, ParameterField
from generator.translate.records import ScalarParameter, TensorParameter

#: How an argument can be written -> its C type: for prompts, messages and docs/direct_author.md.
ARGUMENTS: tuple[str, ...] = (
    '{"tensor": NAME}: its address (a pointer)',
    '{"tensor": NAME, "stride": K}: its stride of axis K in elements (long long)',
    '{"scalar": NAME}: that number (int or float)',
    '{"value": EXPRESSION, "type": "i32", "i64" or "f32"}: a number worked out before the launch (int, long long, float)',
    '{"workspace": true}: the address of the workspace (a pointer)',
    '{"map": I}: tensor map I (const __grid_constant__ CUtensorMap)',
    '{"struct": [ARGUMENT, ...]}: a struct of those by value',
)
_KINDS = ("tensor", "scalar", "value", "workspace", "map", "struct")
_FIELDS = {name: f"an argument has one of {', '.join(_KINDS)}" for name in (*_KINDS, "stride", "type")}
#: A `ParameterField` that has no offset yet.
Source: TypeAlias = dict[str, Any]
#: Type of a field -> (bytes, alignment).
SIZES: dict[str, tuple[int, int]] = {"pointer": (8, 8), "i64": (8, 8), "i32": (4, 4), "f32": (4, 4), "tensor_map": (128, 64)}
MAX_ARGUMENTS = 64
#: What every card takes.
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Arguments:
    """fields: as in `Launch.target_facts`. parts: where each argument begins."""

    fields: tuple[ParameterField, ...]
    parts: tuple[int, ...]
    bytes: int
    alignment: int

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(f["tensor"] for f in self.fields if "tensor" in f)

    def facts(self) -> ParameterBlock:
        return {"bytes": self.bytes, "alignment": self.alignment, "fields": list(self.fields), "parts": list(self.parts)}


@dataclass(frozen=True, slots=True)
class _Known:
    """What arguments may name."""

    tensors: Mapping[str, TensorParameter]
    scalars: Mapping[str, ScalarParameter]
    num_maps: int
    workspace: bool


def read_arguments(
    field: Field, tensors: Mapping[str, TensorParameter], scalars: Mapping[str, ScalarParameter], num_maps: int, workspace: bool
) -> Arguments | None:
    """The arguments with their offsets, or None."""
    known = _Known(tensors, scalars, num_maps, workspace)
    groups = field.each(1, MAX_ARGUMENTS, "arguments", lambda f: _argument(f, known))
    if groups is None:
        return None
    fields: list[ParameterField] = []
    parts, at, widest = [], 0, 1
    for group in groups:
        alignment = max(SIZES[f["type"]][1] for f in group)
        at, widest = _up(at, alignment), max(widest, alignment)
        parts.append(at)
        for f in group:
            size, own = SIZES[f["type"]]
            at = _up(at, own)
            fields.append(cast(ParameterField, {"offset": at, **f}))
            at += size
        if len(group) > 1:
            at = _up(at, alignment)
    if at > MAX_BYTES:
        return field.wrong(f"expected at most {MAX_BYTES} bytes of arguments, found {at}")
    return Arguments(tuple(fields), tuple(parts), _up(at, widest), widest)


def _up(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _argument(field: Field, known: _Known) -> tuple[Source, ...] | None:
    """One argument as the fields of the parameter block that it takes: one, or those of a struct."""
    if isinstance(field.value, dict) and "struct" in field.value:
        fields = field.fields({"struct": ""}, ())
        if fields is None:
            return None
        parts = fields["struct"].each(1, MAX_ARGUMENTS, "arguments", lambda f: _single(f, known))
        return None if parts is None else parts
    found = _single(field, known)
    return None if found is None else (found,)


def _single(field: Field, known: _Known) -> Source | None:
    fields = field.fields(_FIELDS, ())
    if fields is None or len(fields) != len(field.value):
        return None
    kinds = [name for name in _KINDS if name in fields]
    if len(kinds) != 1:
        return field.expected(f"one of {', '.join(_KINDS)}")
    extra = {"tensor": {"stride"}, "value": {"type"}}.get(kinds[0], set())
    for name in sorted(set(fields) - {kinds[0]} - extra):
        return fields[name].wrong(f"there is no {name} of a {kinds[0]} argument; leave it out")
    match kinds[0]:
        case "tensor":
            return _tensor(fields, known)
        case "scalar":
            scalar = fields["scalar"].one_of(known.scalars)
            return None if scalar is None else {"type": known.scalars[scalar].dtype, "scalar": scalar}
        case "value":
            return _value(fields, known)
        case "workspace":
            if fields["workspace"].value is not True:
                return fields["workspace"].expected("true")
            return {"type": "pointer", "workspace": True} if known.workspace else field.wrong("the description has no workspace")
        case "map":
            if known.num_maps == 0:
                return field.wrong("the description has no tensor_maps")
            index = fields["map"].whole(0, known.num_maps - 1)
            return None if index is None else {"type": "tensor_map", "map": index}
        case _:
            return field.wrong("a struct holds no struct; list its fields one after the other")


def _tensor(fields: dict[str, Field], known: _Known) -> Source | None:
    name = fields["tensor"].one_of(known.tensors)
    if name is None or "stride" not in fields:
        return None if name is None else {"type": "pointer", "tensor": name}
    axis = fields["stride"].whole(0, known.tensors[name].ndim - 1)
    return None if axis is None else {"type": "i64", "tensor": name, "stride": axis}


def _value(fields: dict[str, Field], known: _Known) -> Source | None:
    kind = fields["type"].one_of(("i32", "i64", "f32")) if "type" in fields else "i32"
    if kind is None:
        return None
    whole = [name for name, s in known.scalars.items() if s.dtype == "i32"]
    names = [*known.scalars, "$sms"] if kind == "f32" else [*whole, "$sms"]
    found = expression(fields["value"], names, fractions=kind == "f32")
    return None if found is None else {"type": kind, "value": found}
