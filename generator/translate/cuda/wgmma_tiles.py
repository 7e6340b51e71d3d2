"""Shared tiles of wgmma kernels: which programs have them, where tiles and barriers lie, and their tensor maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from generator.tl.ir import Compute, Copy, For, Gemm, If, Index, Num, Reshape, names, walk
from generator.translate.cuda.mma_tiles import shared_copies
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.scalars import plain
from generator.translate.cuda.tile_order import largest
from generator.translate.cuda.unit import SharedTile, Unit, round_up
from generator.translate.facts import TensorMapFacts
from generator.translate.passes.scope import flatten

CHUNK = 64  # columns of 128 bytes, the width of the swizzle
MAX_ROWS = 256  # of a TMA box
MAX_STAGES = 4
BARRIER_BYTES = 8
#: Consumer warpgroups -> registers of a producer's and of a consumer's thread; their sum is what the block started with.
REGISTERS: dict[int, tuple[int, int] | None] = {1: None, 2: (40, 232), 3: (32, 160)}
WIDE = (24, 240)  # for two warpgroups whose tiles need more than
WIDE_WORDS = 176
#: Consumer warpgroups -> registers of a thread that tiles may take, those held as left operands included.
RESIDENT_WORDS = {1: 208, 2: 208, 3: 132}


@dataclass
class Placement:
    """Shared memory of a block: tiles first, then barriers. Barriers 0 and 1 hand over the block's next tile of the grid."""

    barriers: dict[str, int] = field(default_factory=dict)  # tile -> number of its first "full" barrier; "empty" ones follow
    barrier_offset: int = 0
    num_barriers: int = 2
    stages: int = 1  # slots of a ring
    bytes: int = 0


def why_not(u: Unit) -> str:
    """Why a program has no wgmma kernel, or ""."""
    code = u.program.code
    if u.rows % CHUNK or u.rows // CHUNK not in (1, 2, 3, 4, 6):
        return f"a block of {u.rows} rows is not 64, 128, 192, 256 or 384"
    for s in code:
        if isinstance(s, Gemm):
            return "a product stands outside the loops"
        if isinstance(s, If):
            return "a branch"
        if isinstance(s, For) and any(isinstance(x, For | If) for x in s.body):
            return "a loop or branch inside a loop"
        if isinstance(s, For) and any(isinstance(x, Copy) and x.into_level != "shared" for x in s.body):
            return "a store, or a copy to registers, inside a loop"
    if not u.gemms():
        return "no matrix product"
    return _tiles_do_not_suit(u) or next((why for g in u.gemms() if (why := _product_does_not_suit(u, g))), "")


def _tiles_do_not_suit(u: Unit) -> str:
    copies = shared_copies(u.program.code)
    if any(isinstance(x, Index) for s in copies for x in walk(u.program.allocations[s.source].shape[1])):
        return "a matrix's columns end where only the device knows"
    for s in copies:
        shape, matrix = u.shape(s.into), u.program.allocations[s.source]
        if len(shape) != 2 or shape[0] % 8 or shape[0] > MAX_ROWS or shape[1] % 8 or shape[1] > 512:
            return f"tile {s.into} {shape}: rows and columns in steps of 8, at most 256 rows"
        if len(matrix.offset) > 2:
            return f"{s.source} has more than two leading axes"
        if shape[1] % CHUNK and matrix.shape[1] != Num(shape[1]):
            return f"tile {s.into} ends inside the rows of {s.source}, at no multiple of 64"
        if len({(c.source, _is_in_loop(u, c)) for c in copies if c.into == s.into}) > 1:
            return f"tile {s.into} is copied from several places"
    return "a shared tile is read by other than products" if _read_otherwise(u, {s.into for s in copies}) else ""


def _read_otherwise(u: Unit, shared: set[str]) -> bool:
    for s in flatten(u.program.code):
        match s:
            case Compute(value=value) if names(value) & shared:
                return True
            case Copy(source_level="shared"):
                return True
            case Reshape(source=source) if source in shared:
                return True
    return False


def _product_does_not_suit(u: Unit, g: Gemm) -> str:
    a, b, c = u.shape(g.a), u.shape(g.b), u.shape(g.into)
    if not u.is_shared(g.b):
        return f"{g.b} is no shared tile"
    if g.a_transposed:
        return f"{g.a} is used transposed on the left"
    if c[1] % 8 or c[1] > 256:
        return f"{g.into}: products have 8 to 256 columns"
    contraction = b[1] if g.b_transposed else b[0]
    if (not g.b_transposed or not u.is_shared(g.a)) and contraction % 16:
        return f"{g.a} times {g.b}: a contraction of {contraction} is no multiple of 16"
    if u.is_shared(g.a) and a[0] != u.rows:
        return f"{g.a} has {a[0]} rows, the block {u.rows}"
    if not g.b_transposed and b[0] % 16:
        return f"{g.b}: rows in steps of 16"
    orders = {o for x in u.gemms() for o in _orders(x, g.b)}
    return f"{g.b} is read along rows and along columns" if len(orders) > 1 else ""


def _orders(g: Gemm, tile: str) -> set[bool]:
    """True: contracted along its rows' elements (K-major)."""
    return ({True} if g.a == tile else set()) | ({g.b_transposed} if g.b == tile else set())


def is_k_major(u: Unit, tile: str) -> bool:
    return all(o for g in u.gemms() for o in _orders(g, tile))


def _is_in_loop(u: Unit, s: Copy) -> bool:
    return all(s is not x for x in u.program.code)


def list_tiles(u: Unit) -> None:
    """Fills `u.tiles`."""
    for s in shared_copies(u.program.code):
        rows, cols = u.shape(s.into)
        stored = round_up(cols, CHUNK)
        u.tiles.setdefault(
            s.into, SharedTile(s.into, u.program.allocations[s.source], rows, cols, rows, stored, rows * stored * 2)
        )


def place(u: Unit, second_slot: set[str] | None = None) -> Placement:
    """As many ring slots as fit, at most four or as `Hint stages` says.

    second_slot: tiles from before the loops get a second slot for the next tile of the grid, but for these.
    """
    ring = [t for t in u.tiles.values() if in_ring(u, t.name)]
    slots = {t.name: 2 if second_slot is not None and t.name not in second_slot else 1 for t in u.tiles.values() if t not in ring}
    room = u.target.shared_bytes - 4096 - sum(u.tiles[n].bytes * k for n, k in slots.items())
    fit = min(MAX_STAGES, room // sum(t.bytes for t in ring)) if ring else 1
    stages = min(int(u.program.hints.get("stages", fit)), max(fit, 1))
    if second_slot is None and (stages < 1 or room < sum(t.bytes for t in ring)):
        need = sum(t.bytes for t in u.tiles.values()) + 4096
        raise Refused(
            "does_not_fit", f"shared memory: {need} bytes of {u.target.shared_bytes} on {u.target.isa}; choose smaller tiles"
        )
    out = Placement(stages=stages if fit >= 1 else 0)
    offset = 0
    for t in u.tiles.values():
        t.stages, t.offset = stages if t in ring else slots[t.name], offset
        offset += t.bytes * t.stages
        out.barriers[t.name] = out.num_barriers
        out.num_barriers += 2 * t.stages
    out.barrier_offset = offset
    out.bytes = offset + BARRIER_BYTES * (out.num_barriers + 2) + 1024  # two words besides; room to align to 1024
    return out


def in_ring(u: Unit, tile: str) -> bool:
    """Whether a tile is copied inside a loop."""
    return any(isinstance(s, For) and any(isinstance(x, Copy) and x.into == tile for x in s.body) for s in u.program.code)


def is_chunked(t: SharedTile) -> bool:
    """Whether one TMA brings all columns: they are whole chunks, of the tile and of the matrix."""
    columns = t.matrix.shape[1]
    return t.cols % CHUNK == 0 and isinstance(columns, Num) and int(columns.value) % CHUNK == 0


def tensor_map(u: Unit, t: SharedTile) -> TensorMapFacts:
    """Five axes, innermost first: columns of a chunk, rows, chunks, two leading axes; extents as expressions of scalars."""
    a = t.matrix
    lead = len(a.offset)
    extents = [largest(u, e) for e in reversed(a.offset)] + [1] * (2 - lead)
    strides: list[Any] = [*reversed(range(lead)), *({"bytes": 16} for _ in range(2 - lead))]
    rows: Any = {"shape": lead} if ends_inside(t) else plain(a.shape[0])
    columns = plain(a.shape[1])
    inner: Any
    chunks: Any
    if is_chunked(t):
        inner, chunks = CHUNK, ["//", columns, CHUNK]
        box = [CHUNK, t.rows, t.cols // CHUNK, 1, 1]
    else:
        inner, chunks = columns, 1
        box = [CHUNK, t.rows, 1, 1, 1]
    return {
        "tensor": a.name,
        "dtype": a.dtype,
        "extents": [inner, rows, chunks, *extents],
        "strides": [lead, {"bytes": 2 * CHUNK if is_chunked(t) else 16}, *strides],
        "box": box,
        "swizzle_bytes": 128,
    }


def ends_inside(t: SharedTile) -> bool:
    """Whether the matrix ends where only the device knows (`KvLen[b]`): TMA then brings what lies behind it in the tensor."""
    return any(isinstance(x, Index) for x in walk(t.matrix.shape[0]))
