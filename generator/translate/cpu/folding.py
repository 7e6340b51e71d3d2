"""What need not be a pass over a tile: scalings that products and stores do on the way, and zeros that are never written.

Decides; emits no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from generator.tl.ir import Expr, Num, Op, Var, names
from generator.translate.cpu.ops import Branch, Loop, Ops, Product, Step, Store, Tile, Work, every, reads, writes


def fold_scales(body: tuple[Work, ...], tiles: dict[str, Tile], unscaled: set[int]) -> tuple[Work, ...]:
    """`acc = acc * r` before a product that adds to acc, nothing between touching either: the product scales as it loads.

    unscaled: products (by id) that cannot.
    """
    out: list[Work] = []
    for op in body:
        match op:
            case Loop():
                op = Loop(op.stmt, op.index, fold_scales(op.body, tiles, unscaled))
            case Branch():
                op = Branch(op.stmt, fold_scales(op.then, tiles, unscaled), fold_scales(op.otherwise, tiles, unscaled))
            case Product(gemm) if gemm.accumulate and id(op) not in unscaled:

                def is_row(e: Expr) -> bool:
                    tile = tiles.get(e.name) if isinstance(e, Var) else None
                    return tile is not None and len(tile.shape) == 1 and tile.dtype != "i32"

                if (at := _scaling(out, gemm.into, tiles, is_row)) is not None:
                    factor = row_factor(out.pop(at), tiles, is_row)
                    assert isinstance(factor, Var)
                    op = Product(gemm, factor.name)
        out.append(op)
    return tuple(out)


def fold_into_stores(ops: Ops, is_row: Callable[[Expr], bool]) -> tuple[Work, ...]:
    """`tile = tile * r` before a store of the tile, which is dead afterwards: r becomes a row of its own, the store multiplies.

    is_row: whether an expression is the same along each row. Adds the rows to the tiles of `ops`.
    """
    return _fold_into_stores(ops.body, ops, is_row)


def _fold_into_stores(body: tuple[Work, ...], ops: Ops, is_row: Callable[[Expr], bool]) -> tuple[Work, ...]:
    out: list[Work] = []
    for op in body:
        match op:
            case Loop():
                op = Loop(op.stmt, op.index, _fold_into_stores(op.body, ops, is_row))
            case Branch():
                then, otherwise = (_fold_into_stores(b, ops, is_row) for b in (op.then, op.otherwise))
                op = Branch(op.stmt, then, otherwise)
            case Store(copy) if ops.tiles[copy.source].is_element and copy.source not in ops.after(op):
                if (at := _scaling(out, copy.source, ops.tiles, is_row)) is not None:
                    step = out[at]
                    assert isinstance(step, Step)
                    factor = row_factor(step, ops.tiles, is_row)
                    assert factor is not None
                    name = f"scale@{sum(n.startswith('scale@') for n in ops.tiles)}"
                    ops.tiles[name] = Tile(name, (ops.tiles[copy.source].rows,), "f32")
                    out[at] = Step(name, factor, "row", step.origin)
                    op = Store(copy, name)
        out.append(op)
    return tuple(out)


def row_factor(s: Work, tiles: Mapping[str, Tile], is_row: Callable[[Expr], bool]) -> Expr | None:
    """r of `x = x * r`, where x is an fp32 tile and r the same along each row."""
    match s:
        case Step(into, Op("*", (Var(x), r))) | Step(into, Op("*", (r, Var(x)))) if x == into and x not in names(r) and is_row(r):
            return r if tiles[x].dtype == "f32" and tiles[x].is_element else None
    return None


def _scaling(before: list[Work], into: str, tiles: dict[str, Tile], is_row: Callable[[Expr], bool]) -> int | None:
    """Where the scaling of `into` stands that may move down to here."""
    written: set[str] = set()
    for at in range(len(before) - 1, -1, -1):
        op = before[at]
        if isinstance(op, Step) and op.into == into:
            factor = row_factor(op, tiles, is_row)
            return at if factor is not None and not names(factor) & written else None
        if isinstance(op, Loop | Branch) or into in reads(op) | writes(op):
            return None
        written |= writes(op)
    return None


def lazy_zeros(ops: Ops, buffer: Mapping[str, str], able: Callable[[Product], bool]) -> frozenset[str]:
    """Tiles that are filled with zeros and then added to by products: these start from zero instead of loading them.

    able: products that can. buffer: whose memory a tile uses; a tile that shares its memory is none of them.
    """
    shared = {n for n, b in buffer.items() if n != b} | {b for n, b in buffer.items() if n != b}
    everything = list(every(ops.body))
    zeroed = {op.into for op in everything if isinstance(op, Step) and is_zero(op, ops.tiles)}
    adding = [op for op in everything if isinstance(op, Product) and op.gemm.accumulate]
    added = {op.gemm.into for op in adding}
    return frozenset(n for n in zeroed & added - shared if all(able(op) for op in adding if op.gemm.into == n))


def is_zero(op: Work, tiles: Mapping[str, Tile]) -> bool:
    """Whether an fp32 tile is filled with zeros here."""
    match op:
        case Step(into, Num(value), "element"):
            return str(value) in ("0", "0.0") and tiles[into].dtype == "f32"
    return False


def touched(steps: Iterable[Step], name: str) -> bool:
    return any(name == s.into or name in s.reads for s in steps)
