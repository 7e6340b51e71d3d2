"""Which layout each tile has, where it is stored, and which form each product takes: decided by dataflow alone. Emits no text.

Two layouts. LANES: a tile lies column by column with its rows in vector lanes, so that row reductions and row values are
vertical code. ROWS: row by row, columns in lanes. A product of a LANES result broadcasts its second operand and needs the first
one with its rows in lanes; one of a ROWS result broadcasts its first operand and needs the second one with its columns in lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from generator.tl.ir import Gemm, names
from generator.translate.cpu.ops import Branch, Load, Loop, Ops, Product, Step, Tile, Work, every, reads, writes
from generator.translate.cpu.widths import CHUNK, VECTOR


class Layout(Enum):
    LANES = "rows in lanes"
    ROWS = "row by row"


@dataclass(slots=True)
class Placement:
    """layout of every two-dimensional tile that statements write; the reason for it; buffer: whose memory a tile uses.

    plain: loaded tiles that are read row by row; raw: those of them that keep their 16 bits, being read once. padded: those
    whose rows must fill whole vectors. turned: those that are needed with rows in lanes, and are transposed as they are copied.

    bf16: products (by id) that multiply 16-bit values. Their operands: rows16, loaded tiles read row by row; turned16, loaded
    tiles whose columns are made rows; pairs, loaded and computed tiles with two columns in a word and rows in lanes.
    """

    layout: dict[str, Layout] = field(default_factory=dict)
    reason: dict[str, str] = field(default_factory=dict)
    buffer: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    raw: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    turned: set[str] = field(default_factory=set)
    bf16: set[int] = field(default_factory=set)
    rows16: set[str] = field(default_factory=set)
    turned16: set[str] = field(default_factory=set)
    pairs: set[str] = field(default_factory=set)

    def is_lanes(self, name: str) -> bool:
        return self.layout.get(name) is Layout.LANES


def place(ops: Ops, small_rows: int, bf16: set[int]) -> Placement:
    """small_rows: blocks of at most so many rows keep columns in lanes, since their rows would not fill a vector.

    bf16: the products (by id) that are made of 16-bit values.
    """
    out = Placement(bf16=bf16)
    groups = _groups(ops)
    for group in groups:
        layout, reason = _choose(group, ops, small_rows, out)
        for name in group:
            out.layout[name], out.reason[name] = layout, reason
    _needs(ops, out)
    _share(ops, out)
    return out


def _element(ops: Ops, name: str) -> bool:
    tile = ops.tiles.get(name)
    return tile is not None and tile.is_element and not tile.loaded


def _groups(ops: Ops) -> list[list[str]]:
    """Tiles that element-wise statements tie together; each group gets one layout."""
    parent = {n: n for n in ops.tiles if _element(ops, n)}

    def root(n: str) -> str:
        while parent[n] != n:
            n = parent[n]
        return n

    for op in every(ops.body):
        if isinstance(op, Step) and op.kind == "element":
            for x in sorted(op.reads):
                if _element(ops, x):
                    parent[root(x)] = root(op.into)
    out: dict[str, list[str]] = {}
    for n in parent:
        out.setdefault(root(n), []).append(n)
    return list(out.values())


def _choose(group: list[str], ops: Ops, small_rows: int, out: Placement) -> tuple[Layout, str]:
    rows = max(ops.tiles[n].rows for n in group)
    products = [op for op in every(ops.body) if isinstance(op, Product)]
    made = [op.gemm for op in products if op.gemm.into in group]
    if any(id(op) in out.bf16 and {op.gemm.into, op.gemm.a} & set(group) for op in products):
        return Layout.LANES, "made or read by a bf16 product, whose pairs have their rows in lanes"
    reduced = any(
        isinstance(op, Step) and op.kind.startswith("row") and op.kind != "row" and op.reads & set(group)
        for op in every(ops.body)
    )
    if rows <= small_rows:
        return Layout.ROWS, f"{rows} rows do not fill vectors"
    if any(g.b_transposed and ops.tiles[g.b].loaded for g in made):
        return Layout.LANES, "made by a product with a transposed loaded tile, which is then broadcast and never packed"
    if made:
        return Layout.ROWS, "made by a product with a tile whose rows are then the vectors, never packed"
    if reduced:
        return Layout.LANES, "reduced along its rows"
    return Layout.ROWS, "no product makes it and nothing reduces it"


def bf16_products(ops: Ops) -> list[Product]:
    """Products of two bf16 tiles that can be made of chunks, of rows, of columns and of the contraction."""
    found = [op for op in every(ops.body) if isinstance(op, Product) and _in_chunks(op.gemm, ops)]
    while True:
        kept = [op for op in found if ops.tiles[op.gemm.a].loaded or _only_multiplied(op.gemm.a, ops, found)]
        if len(kept) == len(found):
            return found
        found = kept


def _in_chunks(g: Gemm, ops: Ops) -> bool:
    a, b, into = ops.tiles[g.a], ops.tiles[g.b], ops.tiles[g.into]
    if (a.dtype, b.dtype, into.dtype) != ("bf16", "bf16", "f32") or g.a_transposed or not b.loaded or into.rows % CHUNK:
        return False
    return b.rows % CHUNK == 0 and (a.loaded or a.shape[1] % CHUNK == 0)


def _only_multiplied(name: str, ops: Ops, products: list[Product]) -> bool:
    """A computed tile that one statement makes and only these products read, as their first operand: it can live as pairs."""
    made = [op for op in every(ops.body) if not isinstance(op, Loop | Branch) and name in writes(op)]
    read = [op for op in every(ops.body) if not isinstance(op, Loop | Branch) and name in reads(op)]
    first_only = all(op in products and op.gemm.a == name and op.gemm.b != name for op in read if isinstance(op, Product))
    return len(made) == 1 and isinstance(made[0], Step) and all(isinstance(op, Product) for op in read) and first_only


def is_dot(g: Gemm, ops: Ops, out: Placement) -> bool:
    """Few rows, both operands lying along the contraction: each element of the result is a dot product, its lanes are summed up.

    What fills up the last vector of a row has to be zero, which only loaded tiles guarantee.
    """
    if out.layout[g.into] is Layout.LANES or g.a_transposed or not g.b_transposed:
        return False
    a, b = ops.tiles[g.a], ops.tiles[g.b]
    return a.rows <= MAX_DOT_ROWS and b.loaded and (a.loaded or a.shape[1] % VECTOR == 0)


#: More rows than this are worth a transposed copy of the other operand.
MAX_DOT_ROWS = 8


def vector_operand(g: Gemm, layout: Layout) -> tuple[str, bool]:
    """The operand that is read in vectors, and whether these run along its rows (down a column)."""
    return (g.a, not g.a_transposed) if layout is Layout.LANES else (g.b, g.b_transposed)


def broadcast_operand(g: Gemm, layout: Layout) -> str:
    return g.b if layout is Layout.LANES else g.a


def _needs(ops: Ops, out: Placement) -> None:
    for n, tile in ops.tiles.items():
        uses = [op for op in every(ops.body) if not isinstance(op, Load | Loop | Branch) and n in reads(op)]
        if tile.loaded and tile.dtype in ("f16", "bf16") and uses and all(_read_once(op, n, ops, out) for op in uses):
            out.raw.add(n)
    for op in every(ops.body):
        match op:
            case Product(g) if id(op) in out.bf16:
                (out.rows16 if g.b_transposed else out.turned16).add(g.b)
                out.pairs.add(g.a)
            case Product(g) if is_dot(g, ops, out):
                loaded = {n for n in (g.a, g.b) if ops.tiles[n].loaded}
                out.plain |= loaded
                out.padded |= loaded
            case Product(g):
                layout = out.layout[g.into]
                vector, down = vector_operand(g, layout)
                if ops.tiles[vector].loaded:
                    (out.turned if down else out.plain).add(vector)
                    if not down:
                        out.padded.add(vector)
                if ops.tiles[broadcast_operand(g, layout)].loaded:
                    out.plain.add(broadcast_operand(g, layout))
            case Step():
                _needs_of_step(op, ops, out)
    known = out.turned | out.plain | out.rows16 | out.turned16 | out.pairs
    out.plain |= {n for n, t in ops.tiles.items() if t.loaded and t.is_element and n not in known}


def _read_once(op: Work, name: str, ops: Ops, out: Placement) -> bool:
    """Few rows against a tile that products read in vectors, row by row: converting as it is read costs less than a copy."""
    if not isinstance(op, Product) or op.gemm.b != name or op.gemm.a == name or ops.tiles[op.gemm.into].rows > MAX_DOT_ROWS:
        return False
    return is_dot(op.gemm, ops, out) or out.layout[op.gemm.into] is Layout.ROWS and not op.gemm.b_transposed


def _needs_of_step(op: Step, ops: Ops, out: Placement) -> None:
    """A loaded tile in an expression is read in the layout of the statement."""
    loaded = [x for x in op.reads if x in ops.tiles and ops.tiles[x].loaded and ops.tiles[x].is_element]
    if not loaded:
        return
    if step_layout(op, ops, out) is Layout.LANES:
        out.turned.update(loaded)
    else:
        out.plain.update(loaded)
        out.padded.update(loaded)


def step_layout(op: Step, ops: Ops, out: Placement) -> Layout:
    """An assignment runs in its tile's layout, a reduction in that of what it reads."""
    if op.kind == "element":
        return out.layout[op.into]
    found = [out.layout[x] for x in sorted(op.reads) if x in out.layout]
    return found[0] if found else Layout.LANES


def _share(ops: Ops, out: Placement) -> None:
    """A tile made element by element from another that is dead afterwards takes its memory: a block's scores stay in L1."""
    out.buffer = {n: n for n in out.layout}
    clashes = _clashes(ops, set(out.layout))
    members = {n: {n} for n in out.layout}
    for op in every(ops.body):
        if not isinstance(op, Step) or op.kind != "element":
            continue
        for x in sorted(names(op.value)):
            if x not in out.layout or {x, op.into} & out.pairs or not _alike(ops.tiles[x], ops.tiles[op.into]):
                continue
            a, b = out.buffer[x], out.buffer[op.into]
            if a != b and not any((p, q) in clashes for p in members[a] for q in members[b]):
                members[a] |= members.pop(b)
                for n in members[a]:
                    out.buffer[n] = a


def _alike(a: Tile, b: Tile) -> bool:
    return a.shape == b.shape and (a.dtype == "i32") == (b.dtype == "i32")


def _clashes(ops: Ops, tiles: set[str]) -> set[tuple[str, str]]:
    """Pairs of tiles that hold values at the same time."""
    out: set[tuple[str, str]] = set()

    def clash(a: str, others: set[str]) -> None:
        for b in others & tiles - {a}:
            out.update({(a, b), (b, a)})

    def visit(body: tuple[Work, ...]) -> None:
        for op in every(body):
            if isinstance(op, Loop):
                continue
            for n in writes(op) & tiles if isinstance(op, Product | Step) else ():
                clash(n, set(ops.after(op)))
                if isinstance(op, Product):
                    clash(n, reads(op))

    visit(ops.body)
    return out
