"""Shared tiles of the mma.sync targets: where they lie, how they come from global memory, how products read them."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Compute, Copy, For, Gemm, If, Num, Stmt, names, walk_statements
from generator.translate.cuda import names as mangle
from generator.translate.cuda.dtypes import BYTES, TYPES
from generator.translate.cuda.grid import tile_coordinate
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.unit import SharedTile, Unit, round_up
from generator.translate.passes.scope import uses

COLUMN_UNIT = 16  # columns of register tiles are padded to the width of two products


@dataclass(frozen=True, slots=True)
class Point:
    """A statement of a loop's body before which copied tiles have to have landed, and the copies it is the first to read."""

    at: int
    copies: tuple[Copy, ...]


def shared_copies(body: tuple[Stmt, ...]) -> list[Copy]:
    return [s for s in walk_statements(body) if isinstance(s, Copy) and s.source_level == "global" and s.into_level == "shared"]


def place(u: Unit, stages: dict[str, int]) -> int:
    """Fills `u.tiles`; returns the bytes of shared memory. Rows are whole 16 byte chunks."""
    offset = 0
    for s in shared_copies(u.program.code):
        if s.into in u.tiles:
            continue
        rows, cols = _shape(u, s)
        matrix = u.program.allocations[s.source]
        if BYTES[matrix.dtype] != 2:
            message = f"{s.into}: shared tiles hold f16 or bf16, found {matrix.dtype}; index the matrix, or copy it to registers"
            raise Refused("translate_failed", message, s.span.line)
        if cols % 8:
            raise Refused(
                "translate_failed", f"{s.into}: rows of a shared tile come in steps of 8 elements, found {cols}", s.span.line
            )
        stored_rows, stored_cols = round_up(rows, 16), round_up(cols, 16)
        size = slot_bytes(u, s)
        tile = SharedTile(s.into, matrix, rows, cols, stored_rows, stored_cols, size, stages.get(s.into, 1), offset)
        u.tiles[s.into] = tile
        u.code.shared[s.into] = f"shared_element<{TYPES[matrix.dtype]}, {stored_cols}>({{slot_{s.into}}}, {{r}}, {{c}})"
        offset += size * tile.stages
    if offset > u.target.shared_bytes:
        raise Refused(
            "does_not_fit",
            f"shared memory: {offset} bytes of {u.target.shared_bytes} on {u.target.isa}; choose smaller tiles or fewer stages",
        )
    return offset


def slot_bytes(u: Unit, s: Copy) -> int:
    """Bytes of one slot of a copied tile."""
    rows, cols = _shape(u, s)
    return round_up(round_up(rows, 16) * pitch(round_up(cols, 16)), 128)


def pitch(stored_cols: int) -> int:
    """Bytes from row to row (`Shared<COLS>::PITCH` of the runtime)."""
    return stored_cols * 2 if stored_cols % 64 == 0 else (stored_cols // 8 | 1) * 16


def _shape(u: Unit, s: Copy) -> tuple[int, int]:
    shape = u.shape(s.into)
    if len(shape) != 2:
        raise Refused(
            "translate_failed",
            f"{s.into}: a shared tile has two axes, found {len(shape)}; copy a vector to registers",
            s.span.line,
        )
    return shape[0], shape[1]


def points(u: Unit, loop: For) -> list[Point] | None:
    """The places of a loop's body that wait for copies, in order; None where copies cannot run ahead of the code."""
    if any(isinstance(s, For | If) for s in loop.body):
        return None
    copies = {s.into: s for s in loop.body if isinstance(s, Copy) and s.into_level == "shared"}
    if len(copies) != len(shared_copies(loop.body)) or not copies:
        return None
    out, seen = [], set()
    for i, s in enumerate(loop.body):
        if isinstance(s, Copy) and s.into in copies and copies[s.into] is s:
            if s.into in seen:  # read before it is copied: the tile of the iteration before
                return None
            continue
        fresh = [x for x in copies if x in uses(s) and x not in seen and not isinstance(s, Copy)]
        if fresh:
            if any(loop.body.index(copies[x]) > i for x in fresh):
                return None
            seen |= set(fresh)
            out.append(Point(i, tuple(copies[x] for x in fresh)))
    return out if seen == set(copies) else None


def fetch_call(u: Unit, s: Copy, to: str) -> str:
    """C: starts a tile's copy by cp.async."""
    return f"fetch{'_narrow' if u.narrow else ''}<{_template(u, s)}>({to}, {fetch_arguments(u, s)});"


def staged_type(u: Unit, s: Copy) -> str:
    """C: the registers in which a tile's copy is on its way, where there is no cp.async."""
    return f"Staged{'Narrow' if u.narrow else ''}<{_template(u, s)}>"


def _template(u: Unit, s: Copy) -> str:
    t = u.tiles[s.into]
    whole = f", {ends_with_a_chunk(t)}" if u.narrow else ""
    return f"{t.rows}, {t.cols}, {t.stored_rows}, {t.stored_cols}, THREADS{whole}"


def ends_with_a_chunk(t: SharedTile) -> str:
    """C: whether rows of a tile's matrix are known to be whole chunks of eight elements."""
    columns = t.matrix.shape[1]
    return str(isinstance(columns, Num) and int(columns.value) % 8 == 0).lower()


def fetch_arguments(u: Unit, s: Copy) -> str:
    """C: where a tile comes from, as the copies of the runtime want it."""
    t = u.tiles[s.into]
    a = t.matrix
    row, col = (tile_coordinate(u, s.coordinate, k, size) for k, size in ((0, t.rows), (1, t.cols)))
    pitch_bytes = f"2 * {mangle.stride(a.name, len(a.offset))}"
    width = f"{mangle.width(a.name)}, " if u.narrow else ""
    return f"{width}{mangle.lead(a.name)}, {pitch_bytes}, {row}, {col}, {mangle.extent(a.name, 0)}, {mangle.extent(a.name, 1)}"


def slot(t: SharedTile, iteration: str) -> str:
    """The address of the slot that an iteration's tile lies in."""
    return mangle.shared(t.name) if t.stages == 1 else f"{mangle.shared(t.name)} + ({iteration}) % {t.stages} * {t.bytes}"


def reads_shared(u: Unit, s: Stmt) -> list[str]:
    """Shared tiles that a statement reads element by element."""
    return [n for n in sorted(names(s.value)) if n in u.tiles] if isinstance(s, Compute) else []


def contraction(u: Unit, g: Gemm) -> int:
    """The padded length of a product's contraction."""
    if g.a in u.tiles:
        t = u.tiles[g.a]
        return t.stored_rows if g.a_transposed else t.stored_cols
    return u.shape(g.a)[1]
