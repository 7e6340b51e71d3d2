"""The producer: one warp that runs the consumers' schedule with everything but the copies left out.

A copy stands where its first reader stands, so rings of any depth of one or more cannot block each other. Where a block's next
tile is started early, the last copies for second products follow its first ones: none of those waits for their readers.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Copy, For
from generator.translate.cuda import names
from generator.translate.cuda.epilogue import write_width
from generator.translate.cuda.grid import iteration, live_rows, tile_coordinate, write_decode
from generator.translate.cuda.mma_tiles import ends_with_a_chunk
from generator.translate.cuda.parameters import write_addresses, write_extents
from generator.translate.cuda.tile_order import loads_of
from generator.translate.cuda.unit import SharedTile
from generator.translate.cuda.wgmma_kernel import Frame, forced, write_count
from generator.translate.cuda.wgmma_tiles import CHUNK, is_chunked
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import uses

COPY_BARRIER = 15  # the named barrier at which the producer's threads meet; consumers have those from 1 on


@dataclass
class Producer:
    frame: Frame

    def write(self) -> None:
        u, w, frame = self.frame.u, self.frame.u.w, self.frame
        if frame.registers:
            w(f"registers_less<{frame.registers[0]}>();")
        w(*self.who())
        w("Ring grid_ring{0, 1};", *(f"Ring r_{t.name}{{0, 1}};" for t in u.tiles.values()))
        self._starts()
        if frame.ahead:
            w("bool late = false;", *(f"int late_{t.name}[4];" for t in self._late_tiles()))
        w("for (int tile = blockIdx.x;;) {", f"{self.hands_over()}mbar_wait(BAR(1), grid_ring.phase);")
        w(
            "if (leads) {",
            "store_word(tile_word, tile < p.q_total ? tile : -1);",
            "mbar_arrive(BAR(0));",
            "}",
            "grid_ring.next<1>();",
        )
        w("if (tile >= p.q_total) break;")
        if frame.static_order:
            w("const int following = tile + (int)gridDim.x;")
        else:  # the counter's answer is waited for at the tile's end
            w("int following = 0;", "if (leads) following = take_tile(p.counter);")
        write_decode(u, "block_of(p, tile)", False)
        self._captured()
        w(f"const int live = {live_rows(u)};")
        self._loads()
        self._loops()
        w("tile = following;" if frame.static_order else "tile = __shfl_sync(0xffffffffu, following, 0);", "}")
        if frame.ahead:
            self._load_late()
        if not frame.static_order:
            w("if (leads) leave_queue(p.counter);")
        w("}")

    def who(self) -> tuple[str, str]:
        """C: which threads of the warpgroup follow the loops, and the one that starts copies and tells of them."""
        return "if (warp == 0) {", "const bool leads = lane == 0;  // this lane starts the copies; all follow the loops"

    def hands_over(self) -> str:
        """C: a condition on those that wait until consumers have taken the block's last tile of the grid."""
        return ""

    def _captured(self) -> None:
        """What ranges and coordinates may read besides scalars."""
        u = self.frame.u
        tiled = {t.matrix.name for t in u.tiles.values()} | set(u.program.outputs)
        captured = [a for a in u.matrices if a.name not in tiled]
        write_addresses(u, captured)
        write_extents(u, captured)

    def _starts(self) -> None:
        """One function a tile: waits for a free slot, starts the copy from (row, column or chunk of columns, inner, outer)."""
        u, w = self.frame.u, self.frame.u.w
        for t in u.tiles.values():
            ring, full = f"r_{t.name}", self.frame.full(t, f"r_{t.name}")
            w(f"auto start_{t.name} = [&](int row, int column, int inner, int outer) {{")
            w(f"mbar_wait({self.frame.empty(t, ring)}, {ring}.phase);", "if (leads) {", f"mbar_expect({full}, {t.bytes});")
            to = f"{names.shared(t.name)} + {ring}.slot * {t.bytes}"
            if is_chunked(t):
                w(f"tma_tile({to}, &p.map_{t.name}, {full}, 0, row, column, inner, outer);")
            else:
                for c in range(t.stored_cols // CHUNK):
                    at = f"{to} + {c * t.rows * 128}"
                    w(f"tma_tile({at}, &p.map_{t.name}, {full}, column + {c * CHUNK}, row, 0, inner, outer);")
            w("}", f"{ring}.next<{t.stages}>();", "};")

    def _loads(self) -> None:
        """One function a copy: its coordinates in this tile of the grid."""
        u, w = self.frame.u, self.frame.u.w
        for t in u.tiles.values():
            offsets = [u.scalar(e) for e in reversed(t.matrix.offset)] + ["0"] * (2 - len(t.matrix.offset))
            w(f"const int inner_{t.name} = opaque({offsets[0]}), outer_{t.name} = opaque({offsets[1]});")
        self._load_functions()

    def _load_functions(self) -> None:
        u, w = self.frame.u, self.frame.u.w
        for s, loop in self._copies():
            w(u.comment(s), f"auto {self._name(s, loop)} = [&]({f'int {names.loop_variable(loop.var)}' if loop else ''}) {{")
            w(f"start_{s.into}({', '.join(self._coordinates(s))});", "};")

    def _coordinates(self, s: Copy) -> tuple[str, ...]:
        u, t = self.frame.u, self.frame.u.tiles[s.into]
        row = tile_coordinate(u, s.coordinate, 0, t.rows)
        column = tile_coordinate(u, s.coordinate, 1, t.cols // CHUNK if is_chunked(t) else t.cols)
        return row, column, f"inner_{t.name}", f"outer_{t.name}"

    def _late_tiles(self) -> list[SharedTile]:
        """Tiles that second products read first: the last of each waits until the next tile of the grid has its first ones."""
        plan = self.frame.u.analysis.loops[0]
        return [self.frame.u.tiles[s.into] for s in self._groups(plan)[1]]

    def _load_late(self) -> None:
        arguments = [(t.name, ", ".join(f"late_{t.name}[{i}]" for i in range(4))) for t in self._late_tiles()]
        self.frame.u.w("if (late) {", *(f"start_{n}({a});" for n, a in arguments), "}")

    def _copies(self) -> list[tuple[Copy, For | None]]:
        """Every tile's copy once for each loop that makes it, those before the loops first."""
        u = self.frame.u
        out: list[tuple[Copy, For | None]] = [(s, None) for s in loads_of(u.program.code)]
        for plan in u.analysis.loops:
            out += [(s, plan.loop) for s in loads_of(plan.loop.body)]
        return out

    def _name(self, s: Copy, loop: For | None) -> str:
        plans = [p.loop for p in self.frame.u.analysis.loops]
        return f"load_{s.into}" + (str(next(i for i, x in enumerate(plans) if x is loop)) if loop is not None else "")

    def _loops(self) -> None:
        w = self.frame.u.w
        outer = [f"{self._name(s, None)}();" for s in loads_of(self.frame.u.program.code)]
        for k, plan in enumerate(self.frame.u.analysis.loops):
            w(self.frame.u.comment(plan.loop), "{")
            write_count(self.frame, plan, k)
            if plan.schedule.kind == "rotated":
                self._rotated(plan, k, outer)
            else:
                w(*outer)
                self._each(plan, k, 0, [(s, "it") for s in loads_of(plan.loop.body)])
            outer = []
            w("}")

    def _groups(self, plan: LoopPlan) -> tuple[list[Copy], list[Copy]]:
        """A loop's copies: those that the first products read, and the others."""
        body = plan.loop.body
        read_first = {n for i in plan.schedule.first for n in uses(body[i])}
        loads = loads_of(body)
        return [s for s in loads if s.into in read_first], [s for s in loads if s.into not in read_first]

    def _rotated(self, plan: LoopPlan, k: int, outer: list[str]) -> None:
        """First readers of the second products' tiles are one iteration behind those of the first."""
        w, (a, c) = self.frame.u.w, self._groups(plan)
        guard = "" if forced(plan) else f"if (count{k} > 0) "
        for s in a:
            w(f"{guard}{self._call(s, plan, k, '0')}")
        if self.frame.ahead:
            self._load_late()
        w(*outer)
        self._each(plan, k, 1, [(s, "it") for s in a] + [(s, "it - 1") for s in c])
        last = f"count{k} - 1"
        if not self.frame.ahead:
            w(*(f"{guard}{self._call(s, plan, k, last)}" for s in c))
            return
        w("late = true;", f"const int {names.loop_variable(plan.loop.var)} = {iteration(plan, k, last)};")
        for s in c:
            w(*(f"late_{s.into}[{i}] = {x};" for i, x in enumerate(self._coordinates(s))))

    def _each(self, plan: LoopPlan, k: int, start: int, calls: list[tuple[Copy, str]]) -> None:
        w = self.frame.u.w
        w("#pragma unroll 1", f"for (int it = {start}; it < count{k}; ++it) {{")
        w(*(self._call(s, plan, k, n) for s, n in calls), "}")

    def _call(self, s: Copy, plan: LoopPlan, k: int, n: str) -> str:
        return f"{self._name(s, plan.loop)}({iteration(plan, k, n)});"


@dataclass
class NarrowProducer(Producer):
    """The whole warpgroup copies: TMA takes only rows at multiples of 16 bytes. A tile is there before the next is begun."""

    def who(self) -> tuple[str, str]:
        return "{", "const bool leads = threadIdx.x == 0;  // this thread tells of copies; all make them"

    def hands_over(self) -> str:
        """Only the warp that tells of the next tile: another that came late would find the barrier a phase further on."""
        return "if (warp == 0) "

    def _captured(self) -> None:
        u, outputs = self.frame.u, set(self.frame.u.program.outputs)
        tiled = {t.matrix.name: t.matrix for t in u.tiles.values()}
        matrices = [a for a in u.matrices if a.name in tiled or a.name not in outputs]
        write_addresses(u, matrices)
        write_extents(u, matrices)
        for a in tiled.values():
            write_width(u, a)

    def _starts(self) -> None:
        """What copies read is known once the tile of the grid is: see `_loads`."""

    def _loads(self) -> None:
        u, w = self.frame.u, self.frame.u.w
        for t in u.tiles.values():
            a, ring = t.matrix, f"r_{t.name}"
            to = f"{names.shared(t.name)} + {ring}.slot * {t.bytes}"
            place = f"{names.lead(a.name)}, 2 * {names.stride(a.name, len(a.offset))}, row, column"
            extents = f"{names.extent(a.name, 0)}, {names.extent(a.name, 1)}"
            shape = f"{t.rows}, {t.stored_cols}, {ends_with_a_chunk(t)}"
            w(
                f"auto start_{t.name} = [&](int row, int column) {{",
                f"mbar_wait({self.frame.empty(t, ring)}, {ring}.phase);",
                f"copy_tile<{shape}>({to}, {names.width(a.name)}, {place}, {extents}, {COPY_BARRIER});",
                f"if (leads) mbar_arrive({self.frame.full(t, ring)});",
                f"{ring}.next<{t.stages}>();",
                "};",
            )
        self._load_functions()

    def _coordinates(self, s: Copy) -> tuple[str, ...]:
        u, t = self.frame.u, self.frame.u.tiles[s.into]
        return tile_coordinate(u, s.coordinate, 0, t.rows), tile_coordinate(u, s.coordinate, 1, t.cols)
