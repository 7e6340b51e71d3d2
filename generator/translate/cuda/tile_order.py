"""The order in which blocks take tiles of the grid: sections whose tensors stay in L2, longest first in each. Runs no loop.

The last blocks of a grid decide when it ends: if they are long, most multiprocessors wait for a few.
"""

from __future__ import annotations

from typing import Any

from generator.gpus import cards_of
from generator.tl.ir import Copy, Expr, For, Num, Op, Stmt, Var, walk
from generator.tl.ir import names as free_names
from generator.translate.cuda.dtypes import BYTES
from generator.translate.cuda.launch import blocks
from generator.translate.cuda.parameters import Parameters
from generator.translate.cuda.scalars import plain
from generator.translate.cuda.unit import Unit
from generator.translate.passes.affine import affine
from generator.translate.passes.ranges import ROW_FIRST, ROW_LAST

UNKNOWN_EXTENT = 1 << 30  # stands for an extent that only the device knows
PLAIN_FUNCTIONS = frozenset({"+", "-", "*", "//", "ceildiv", "max", "min", "neg"})


def section_bytes(target: str, share: float = 0.64) -> int:
    """Bytes of looped-over tensors that one section of the grid may touch: a share of the smallest L2 of a target's cards."""
    return int(share * min(gpu.l2_bytes for gpu in cards_of(target)))


def add_order(parameters: Parameters, u: Unit, section: Any) -> None:
    """What the runtime's `Order` is made of. section: outer indices that are taken together, as an expression."""
    members = (("total", blocks(u)), ("section", section), ("num_first", plain(u.program.axes[0].extent)))
    for name, value in (*members, ("num_rest", outer_blocks(u))):
        parameters.add(f"int q_{name}", "i32", value=value)


def add_sections(parameters: Parameters, u: Unit) -> None:
    """What the runtime's `Sections` is made of: equal sections of outer indices, the last one with what is left over.

    A small last section would start its longest blocks when nearly all others are done.
    """
    fit = _fit(u, section_bytes(u.target.name, 1.0), ranges=True)
    rest = outer_blocks(u)
    section = ["max", 1, ["min", rest, fit]]
    members = (("section", section), ("num_sections", ["max", 1, ["//", rest, section]]))
    for name, value in (*members, ("num_first", plain(u.program.axes[0].extent)), ("num_rest", rest)):
        parameters.add(f"u32 q_{name}", "i32", value=value)


def outer_blocks(u: Unit) -> Any:
    """The number of blocks along all axes but the first, as an expression."""
    rest: Any = 1
    for axis in u.program.axes[1:]:
        rest = plain(axis.extent) if rest == 1 else ["*", rest, plain(axis.extent)]
    return rest


def section_in_l2(u: Unit, l2_bytes: int) -> Any:
    """How many outer indices keep the looped-over tensors in this much of L2, as an expression; at least one."""
    return ["max", 1, ["min", outer_blocks(u), _fit(u, l2_bytes, ranges=False)]]


def _fit(u: Unit, l2_bytes: int, ranges: bool) -> Any:
    """Outer indices whose looped-over tensors take so many bytes, as an expression. ranges: see `tile_bytes`."""
    total: Any = 0
    for size in tile_bytes(u, ranges):
        total = ["+", total, size]
    return ["//", ["*", l2_bytes, outer_blocks(u)], ["max", total, 1]]


def moves_with_first_axis(u: Unit) -> bool:
    """Whether tiles that loops copy depend on the grid's first axis."""
    read = [
        e
        for p in u.analysis.loops
        for s in loads_of(p.loop.body)
        for e in (*s.coordinate, *u.program.allocations[s.source].offset)
    ]
    return any(u.program.axes[0].name in free_names(e) for e in read)


def loads_of(body: tuple[Stmt, ...]) -> list[Copy]:
    return [s for s in body if isinstance(s, Copy) and s.into_level == "shared"]


def tile_bytes(u: Unit, ranges: bool = False) -> list[Any]:
    """Bytes of each matrix that loops go over, all leading indices together, as expressions.

    ranges: of each tensor, only the rows that the longest block goes over: blocks that run at once are about as far along.
    """
    out: dict[str, Any] = {}
    for loop in [s for s in u.program.code if isinstance(s, For)]:
        for copy in loads_of(loop.body):
            a = u.program.allocations[copy.source]
            rows, *others = (_extent(x) for x in a.shape)
            span = _span(u, loop, copy) if ranges else None
            size: Any = BYTES[a.dtype]
            for e in [rows if span is None else span, *others, *(largest(u, x) for x in a.offset)]:
                size = ["*", size, e]
            out.setdefault(a.name, size)
    return list(out.values())


def _span(u: Unit, loop: For, copy: Copy) -> Any:
    """Rows of a copied matrix that the last block along the first axis goes over, as an expression; None where not known."""
    axis, found = u.program.axes[0], u.analysis.plan(loop).range
    values = {axis.name: ["-", plain(axis.extent), 1], ROW_FIRST.name: 0, ROW_LAST.name: u.rows - 1}
    known = set(values) | set(u.program.arguments)
    for lo, hi in ((found.lo, found.hi), (loop.lo, loop.hi)):
        if copy.coordinate[0] == Var(loop.var) and all(_is_plain(b) and free_names(b) <= known for b in (lo, hi)):
            return ["*", u.shape(copy.into)[0], ["max", ["-", plain(hi, values), plain(lo, values)], 1]]
    return None


def _is_plain(e: Expr) -> bool:
    """Whether a launcher can work it out (docs/cuda_translator.md)."""
    return all(isinstance(x, Num | Var) or (isinstance(x, Op) and x.fn in PLAIN_FUNCTIONS) for x in walk(e))


def _extent(e: Expr) -> Any:
    try:
        return plain(e)
    except KeyError:
        return UNKNOWN_EXTENT


def largest(u: Unit, e: Expr) -> Any:
    """One more than an offset's largest value over the grid, as an expression; where not known, more than any tensor has."""
    axes = {a.name: a.extent for a in u.program.axes}

    def top(x: Expr) -> Expr | None:
        match x:
            case Var(name) if name in axes:
                return Op("-", (axes[name], Num(1)))
            case Op("//", (a, b)) if not free_names(b) & set(axes):
                inner = top(a)
                return None if inner is None else Op("//", (inner, b))
            case Op("+" | "*" as fn, (a, b)):
                form, parts = affine(x), (top(a), top(b))
                grows = form is not None and all(c > 0 for s, c in form.terms if free_names(s) & set(axes))
                return Op(fn, (parts[0], parts[1])) if grows and parts[0] is not None and parts[1] is not None else None
        return x if not any(isinstance(y, Var) and y.name in axes for y in walk(x)) else None

    largest = top(e)
    return UNKNOWN_EXTENT if largest is None else ["+", plain(largest), 1]
