"""The consumers: warpgroups that multiply with wgmma, each 64 rows (or twice 64) of every tile, in the schedule of the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from generator.tl.ir import Compute, Copy, Expr, For, Gemm, Num, Op, Stmt, Var, walk
from generator.translate.cuda import names
from generator.translate.cuda.elementwise import Setting
from generator.translate.cuda.epilogue import write_alignment, write_store
from generator.translate.cuda.grid import has_edges, live_rows, tile_coordinate, write_decode, write_full
from generator.translate.cuda.mma_kernel import iteration
from generator.translate.cuda.parameters import write_addresses, write_extents
from generator.translate.cuda.registers import write_declarations, write_initial, write_statement
from generator.translate.cuda.wgmma_kernel import Frame, cursor, forced, write_count
from generator.translate.cuda.wgmma_tiles import CHUNK, ends_inside, in_ring, is_k_major, loads_of
from generator.translate.passes import LoopPlan
from generator.translate.passes.conditions import conjuncts
from generator.translate.passes.scope import defs, uses, uses_of

COLUMN_UNIT = 8
CLEANING = 4  # first of the named barriers of single warpgroups
PAIR = 256  # threads that meet at a named barrier: a warpgroup and the one before it


@dataclass
class Consumer:
    frame: Frame
    waited: set[str] = field(default_factory=set)  # outer tiles known to be here

    # -------------------------------------------------------------------------------------------------- the frame

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
        w(
            "for (;;) {",
            "mbar_wait(BAR(0), grid_ring.phase);",
            "const int tile = __shfl_sync(0xffffffffu, load_word(tile_word), 0);",
        )
        w("if (lane == 0) mbar_arrive(BAR(1));", "grid_ring.next<1>();", "if (tile < 0) break;")
        self._tile()
        w("}")
        if frame.pingpong:
            w(f"if (wg == 0) bar_sync(1, {PAIR});  // takes the one arrival that is left over")

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
        rest, k = list(code), 0
        while rest:
            s = rest.pop(0)
            match s:
                case Copy(into_level="shared"):
                    pass
                case For():
                    last = not any(isinstance(x, For) for x in rest)
                    tail, rest = (rest, []) if last else (_straight(rest), rest[len(_straight(rest)) :])
                    _Loop(
                        self, u.analysis.loops[k], k, [x for x in tail if not _is_load(x)], delayed if k == 0 else set(), last
                    ).write()
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

    def statement(self, s: Stmt, setting: Setting = Setting(), lazy: bool = False) -> None:
        if isinstance(s, Copy) and s.into_level == "global":
            write_store(self.frame.u, s)
        else:
            write_statement(self.frame.u, s, setting, lazy)

    # --------------------------------------------------------------------------------------- products and their tiles

    def wait(self, tiles: list[str], half: str) -> None:
        for n in tiles:
            t = self.frame.u.tiles[n]
            c = cursor(self.frame, t, half)
            self.frame.u.w(f"mbar_wait({self.frame.full(t, c)}, {c}.phase);  // {n} is here")

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
        w(*(f"pin({names.tile(n)});" for n in pinned), "wgmma_fence();")
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
            if g.a in u.tiles:
                a = u.tiles[g.a]
                a_at = f"d_{g.a} + {cursor(self.frame, a, half)}.slot * {a.bytes // 16}"
                a_at += f" + {512 * t} + (k / 4) * {a.rows * 8} + (k % 4) * 2"
            else:
                a_at = f"&{names.tile(g.a)}[{t}][4 * k]"
            w(f"UNROLL for (int k = 0; k < {steps}; ++k) {product.name}({names.tile(g.into)}[{t}], {a_at}, {b_at}, {add});")

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


def _is_load(s: Stmt) -> bool:
    return isinstance(s, Copy) and s.into_level == "shared"


def _straight(code: list[Stmt]) -> list[Stmt]:
    """The statements up to the next loop."""
    out: list[Stmt] = []
    for s in code:
        if isinstance(s, For):
            break
        out.append(s)
    return out


# -------------------------------------------------------------------------------------------------------------- a loop


@dataclass
class _Loop:
    """One loop with what follows it up to the next: some of that runs under the loop's last products."""

    consumer: Consumer
    plan: LoopPlan
    k: int
    tail: list[Stmt]
    initial: set[str]  # tiles to give their initial value here
    last: bool

    def __post_init__(self) -> None:
        body = self.plan.loop.body
        self.frame = self.consumer.frame
        self.u, self.w = self.frame.u, self.frame.u.w
        self.copied = [s.into for s in loads_of(body)]
        self.first = [s for i in self.plan.schedule.first if isinstance(s := body[i], Gemm)]
        self.second = [s for i in self.plan.schedule.second if isinstance(s := body[i], Gemm)]
        self.deferred = frozenset(self.plan.schedule.deferred)

    def write(self) -> None:
        self.w("", self.u.comment(self.plan.loop), "{")
        write_count(self.frame, self.plan, self.k)
        self._split()
        self._wait_outer()
        match self.plan.schedule.kind:
            case "rotated":
                self._rotated()
            case "stream":
                self._stream()
            case "plain":
                self._plain()
        self.w("}")

    # ------------------------------------------------------------------------------------------ tiles from outside

    def _read(self, gemms: list[Gemm]) -> list[str]:
        """Shared tiles of products, in order of their reading."""
        return list(dict.fromkeys(n for g in gemms for n in (g.a, g.b) if n in self.u.tiles))

    def _wait(self, tiles: list[str], half: str, n: str = "") -> None:
        """Waits for tiles of iteration `n` (the current one by default)."""
        self.consumer.wait(tiles, half)
        variable = f"const int {self._variable} = {iteration(self.plan, self.k, n)};" if n else ""
        self.consumer.clean([s for s in loads_of(self.plan.loop.body) if s.into in tiles], half, variable)

    def _inner(self, gemms: list[Gemm]) -> list[str]:
        return [n for n in self._read(gemms) if n in self.copied]

    def _wait_outer(self) -> None:
        outer = [n for n in self._read(self.first + self.second) if n not in self.copied and n not in self.consumer.waited]
        self.consumer.wait(outer, "a")
        self.consumer.clean([s for s in loads_of(self.u.program.code) if s.into in outer], "a")
        self.consumer.waited |= set(outer)

    def _release_outer(self) -> None:
        """Tiles from before the loops that no later loop reads."""
        later = {n for p in self.u.analysis.loops[self.k + 1 :] for n in uses_of(p.loop.body)}
        done = [n for n in self._read(self.first + self.second) if n not in self.copied and n not in later]
        self.consumer.release(done, "a")

    # ---------------------------------------------------------------------------------------------------- segments

    def _split(self) -> None:
        """Iterations [begin, end) see everything in this warpgroup's rows."""
        k, r = self.k, self.plan.range
        if not self._has_edges():
            return
        last = f"min(wg_row + {64 * self.frame.row_blocks - 1}, live - 1)"
        write_full(self.u, self.plan, f"range{k}", f"full_lo{k}", f"full_hi{k}", "wg_row", last)
        below, above = f"range{k}.before(full_lo{k})", f"range{k}.before(full_hi{k})"
        begin, end = (f"count{k} - {above}", f"count{k} - {below}") if self.plan.loop.reversed else (below, above)
        self.w(f"const int begin{k} = {begin}, end{k} = max(begin{k}, {end});")
        assert r.has_edge_below or r.has_edge_above

    def _has_edges(self) -> bool:
        return bool(self.plan.split) and has_edges(self.plan.range)

    def _segments(self, body: Callable[[Setting], None], peeled: bool) -> None:
        """The loop in up to three parts; with the first iteration peeled, an edge of at most one iteration in front is gone."""
        k, r, backwards = self.k, self.plan.range, self.plan.loop.reversed
        edge, middle = Setting(deferred=self.deferred), Setting(frozenset(self.plan.split), None, self.deferred)
        if not self._has_edges():
            self._part(f"count{k}", lambda: body(edge))
            return
        first, last = (r.has_edge_above, r.has_edge_below) if backwards else (r.has_edge_below, r.has_edge_above)
        if first and backwards and peeled and r.edge_above is not None and r.edge_above <= 1:
            first = False
        if first and last:
            self.w("// the edge before the middle, the middle, the edge behind it", "#pragma unroll 1")
            self.w("for (int pass = 0; pass < 2; ++pass) {")
            self._part(f"(pass ? count{k} : begin{k})", lambda: body(edge))
            self._part(f"end{k}", lambda: body(middle))
            self.w("}")
            return
        if first:
            self._part(f"begin{k}", lambda: body(edge))
        self._part(f"end{k}" if last else f"count{k}", lambda: body(middle))
        if last:
            self._part(f"count{k}", lambda: body(edge))

    def _part(self, stop: str, body: Callable[[], None]) -> None:
        self.w(
            "#pragma unroll 1",
            f"for (; it < {stop}; ++it) {{",
            f"const int {self._variable} = {iteration(self.plan, self.k, 'it')};",
        )
        body()
        self.w("}")

    @property
    def _variable(self) -> str:
        return names.loop_variable(self.plan.loop.var)

    # ------------------------------------------------------------------------------------------------------- rotated

    def _rotated(self) -> None:
        c, k = self.consumer, self.k
        if not forced(self.plan):
            self.w(f"if (count{k} > 0) {{")
        self.w("int it = 0;")
        self._first_iteration()
        self.w("it = 1;")
        self._segments(self._rotated_body, peeled=True)
        if forced(self.plan):
            self._release_outer()
        self._wait(self._inner_second(), "c", f"count{k} - 1")
        c.issue(self.second, "c")
        self._close_sums()
        early, late = self._tail_under(self.second) if forced(self.plan) else ([], [])
        self._write_tail(early)
        c.retire(self.second)
        c.release(self._inner(self.second), "c")
        if forced(self.plan):
            self._write_tail(late)
            return
        self.w("} else {")
        write_initial(self.u, COLUMN_UNIT, self.initial)
        self.w("}")
        self._release_outer()
        self._write_tail(self.tail)

    def _inner_second(self) -> list[str]:
        """Tiles that the second products are the first to wait for."""
        seen = set(self._inner(self.first)) - self.frame.two_ends
        return [n for n in self._inner(self.second) if n not in seen and n not in self._inner(self.first)]

    def _free_after_first(self) -> list[str]:
        return [n for n in self._inner(self.first) if n not in self._inner(self.second)]

    def _after_first(self) -> None:
        free = self._free_after_first()
        self.consumer.release(free, "a")
        self.consumer.advance([n for n in self._inner(self.first) if n not in free], "a")

    def _first_iteration(self) -> None:
        """Without the second products of an iteration before, and without statements that leave their tile as it starts."""
        c = self.consumer
        self.w("{", f"const int {self._variable} = {iteration(self.plan, self.k, '0')};")
        self._wait(self._inner(self.first), "a")
        c.issue(self.first, "a")
        write_initial(self.u, COLUMN_UNIT, self.initial)
        c.retire(self.first)
        self._after_first()
        off = next(((m.expr, f"none{self.k}") for m in self.plan.masks if m.skippable), None) if forced(self.plan) else None
        setting = Setting(frozenset(), off, self.deferred)
        for i in (*self.plan.schedule.early, *self.plan.schedule.late):
            if i not in self.plan.dead_first:
                self._peeled(self.plan.loop.body[i], setting)
        self.w("}")

    def _peeled(self, s: Stmt, setting: Setting) -> None:
        """A mask is left out where the tile needs none."""
        if self._has_edges() and _only_masks(s, frozenset(self.plan.split)):
            none = f"none{self.k} || " if forced(self.plan) else ""
            self.w(f"if ({none}begin{self.k} > 0 || end{self.k} <= 0) {{")
            self.consumer.statement(s, setting)
            self.w("}")
        else:
            self.consumer.statement(s, setting)

    def _rotated_body(self, setting: Setting) -> None:
        c, body, pingpong = self.consumer, self.plan.loop.body, self.frame.pingpong
        self._wait(self._inner(self.first), "a")
        if pingpong:
            self.w(f"bar_sync(1 + wg, {PAIR});")
        c.issue(self.first, "a")
        self._wait(self._inner_second(), "c", "it - 1")
        c.issue(self.second, "c")
        if pingpong:
            self.w(f"bar_arrive(wg == {self.frame.groups - 1} ? 1 : 2 + wg, {PAIR});")
        c.retire(self.first, 1)
        self._after_first()
        for i in self.plan.schedule.early:
            c.statement(body[i], setting)
        self._anchor()
        c.retire(self.second)
        c.release(self._inner(self.second), "c")
        for i in self.plan.schedule.late:
            c.statement(body[i], setting, lazy=self.u.program.hints.get("lazy") != "off")

    def _anchor(self) -> None:
        """Keeps the wait for the second products behind the code that should run under them."""
        if self.u.program.hints.get("anchor") == "off":
            return
        early = [s for i in self.plan.schedule.early if isinstance(s := self.plan.loop.body[i], Compute)]
        sums = [s.into for s in early if any(isinstance(e, Op) and e.fn == "rowsum" for e in walk(s.value))]
        tiles = [s.into for s in early if len(self.u.shape(s.into)) == 2]
        if sums:
            x = names.tile(sums[-1])
            self.w(f"UNROLL for (int t = 0; t < MT; ++t) anchor({x}[t][0] + {x}[t][1], scratch);")
        elif tiles:
            n = self.u.shape(tiles[-1])[1]
            self.w(
                "{",
                "float all[4] = {0.0f, 0.0f, 0.0f, 0.0f};",
                f"FOR_TILE({n}) all[2 * r + e] += {names.tile(tiles[-1])}[t][AT];",
            )
            self.w("anchor((all[0] + all[1]) + (all[2] + all[3]), scratch);", "}")

    def _tail_under(self, running: list[Gemm]) -> tuple[list[Stmt], list[Stmt]]:
        """What follows the loop: what touches no registers of the products in flight, and the rest."""
        tiles = set(self.u.program.allocations)
        touched = {n for g in running for n in defs(g) | uses(g)}
        early: list[Stmt] = []
        late: list[Stmt] = []
        for s in self.tail:
            if (uses(s) | defs(s)) & touched:
                late.append(s)
                touched |= (defs(s) | uses(s)) & tiles
            else:
                early.append(s)
        return early, late

    # --------------------------------------------------------------------------------------------- stream and plain

    def _stream(self) -> None:
        """Products only: one group in flight while the next is issued; a slot is free when the group after its own was issued."""
        c, k, read = self.consumer, self.k, self._inner(self.second)
        inits = [self.u.program.allocations[g.into].init for g in self.second if g.into in self.initial]
        overwrite = len(inits) == len(self.second) == len({g.into for g in self.second}) and all(
            i in (Num(0), Num(0.0)) for i in inits
        )
        self.w(f"if (count{k} > 0) {{")
        if not overwrite:
            write_initial(self.u, COLUMN_UNIT, self.initial)
        self._wait(read, "", "0")
        c.issue(self.second, "", overwrite)
        c.advance(read, "")
        self.w("#pragma unroll 1", f"for (int it = 1; it < count{k}; ++it) {{")
        self._wait(read, "", "it")
        c.issue(self.second, "")
        c.advance(read, "")
        c.retire(self.second, 1)
        c.release(read, "", ring="f")
        self.w("}")
        c.retire(self.second)
        c.release(read, "", ring="f")
        self.w("} else {")
        write_initial(self.u, COLUMN_UNIT, self.initial)
        self.w("}")
        self._release_outer()
        self._close_sums()
        self._write_tail(self.tail)

    def _plain(self) -> None:
        """Program order, every product waited for where it stands."""
        write_initial(self.u, COLUMN_UNIT, self.initial)
        self.w("int it = 0;")
        self._segments(self._plain_body, peeled=False)
        self._release_outer()
        self._close_sums()
        self._write_tail(self.tail)

    def _plain_body(self, setting: Setting) -> None:
        c, body, pingpong = self.consumer, self.plan.loop.body, self.frame.pingpong
        gemms = [s for s in body if isinstance(s, Gemm)]
        last_reader = {n: g for g in gemms for n in self._inner([g])}
        waited: set[str] = set()
        lazy = self.u.program.hints.get("lazy") != "off"
        for s in body:
            if isinstance(s, Gemm):
                self._wait([n for n in self._inner([s]) if n not in waited], "")
                waited |= set(self._inner([s]))
                if pingpong and s is gemms[0]:
                    self.w(f"bar_sync(1 + wg, {PAIR});")
                c.issue([s], "")
                if pingpong and s is gemms[0]:
                    self.w(f"bar_arrive(wg == {self.frame.groups - 1} ? 1 : 2 + wg, {PAIR});")
                c.retire([s])
                c.release([n for n, g in last_reader.items() if g is s], "")
            elif not _is_load(s):
                c.statement(s, setting, lazy)

    # ----------------------------------------------------------------------------------------------------- what follows

    def _close_sums(self) -> None:
        for n in sorted(self.deferred):
            self.w(f"FOR_ROWS {names.tile(n)}[t][r] = quad_sum({names.tile(n)}[t][r]);  // the parts of a row's sum together")

    def _write_tail(self, tail: list[Stmt]) -> None:
        for s in tail:
            self.consumer.statement(s)


def _only_masks(s: Stmt, split: frozenset[Expr]) -> bool:
    """Whether a statement does nothing where every test of `split` is true: `S = where(tests, S, constant)`."""
    match s:
        case Compute(into=x, value=Op("where", (test, Var(y), Num()))):
            return x == y and all(c in split for c in conjuncts(test))
    return False
