"""The consumers: warpgroups that multiply with wgmma, each 64 rows (or twice 64) of every tile, in the schedule of the passes."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Copy, For, Gemm, Stmt
from generator.translate.cuda import names
from generator.translate.cuda.epilogue import write_alignment
from generator.translate.cuda.grid import live_rows, write_decode
from generator.translate.cuda.parameters import write_addresses, write_extents
from generator.translate.cuda.registers import write_declarations, write_initial
from generator.translate.cuda.tile_order import loads_of
from generator.translate.cuda.wgmma_kernel import cursor
from generator.translate.cuda.wgmma_loop import COLUMN_UNIT, Loop
from generator.translate.cuda.wgmma_operations import PAIR, Operations, held
from generator.translate.cuda.wgmma_rotated import RotatedLoop
from generator.translate.cuda.wgmma_straight import PlainLoop, StreamLoop
from generator.translate.cuda.wgmma_tiles import ends_inside, in_ring, is_k_major
from generator.translate.passes.scope import uses_of

#: Kind of schedule (`passes.schedule`) -> what writes such a loop.
LOOPS: dict[str, type[Loop]] = {"rotated": RotatedLoop, "stream": StreamLoop, "plain": PlainLoop}


@dataclass
class Consumer(Operations):
    """The role as a whole, and a tile of the grid."""

    def write(self) -> None:
        u, w, frame = self.frame.u, self.frame.u.w, self.frame
        if frame.registers:
            w(f"registers_more<{frame.registers[1]}>();")
        w("const int wg = role - 1, lane_col = 2 * (lane & 3);")
        w(f"const int wg_row = wg * {64 * frame.row_blocks}, row0 = wg_row + (warp & 3) * 16 + (lane >> 2);")
        self._descriptors()
        w("Ring grid_ring{0, 0};")
        if frame.pingpong:
            w(f"if (wg == {frame.groups - 1}) bar_arrive(1, {PAIR});  // warpgroup 0 goes first")
        write_declarations(u, COLUMN_UNIT)
        for n in sorted(frame.resident):
            w(f"u32 {held(n)}[MT][{u.tiles[n].stored_cols // 4}];")
        if frame.ahead:
            self._tiles_ahead()
        else:
            w("for (;;) {", "int tile;", *self.take_tile(), "if (tile < 0) break;")
            self._tile()
            w("}")
        if frame.pingpong:
            w(f"if (wg == 0) bar_sync(1, {PAIR});  // takes the one arrival that is left over")

    def _tiles_ahead(self) -> None:
        """Tiles of the grid whose first products were started at the end of the tile before; the last ones are in vain."""
        u, w, plan = self.frame.u, self.frame.u.w, self.frame.u.analysis.loops[0]
        first = [s for i in plan.schedule.first if isinstance(s := plan.loop.body[i], Gemm)]
        self.waited |= {n for n in u.tiles if not in_ring(u, n)}
        w("int tile;")
        self.start_next(first)
        w("while (tile >= 0) {")
        self._tile()
        w("}", "wgmma_wait<0>();")

    def _descriptors(self) -> None:
        u, w = self.frame.u, self.frame.u.w
        streams = {n for p in u.analysis.loops if p.schedule.kind == "stream" for n in uses_of(p.loop.body)}
        for t in u.tiles.values():
            rows = " + wg_row * 128" if any(g.a == t.name for g in u.gemms()) else ""
            chunk = ", 16, 1024)" if is_k_major(u, t.name) else f", {t.rows * 128}, 1024)"
            w(f"const u64 d_{t.name} = descriptor({names.shared(t.name)}{rows}{chunk};")
            for c in dict.fromkeys(cursor(self.frame, t, half) for half in "ac"):
                w(f"Ring {c}{{0, 0}};")
            if t.name in streams and in_ring(u, t.name):
                w(f"Ring f_{t.name}{{0, 0}};  // the slot to free next")

    def _tile(self) -> None:
        """One tile of the grid."""
        u, code = self.frame.u, self.frame.u.program.code
        delayed = self._delayed()
        self._scope_begin("tile")
        write_initial(u, COLUMN_UNIT, {a.name for a in u.program.allocations.values() if a.init is not None} - delayed)
        rest, k, loads = list(code), 0, loads_of(code)
        while rest:
            s = rest.pop(0)
            match s:
                case Copy(into_level="shared"):
                    pass
                case For():
                    last = not any(isinstance(x, For) for x in rest)
                    tail, rest = (rest, []) if last else (_straight(rest), rest[len(_straight(rest)) :])
                    plan, after = u.analysis.loops[k], [x for x in tail if x not in loads]
                    LOOPS[plan.schedule.kind](self, plan, k, after, delayed if k == 0 else set()).write()
                    k += 1
                case _:
                    self.statement(s)
        u.w("}")

    def _delayed(self) -> set[str]:
        """Tiles that get their initial value under the first products, since nothing before the first loop needs it."""
        u = self.frame.u
        before: list[Stmt] = []
        for s in u.program.code:
            if isinstance(s, For):
                return set(u.analysis.loops[0].carried) & {a.name for a in u.program.allocations.values() if a.init} - uses_of(
                    before
                )
            before.append(s)
        return set()

    def _scope_begin(self, tile: str) -> None:
        """Coordinates, addresses and extents of the tile of the grid."""
        u, w = self.frame.u, self.frame.u.w
        w("{")
        write_decode(u, f"block_of(p, {tile})", False)
        tiled = {t.matrix.name for t in u.tiles.values()} - set(u.program.outputs)
        addressed = [a for a in u.matrices if a.name not in tiled]
        write_addresses(u, addressed)
        write_extents(u, addressed + [t.matrix for t in u.tiles.values() if ends_inside(t) and t.matrix not in addressed])
        write_alignment(u, [a for a in addressed if a.name in u.program.outputs])
        w(f"const int live = {live_rows(u)};")


def _straight(code: list[Stmt]) -> list[Stmt]:
    """The statements up to the next loop."""
    out: list[Stmt] = []
    for s in code:
        if isinstance(s, For):
            break
        out.append(s)
    return out
