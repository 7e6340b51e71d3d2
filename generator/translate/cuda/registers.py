"""Declarations of register tiles, their initial values, and statements on them. One text for all CUDA targets."""

from __future__ import annotations

from generator.tl.ir import COLS, ROWS, Compute, Copy, Expr, Index, Num, Op, Reshape, Stmt, Var
from generator.tl.types import Kind
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import TYPES
from generator.translate.cuda.element_code import PLAIN, Setting
from generator.translate.cuda.elementwise import compute, scales_by_row
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.unit import Unit, round_up


def write_declarations(u: Unit, column_unit: int) -> None:
    """Every register tile: [MT][columns / 2], columns padded to a multiple of `column_unit`; a row tile [MT][2]."""
    storage = u.analysis.storage
    for name in u.register_tiles():
        shape, c_type = u.shape(name), "int" if u.dtype(name) == "i32" else "float"
        if not shape:
            u.w(f"{c_type} {names.tile(name)};")
        elif name in storage:
            n = round_up(shape[1], column_unit) // 2
            root = names.tile(storage[name])
            u.w(f"{c_type} (&{names.tile(name)})[MT][{n}] = {root};  // the registers of {storage[name]}, which is dead by then")
        else:
            n = round_up(shape[1], column_unit) // 2 if len(shape) == 2 else 2
            u.w(f"{c_type} {names.tile(name)}[MT][{n}];")
    for name in u.operands():
        columns = u.shape(name)[1]
        if columns % 16:
            raise Refused("translate_failed", f"{name}: an operand in registers needs columns in steps of 16, found {columns}")
        u.w(f"u32 {names.tile(name)}[MT][{columns // 4}];")


def write_initial(u: Unit, column_unit: int, only: set[str] | None = None) -> None:
    """Initial values of tiles; padding columns too, since products add to them."""
    for a in u.program.allocations.values():
        if a.level != "register" or a.init is None or (only is not None and a.name not in only):
            continue
        shape = u.shape(a.name)
        value = u.scalars.text(a.init, Kind.INT if a.dtype == "i32" else Kind.FLOAT)
        if not shape:
            u.w(f"{names.tile(a.name)} = {value};")
        elif len(shape) == 2:
            u.w(f"FOR_TILE({round_up(shape[1], column_unit)}) {names.tile(a.name)}[t][AT] = {value};")
        else:
            u.w(f"FOR_ROWS {names.tile(a.name)}[t][r] = {value};")


def write_statement(u: Unit, s: Stmt, setting: Setting = PLAIN, lazy: bool = False) -> None:
    """A Compute or Reshape, or a copy from global memory to registers."""
    match s:
        case Compute():
            u.w(u.comment(s))
            lines = compute(u.code, s, setting)
            scaled_by = scales_by_row(s, u.analysis.scope) if lazy else None
            if scaled_by:  # x * 1 is x: skipped while no row of the warp changes
                x = u.code.temporary()
                vote = [f"bool {x} = false;", f"FOR_ROWS {x} |= {names.tile(scaled_by)}[t][r] != 1.0f;"]
                lines = [*vote, f"if (__any_sync(0xffffffffu, {x})) {{", *lines, "}"]
            u.w(*lines)
        case Reshape():
            u.w(u.comment(s), f"to_operand<{TYPES[s.dtype]}>({names.tile(s.into)}, {names.tile(s.source)});")
        case Copy(source_level="global", into_level="register"):
            u.w(u.comment(s), *compute(u.code, loaded_elements(u, s), setting))
        case Copy(source_level="shared", into_level="register"):
            u.w(u.comment(s), *compute(u.code, Compute(s.into, Var(s.source)), setting))
        case _:
            raise Refused("translate_failed", f"no code for: {u.comment(s)[3:]}", s.span.line)


def loaded_elements(u: Unit, s: Copy) -> Compute:
    """A copy from global memory to registers, as reads of single elements; zero past the end."""
    shape = u.shape(s.into)
    position: list[Expr] = [Op("+", (Op("*", (s.coordinate[0], Num(shape[0]))), ROWS))]
    if len(shape) == 2:
        position.append(Op("+", (Op("*", (s.coordinate[1], Num(shape[1]))), COLS)))
    return Compute(s.into, Index(s.source, tuple(position)), span=s.span)
