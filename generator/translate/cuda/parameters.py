"""The kernel's one parameter: a struct, and the same layout as data for whoever fills it (docs/cuda_translator.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from generator.tl.ir import Allocate
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import BYTES, C_TYPES
from generator.translate.cuda.unit import Unit
from generator.translate.cuda.writer import Writer
from generator.translate.facts import FieldType, ParameterBlock, ParameterField

SIZES = {"tensor_map": 128, "pointer": 8, "i64": 8, "i32": 4, "f32": 4}
ALIGNMENTS = {"tensor_map": 64, "pointer": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass
class Parameters:
    """Members in order of offset. `add` gives each the next offset that its alignment allows."""

    members: list[tuple[str, ParameterField]] = field(default_factory=list)
    size: int = 0
    alignment: int = 8

    def add(self, declaration: str, kind: FieldType, **source: Any) -> None:
        """source: where the value comes from, as `ParameterField` has it."""
        at = -(-self.size // ALIGNMENTS[kind]) * ALIGNMENTS[kind]
        self.members.append((declaration, cast(ParameterField, {"offset": at, "type": kind, **source})))
        self.size = at + SIZES[kind]
        self.alignment = max(self.alignment, ALIGNMENTS[kind])

    def write(self, w: Writer, name: str = "Params") -> None:
        w(f"struct {name} {{", *(f"{declaration};" for declaration, _ in self.members), "};")

    def facts(self) -> ParameterBlock:
        total = -(-self.size // self.alignment) * self.alignment
        return {"bytes": total, "alignment": self.alignment, "fields": [f for _, f in self.members]}


def add_program(parameters: Parameters, u: Unit, addressed: list[Allocate]) -> None:
    """Addresses and strides of the tensors that the kernel reads or writes by pointer, then the scalar arguments."""
    for a in addressed:
        parameters.add(f"char* m_{a.name}", "pointer", tensor=a.name)
        for k in range(len(a.offset) + len(a.shape)):
            parameters.add(f"i64 s_{a.name}_{k}", "i64", tensor=a.name, stride=k)
    for name, argument in u.program.arguments.items():
        kind: FieldType = "i32" if argument.dtype == "i32" else "f32"
        parameters.add(f"{'int' if kind == 'i32' else 'float'} a_{name}", kind, scalar=name)


def write_extents(u: Unit, matrices: list[Allocate]) -> None:
    """The extents of matrices, as the block sees them."""
    for a in matrices:
        for k, e in enumerate(a.shape):
            u.w(f"const int {names.extent(a.name, k)} = {u.scalar(e)};")


def write_addresses(u: Unit, matrices: list[Allocate]) -> None:
    """Where this block's matrices begin; copied and written ones as bytes, captured ones by their type."""
    by_tile = u.loaded | set(u.program.outputs)
    for a in matrices:
        offset = u.lead(a)
        if a.name in by_tile:
            u.w(f"char* const {names.lead(a.name)} = {names.matrix(a.name)} + {BYTES[a.dtype]} * ({offset});")
        else:
            c_type = C_TYPES[a.dtype]
            u.w(f"const {c_type}* const {names.lead(a.name)} = (const {c_type}*){names.matrix(a.name)} + ({offset});")
