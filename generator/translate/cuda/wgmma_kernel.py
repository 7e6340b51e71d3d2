"""Kernels on wgmma (sm_90a): a producer warp that fills rings of tiles by TMA, consumer warpgroups, a persistent grid.

This file: the block's frame. `wgmma_producer` writes the producer, `wgmma_consumer` the consumers; both follow the schedule of
the passes, so that tiles arrive in the order in which they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from generator.tl.ir import Gemm
from generator.translate.cuda.grid import longest_first, scans_rows, write_range
from generator.translate.cuda.launch import blocks
from generator.translate.cuda.parameters import Parameters, add_program
from generator.translate.cuda.tile_order import add_order, moves_with_first_axis, outer_blocks, section_bytes, section_in_l2
from generator.translate.cuda.unit import SharedTile, Unit
from generator.translate.cuda.wgmma_instructions import Product
from generator.translate.cuda.wgmma_tiles import (
    REGISTERS,
    RESIDENT_WORDS,
    WIDE,
    WIDE_WORDS,
    Placement,
    ends_inside,
    in_ring,
    list_tiles,
    place,
    tensor_map,
)
from generator.translate.facts import Formula, TensorMapFacts, Workspace
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import defs, uses


@dataclass
class Frame:
    """What producer and consumers share: tiles, barriers, how rows are dealt out."""

    u: Unit
    groups: int  # consumer warpgroups
    row_blocks: int  # of 64 rows, for each
    placement: Placement
    pingpong: bool
    ahead: bool = False  # a tile's first products are started under the end of the tile before
    resident: set[str] = field(default_factory=set)  # tiles from before the loops that stay in registers as left operands
    two_ends: set[str] = field(default_factory=set)  # tiles read by both halves of a rotated loop: two places in their ring

    @staticmethod
    def of(u: Unit) -> Frame:
        blocks_of_64 = u.rows // 64
        row_blocks = 1 if blocks_of_64 <= 3 else 2
        groups = blocks_of_64 // row_blocks
        list_tiles(u)
        resident = resident_tiles(u, groups, row_blocks)
        ahead, placement = starts_ahead(u), place(u)
        if ahead and (two := place(u, second_slot=resident)).stages >= min(2, placement.stages):
            placement = two
        else:
            ahead, placement = False, place(u)
        frame = Frame(u, groups, row_blocks, placement, False, ahead, resident)
        works = any(p.schedule.kind != "stream" for p in u.analysis.loops)
        frame.pingpong = works and groups > 1 and u.program.hints.get("pingpong") != "off"
        for plan in u.analysis.loops:
            if plan.schedule.kind == "rotated":
                body = plan.loop.body
                first = {n for i in plan.schedule.first for n in uses(body[i])}
                frame.two_ends |= first & {n for i in plan.schedule.second for n in uses(body[i])} & set(u.tiles)
        return frame

    @property
    def block_type(self) -> str:
        """C: the type of the kernel's parameter."""
        return "ParamsUnaligned" if self.u.narrow else "Params"

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> tuple[int, int] | None:
        words = tile_words(self.u, self.row_blocks) + sum(self.u.tiles[n].stored_cols // 4 for n in self.resident)
        return WIDE if self.groups == 2 and words > WIDE_WORDS else REGISTERS[self.groups]

    @property
    def static_order(self) -> bool:
        """Tiles of the grid dealt out by number (`Hint order = static`) rather than taken from a counter."""
        return self.u.program.hints.get("order") == "static"

    def full(self, t: SharedTile, cursor: str) -> str:
        return f"BAR({self.placement.barriers[t.name]} + {cursor}.slot)"

    def empty(self, t: SharedTile, cursor: str) -> str:
        return f"BAR({self.placement.barriers[t.name] + t.stages} + {cursor}.slot)"

    def products(self) -> set[Product]:
        return {self.product(g) for g in self.u.gemms()}

    def product(self, g: Gemm) -> Product:
        b = self.u.tiles[g.b]
        kind = "ss" if g.a in self.u.tiles and g.a not in self.resident else "rs"
        return Product(kind, self.u.shape(g.into)[1], g.b_transposed, b.matrix.dtype)

    def parameters(self) -> Parameters:
        u, out = self.u, Parameters()
        for i, t in enumerate([] if u.narrow else u.tiles.values()):
            out.add(f"TensorMap map_{t.name}", "tensor_map", map=i)
        if not self.static_order:
            out.add("int* counter", "pointer", workspace=True)
        tiled = set() if u.narrow else {t.matrix.name for t in u.tiles.values()}
        add_program(out, u, [a for a in u.matrices if a.name not in tiled or a.name in u.program.outputs])
        add_order(out, u, self._section())
        return out

    def _section(self) -> Any:
        """How many outer indices are taken together: as keep the looped-over tensors in L2 where blocks differ in length; a
        square patch where both axes move the tiles; else one.
        """
        u = self.u
        if longest_first(u):
            return section_in_l2(u, section_bytes(u.target.name))
        fit = 1
        if moves_with_first_axis(u):
            widest = max(u.shape(n)[1] for n in u.register_tiles() if len(u.shape(n)) == 2)
            fit = max(1, round((132 * u.rows / widest) ** 0.5))
        return ["max", 1, ["min", outer_blocks(u), fit]]

    def grid(self) -> list[Formula]:
        """No more blocks than multiprocessors: each takes tiles until none are left."""
        return [["min", blocks(self.u), "$sms"], 1, 1]

    def tensor_maps(self) -> list[TensorMapFacts]:
        return [tensor_map(self.u, t) for t in self.u.tiles.values()]

    def workspace(self) -> Workspace | None:
        """The queue of tiles: a counter of those taken, one of the blocks that have left."""
        return None if self.static_order else {"bytes": 8, "zeroed": True, "exclusive": True}


def write_barriers(frame: Frame) -> None:
    """Initial counts: full barriers wait for one arrival and the bytes of a tile, empty ones for every consumer warp."""
    w, warps = frame.u.w, 4 * frame.groups
    w("if (threadIdx.x == 0) {", "mbar_init(BAR(0), 1);", f"mbar_init(BAR(1), {warps});")
    for t in frame.u.tiles.values():
        first = frame.placement.barriers[t.name]
        w(f"for (int s = 0; s < {t.stages}; ++s) {{", f"mbar_init(BAR({first} + s), 1);")
        w(f"mbar_init(BAR({first + t.stages} + s), {warps});", "}")
    w("fence_barrier_init();", "}", "__syncthreads();")


def cursor(frame: Frame, t: SharedTile, half: str) -> str:
    """A consumer's place in a ring. Readers in the two halves of a rotated loop are one iteration apart: each has its own."""
    return f"c_{t.name}" + (f"_{half}" if t.stages > 1 and t.name in frame.two_ends else "")


def write_count(frame: Frame, plan: LoopPlan, k: int, uniform: bool = False) -> None:
    """`range`, `count` and, for a rotated loop, `none`: with nothing to see, one masked tile is run, which changes nothing.

    uniform: the count in a uniform register. Where ptxas cannot see that a loop's bounds are the same in a warp, it keeps what
    the loop counts in vector registers, a move to a uniform register before every product.
    """
    u, count = frame.u, f"range{k}.count()"
    write_range(u, plan, f"range{k}", "0", "live - 1")
    if forced(plan):
        u.w(f"const bool none{k} = range{k}.count() == 0;  // then one masked tile is run, which changes nothing")
        count = f"none{k} ? 1 : {count}"
    u.w(f"const int count{k} = {f'uniform({count})' if uniform else count};")


def tile_words(u: Unit, row_blocks: int) -> int:
    """Registers of a thread that tiles and operands take, those that share another's place apart."""
    tiles = [n for n in u.register_tiles() if len(u.shape(n)) == 2 and n not in u.analysis.storage]
    return row_blocks * (sum(u.shape(n)[1] // 2 for n in tiles) + sum(u.shape(n)[1] // 4 for n in u.operands()))


def resident_tiles(u: Unit, groups: int, row_blocks: int) -> set[str]:
    """Tiles that stay in registers: copied before the loops, read as left operands only, with room (or `Hint resident = on`).

    Products then read half as many shared operands.
    """
    right, hint = {g.b for g in u.gemms()}, u.program.hints.get("resident")
    able = {n for n, t in u.tiles.items() if not in_ring(u, n) and n not in right and not ends_inside(t)}
    words = tile_words(u, row_blocks) + row_blocks * sum(u.tiles[n].stored_cols // 4 for n in able)
    return able if hint == "on" or (hint != "off" and words <= RESIDENT_WORDS[groups]) else set()


def starts_ahead(u: Unit) -> bool:
    """Whether the first products of a tile of the grid can be started before the tile before is stored.

    They need no coordinates then, and nothing behind the loop touches their results' registers. `Hint ahead = off` forbids it.
    Where the producer has to read a tile's rows to know its range, tiles would be there too late.
    """
    if u.program.hints.get("ahead") == "off" or len(u.analysis.loops) != 1 or not forced(u.analysis.loops[0]):
        return False
    if scans_rows(u.analysis.loops[0].range) and u.program.hints.get("ahead") != "on":
        return False
    plan, storage = u.analysis.loops[0], u.analysis.storage
    first = [s for i in plan.schedule.first if isinstance(s := plan.loop.body[i], Gemm)]
    results = {storage.get(g.into, g.into) for g in first}
    around = {storage.get(n, n) for s in u.program.code if s is not plan.loop for n in uses(s) | defs(s)}
    read = {n for g in first for n in (g.a, g.b)}
    given = {a.name for a in u.program.allocations.values() if a.init is not None}
    return (
        read <= set(u.tiles)
        and not results & (around | given)
        and not any(g.accumulate for g in first)
        and not any(ends_inside(u.tiles[n]) for n in read)
    )


def forced(plan: LoopPlan) -> bool:
    """Whether the loop runs at least one tile, so that it needs no code for none."""
    return plan.schedule.kind == "rotated" and plan.covered
