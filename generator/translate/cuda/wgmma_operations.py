"""What consumers do with shared tiles: they wait for them, multiply them, free their places in the rings. Follows no schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from generator.tl.ir import Copy, Gemm, Stmt
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.epilogue import write_store
from generator.translate.cuda.grid import tile_coordinate
from generator.translate.cuda.registers import write_statement
from generator.translate.cuda.wgmma_kernel import Frame, cursor
from generator.translate.cuda.wgmma_tiles import CHUNK, ends_inside, in_ring

CLEANING = 4  # first of the named barriers of single warpgroups
PAIR = 256  # threads that meet at a named barrier: a warpgroup and the one before it


@dataclass
class Operations:
    frame: Frame
    waited: set[str] = field(default_factory=set)  # outer tiles known to be here

    def take_tile(self) -> list[str]:
        """The block's next tile of the grid into `tile`; negative: no more."""
        return [
            "mbar_wait(BAR(0), grid_ring.phase);",
            "tile = __shfl_sync(0xffffffffu, load_word(tile_word), 0);",
            "if (lane == 0) mbar_arrive(BAR(1));",
            "grid_ring.next<1>();",
        ]

    def start_next(self, first: list[Gemm]) -> None:
        """Takes the next tile of the grid and starts its first products, on whatever lies there if there is none."""
        u, w = self.frame.u, self.frame.u.w
        w(*self.take_tile(), "if (tile >= 0) {")
        read = list(dict.fromkeys(n for g in first for n in (g.a, g.b)))
        rest = [n for n in u.tiles if not in_ring(u, n) and n not in read]
        self.wait([*rest, *read], "a")
        self.hold([n for n in read if n in self.frame.resident])
        w("}")
        self.issue(first, "a")

    def statement(self, s: Stmt, setting: Setting = Setting(), lazy: bool = False) -> None:
        if isinstance(s, Copy) and s.into_level == "global":
            write_store(self.frame.u, s)
        else:
            write_statement(self.frame.u, s, setting, lazy)

    def wait(self, tiles: list[str], half: str) -> None:
        for n in tiles:
            t = self.frame.u.tiles[n]
            c = cursor(self.frame, t, half)
            self.frame.u.w(f"mbar_wait({self.frame.full(t, c)}, {c}.phase);  // {n} is here")

    def hold(self, tiles: list[str]) -> None:
        """Left operands into registers; their slots are free again."""
        u, w = self.frame.u, self.frame.u.w
        for n in tiles:
            t = u.tiles[n]
            at = f"{names.shared(n)} + {cursor(self.frame, t, 'a')}.slot * {t.bytes}"
            w(f"load_left<{t.rows}>({held(n)}, {at}, wg_row + (warp & 3) * 16 + (lane & 15), lane >> 4);")
        self.release(tiles, "a")

    def clean(self, copies: list[Copy], half: str, variable: str = "") -> None:
        """Zeros for what lies behind a matrix that ends inside its tensor. variable: a definition that coordinates need."""
        u, w = self.frame.u, self.frame.u.w
        for s in copies:
            t = u.tiles[s.into]
            if ends_inside(t):
                row, c = tile_coordinate(u, s.coordinate, 0, t.rows), cursor(self.frame, t, half)
                w("{", *([variable] if variable else []), f"const int left = {names.extent(t.matrix.name, 0)} - ({row});")
                slot = f"{names.shared(t.name)} + {c}.slot * {t.bytes}"
                call = f"zero_rows<{t.rows}, {t.stored_cols // CHUNK}>({slot}, left, threadIdx.x & 127, {CLEANING} + wg)"
                w(f"if (left < {t.rows}) {call};", "}")

    def issue(self, gemms: list[Gemm], half: str, overwrite: bool = False) -> None:
        w = self.frame.u.w
        pinned = dict.fromkeys([g.into for g in gemms] + [g.a for g in gemms if g.a not in self.frame.u.tiles])
        kept = dict.fromkeys(held(g.a) for g in gemms if g.a in self.frame.resident)
        w(*(f"pin({n});" for n in [*map(names.tile, pinned), *kept]), "wgmma_fence();")
        for g in gemms:
            self._product(g, half, overwrite)
        w("wgmma_commit();")

    def _product(self, g: Gemm, half: str, overwrite: bool) -> None:
        u, w, product = self.frame.u, self.frame.u.w, self.frame.product(g)
        b = u.tiles[g.b]
        steps = -(-(b.cols if g.b_transposed else b.rows) // 16)
        b_at = f"d_{g.b} + {cursor(self.frame, b, half)}.slot * {b.bytes // 16}"
        b_at += f" + (k / 4) * {b.rows * 8} + (k % 4) * 2" if g.b_transposed else " + k * 128"
        add = "1" if g.accumulate and not overwrite else "k > 0"
        w(u.comment(g))
        for t in range(self.frame.row_blocks):  # spelled out: a loop over them would leave the tile in local memory
            if g.a in self.frame.resident:
                a_at = f"&{held(g.a)}[{t}][4 * k]"
            elif g.a in u.tiles:
                a = u.tiles[g.a]
                a_at = f"d_{g.a} + {cursor(self.frame, a, half)}.slot * {a.bytes // 16}"
                a_at += f" + {512 * t} + (k / 4) * {a.rows * 8} + (k % 4) * 2"
            else:
                a_at = f"&{names.tile(g.a)}[{t}][4 * k]"
            w(f"UNROLL for (int k = 0; k < {steps}; ++k) {product.name}({names.tile(g.into)}[{t}], {a_at}, {b_at}, {add});")

    def turn(self, begins: bool) -> None:
        """A warpgroup's turn at the products, where warpgroups run out of phase."""
        if self.frame.pingpong and begins:
            self.frame.u.w(f"bar_sync(1 + wg, {PAIR});")
        elif self.frame.pingpong:
            self.frame.u.w(f"bar_arrive(wg == {self.frame.groups - 1} ? 1 : 2 + wg, {PAIR});")

    def retire(self, gemms: list[Gemm], still_running: int = 0) -> None:
        results = dict.fromkeys(g.into for g in gemms)
        self.frame.u.w(f"wgmma_wait<{still_running}>();", *(f"pin({names.tile(n)});" for n in results))

    def release(self, tiles: list[str], half: str, ring: str = "") -> None:
        """These tiles' slots are free again, and the place in the ring moves on."""
        for n in tiles:
            t = self.frame.u.tiles[n]
            c = f"{ring}_{n}" if ring else cursor(self.frame, t, half)
            self.frame.u.w(f"if (lane == 0) mbar_arrive({self.frame.empty(t, c)});", f"{c}.next<{t.stages}>();")

    def advance(self, tiles: list[str], half: str) -> None:
        """Tiles that the other half still has to read: only the place moves on."""
        for n in tiles:
            t = self.frame.u.tiles[n]
            self.frame.u.w(f"{cursor(self.frame, t, half)}.next<{t.stages}>();")


def held(tile: str) -> str:
    """Registers of a resident tile."""
    return f"held_{tile}"
