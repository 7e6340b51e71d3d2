"""Packed copies that blocks share: tiles that do not change along the first grid axis are packed once, before the blocks run.

A rule, not a hint: a copy that has to convert, fill up or turn its tile anyway, in a loop that counts the matrix's own tiles,
gives the same bytes to every block along the first axis. Where no two blocks share anything (decode), each packs for itself.
"""

from __future__ import annotations

from generator.tl.ir import Copy, For, Num, Var, names
from generator.translate.cpu.ops import Load, Loop, Work
from generator.translate.cpu.unit import Pack, Unit
from generator.translate.cpu.widths import CHUNK, chunks, padded


def find_packs(unit: Unit) -> tuple[Pack, ...]:
    """Every shared packed copy, in order of the program."""
    return tuple(p for copy in _candidates(unit.ops.body, (), unit) for p in _packs(copy, unit))


def _candidates(body: tuple[Work, ...], loops: tuple[For, ...], unit: Unit) -> list[Copy]:
    out: list[Copy] = []
    for op in body:
        match op:
            case Loop():
                out += _candidates(op.body, (*loops, op.stmt), unit)
            case Load(copy) if _is_shared(copy, loops, unit) and copy not in out:
                out.append(copy)
    return out


def _is_shared(copy: Copy, loops: tuple[For, ...], unit: Unit) -> bool:
    """A tile with two axes, counted by a loop variable, of a matrix that is the same along the first axis and never written."""
    axes, a = unit.program.axes, unit.matrix(copy.source)
    if not axes or len(copy.shape) != 2 or len(copy.coordinate) < 1 or a.name in unit.program.outputs:
        return False
    variables = {loop.var for loop in loops}
    row, column = copy.coordinate[0], copy.coordinate[1] if len(copy.coordinate) > 1 else Num(0)
    moves = {n for e in (*a.offset, *a.shape) for n in names(e)} & (variables | {axes[0].name})
    return isinstance(row, Var) and row.name in variables and column == Num(0) and not moves


def _packs(copy: Copy, unit: Unit) -> list[Pack]:
    name, (rows, cols), place = copy.into, unit.tile(copy.into).shape, unit.placement
    out = []
    if name in place.turned16:
        out.append(Pack(copy, "turned16", f"{chunks(rows)} * {chunks(cols)} * 2"))
    if name in place.rows16 and cols % CHUNK:
        out.append(Pack(copy, "rows16", f"{rows} * {chunks(cols)} * 2"))
    width = padded(cols) if name in place.padded else str(cols)
    is_packed = unit.matrix(copy.source).dtype in ("f16", "bf16") or width != str(cols)
    if name in place.plain and name not in place.raw and is_packed:
        out.append(Pack(copy, "rows", f"{rows} * {width} * 4"))
    return out
