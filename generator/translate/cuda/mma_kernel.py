"""Kernels on mma.sync (sm_75, sm_80, and any program that wgmma has no rule for): every warp copies, multiplies and computes.

A loop whose body is straight runs its copies ahead: at each place that waits for tiles, a barrier shows that all warps are done
with what came before, and the copy for a later place is started. Anything else copies where the statement stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from generator.tl.ir import Allocate, Compute, Copy, For, Gemm, If, Op, Reshape, Stmt, walk, walk_statements
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import TYPES
from generator.translate.cuda.elementwise import PLAIN, Setting
from generator.translate.cuda.epilogue import write_alignment, write_store, write_width
from generator.translate.cuda.grid import (
    Scanned,
    has_edges,
    live_rows,
    longest_first,
    write_decode,
    write_full,
    write_joined,
    write_place,
    write_range,
    write_scan,
)
from generator.translate.cuda.launch import blocks
from generator.translate.cuda.mma_overlap import order_of, pipeline, slots_of
from generator.translate.cuda.mma_pipeline import COLUMN_UNIT, iteration
from generator.translate.cuda.mma_sums import ONES
from generator.translate.cuda.mma_tiles import (
    Point,
    contraction,
    fetch_arguments,
    fetch_call,
    place,
    points,
    reads_shared,
    shared_copies,
    staged_type,
)
from generator.translate.cuda.parameters import Parameters, add_program, write_addresses, write_extents
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.registers import write_declarations, write_initial, write_statement
from generator.translate.cuda.tile_order import add_sections
from generator.translate.cuda.unit import Unit, round_up
from generator.translate.passes import LoopPlan
from generator.translate.passes.ranges import ROW_FIRST, ROW_LAST
from generator.translate.passes.scope import uses

MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Shape:
    """How the block's rows are dealt out: `row_blocks` of 16 for each of `warps`."""

    warps: int
    row_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass
class MmaKernel:
    """One kernel's text. `asynchronous`: cp.async (sm_80), else loads staged in registers (sm_75)."""

    u: Unit
    shape: Shape
    asynchronous: bool
    entry: str
    smem: int = 0
    slots: dict[str, str] = field(default_factory=dict)  # tile -> C of the slot that statements read now
    resident: dict[str, str] = field(default_factory=dict)  # tile -> registers that hold it as an operand
    pending: set[str] = field(default_factory=set)  # tiles on their way, not yet waited for
    dirty: bool = False  # shared memory was read since the last barrier
    loop_count: int = 0
    scanned: dict[int, Scanned] = field(default_factory=dict)  # of each loop that has begun: what was read row by row
    notes: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)  # of each loop: see `mma_overlap.Order`; "in place" where copies wait

    # ------------------------------------------------------------------------------------------------- the whole

    def parameters(self) -> Parameters:
        out = Parameters()
        add_program(out, self.u, self.u.matrices)
        if self.in_sections:
            add_sections(out, self.u)
        if self._announced():
            out.add("int q_resident", "i32", value=["*", "$sms", self._blocks_per_sm()])
            out.add("int q_blocks", "i32", value=blocks(self.u))
        return out

    @property
    def in_sections(self) -> bool:
        """Whether blocks that differ in length start in an order of their own."""
        return longest_first(self.u) and len(self.u.program.axes) > 1

    def write(self) -> None:
        """The kernel, after the runtime's headers."""
        u, w = self.u, self.u.w
        stages = self._stages()
        self.smem = place(u, stages)
        if not u.narrow:  # both entry points have the same
            self.parameters().write(w)
        bounds = f"{self.shape.threads}, {self._blocks_per_sm()}"
        w("", f'extern "C" __global__ void __launch_bounds__({bounds}) {self.entry}(const __grid_constant__ Params p) {{')
        w("extern __shared__ __align__(1024) u8 smem_raw[];", "const u32 smem = smem_u32(smem_raw);")
        for t in u.tiles.values():
            w(f"const u32 {names.shared(t.name)} = smem + {t.offset};")
            self.slots[t.name] = names.shared(t.name)
        w("const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, lane_col = 2 * (lane & 3);")
        w(f"const int warp_row = warp * {16 * self.shape.row_blocks}, row0 = warp_row + (lane >> 2);")
        head, tail = self._split()
        write_declarations(u, COLUMN_UNIT)
        self._scope(head, initial=True)
        if tail:
            self._scope(tail)
        w("}")

    def _split(self) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
        """The statements up to the last loop, and those behind it."""
        code = self.u.program.code
        last = max((i for i, s in enumerate(code) if isinstance(s, For)), default=-1) + 1
        return code[:last], code[last:]

    def _scope(self, body: tuple[Stmt, ...], initial: bool = False) -> None:
        """Statements with the block's coordinates and addresses; worked out anew behind the loops: they hold no registers."""
        u, w = self.u, self.u.w
        w("{")
        matrices = self._addresses(body, "block_number()")
        write_alignment(u, [a for a in matrices if a.name in u.program.outputs])
        if u.narrow:
            copied = {t.matrix.name for t in u.tiles.values()} - set(u.program.outputs)
            for a in matrices:
                if a.name in copied:
                    write_width(u, a)
        w(f"const int live = {live_rows(u)};")
        if initial:
            self._scan_ahead(body)
            write_initial(u, COLUMN_UNIT)
        self.body(body)
        w("}")

    def _addresses(self, body: tuple[Stmt, ...], block: str) -> list[Allocate]:
        """Coordinates of a block and where it sees the matrices that the statements need, which are returned."""
        u = self.u
        if self.in_sections:
            write_place(u, "Sections{p.q_section, p.q_num_sections, p.q_num_first, p.q_num_rest}", block)
        else:
            write_decode(u, block, longest_first(u))
        needed = {n for s in body for n in _matrices_of(s)}
        matrices = [a for a in u.matrices if a.name in needed]
        write_addresses(u, matrices)
        write_extents(u, matrices)
        return matrices

    def _announced(self) -> list[Copy]:
        """Tiles in front of the first loop, with `Hint announce = on`: a block has nothing to do until they are there."""
        code = self.u.program.code
        first = next((i for i, s in enumerate(code) if isinstance(s, For)), 0)
        return shared_copies(code[:first]) if self.asynchronous and self.u.program.hints.get("announce") == "on" else []

    def announce(self) -> None:
        """Brings those of the block that takes this one's place to L2, while this one is at work."""
        w, copies = self.u.w, self._announced()
        if not copies:
            return
        w("// the tiles that the block in this one's place will wait for, to L2", "{")
        w("const int following = block_number() + p.q_resident;", "if (following < p.q_blocks) {")
        self._addresses(tuple(copies), "following")
        for c in copies:
            rows, cols = self.u.shape(c.into)
            call = fetch_arguments(self.u, c)
            w(f"announce<{rows}, {cols}, THREADS>({call});")
        w("}", "}")

    def _scan_ahead(self, body: tuple[Stmt, ...]) -> None:
        """What the first loop's bounds are read from is asked for in front of the tiles that would hold it up."""
        first = next((i for i, s in enumerate(body) if isinstance(s, For)), None)
        if first is not None and all(isinstance(s, Copy) for s in body[:first]):
            loop = body[first]
            assert isinstance(loop, For)
            self.scanned[0] = write_scan(self.u, self.u.analysis.plan(loop), "0", "live - 1")

    def _stages(self) -> dict[str, int]:
        """Slots of each tile: enough that the copy for a later place never meets a reader (see `distance`)."""
        out: dict[str, int] = {}
        for plan in self.u.analysis.loops:
            if (found := points(self.u, plan.loop)) is not None:
                if (order := order_of(self, plan)) != "program":
                    out |= {n: max(out.get(n, 1), stages) for n, stages in slots_of(self, plan, order).items()}
                    continue
                wanted = int(self.u.program.hints.get("stages", "0"))
                least = 2 if len(found) == 1 else 1
                most = 4 if self.asynchronous else least
                for p in found:
                    for c in p.copies:
                        out[c.into] = max(out.get(c.into, 1), min(max(wanted, least), most))
        return out

    def distance(self, found: list[Point]) -> int:
        """How many places ahead copies are started: tiles with s slots and n places an iteration allow n s - 1."""
        stages = min(self.u.tiles[c.into].stages for p in found for c in p.copies)
        return max(1, len(found) * stages - 1) if self.asynchronous else 1

    def _blocks_per_sm(self) -> int:
        fit = min(65536 // (self.shape.threads * MAX_REGISTERS), self.u.target.shared_bytes // max(1, self.smem))
        return max(1, fit)

    # ------------------------------------------------------------------------------------------------ statements

    def body(self, body: tuple[Stmt, ...], setting: Setting = PLAIN) -> None:
        for s in body:
            self.statement(s, setting)

    def statement(self, s: Stmt, setting: Setting = PLAIN) -> None:
        u = self.u
        match s:
            case Copy(source_level="global", into_level="shared"):
                self.copy_now(s)
            case Copy(into_level="global"):
                write_store(u, s)
            case For():
                self.loop(s)
            case If():
                self.branch(s, setting)
            case Gemm():
                self.wait_for(uses(s))
                self.gemm(s)
            case Compute() | Reshape() | Copy(into_level="register"):
                self.wait_for(uses(s))
                self.elementwise(s, setting)
            case _:
                raise Refused("translate_failed", f"no code for: {u.comment(s)[3:]}; keep such tiles in registers", s.span.line)

    def elementwise(self, s: Stmt, setting: Setting) -> None:
        shared = self.u.code.shared
        self.u.code.shared = {n: text.replace(f"{{slot_{n}}}", self.slots[n]) for n, text in shared.items()}
        write_statement(self.u, s, setting, lazy=self.u.program.hints.get("lazy") != "off")
        self.u.code.shared = shared
        if reads_shared(self.u, s):
            self.dirty = True

    def branch(self, s: If, setting: Setting) -> None:
        w = self.u.w
        self.settle()
        w(self.u.comment(s), f"if ({self.u.scalar(s.test)}) {{")
        self.body(s.then, setting)
        self.settle()
        if s.otherwise:
            w("} else {")
            self.body(s.otherwise, setting)
            self.settle()
        w("}")

    # ---------------------------------------------------------------------------------------- copies where they stand

    def copy_now(self, s: Copy) -> None:
        """Starts a copy at its place; the first reader waits."""
        if self.dirty:
            self.u.w("__syncthreads();  // every warp is done with what is overwritten")
            self.dirty = False
        self.u.w(self.u.comment(s))
        destination = names.shared(s.into)
        self.slots[s.into] = destination
        if self.asynchronous:
            self.u.w(fetch_call(self.u, s, destination), "copy_commit();")
        else:
            fetch = f"staged.fetch({fetch_arguments(self.u, s)});"
            self.u.w("{", f"{staged_type(self.u, s)} staged;", fetch, f"staged.land({destination});", "}")
        self.pending.add(s.into)

    def wait_for(self, needed: set[str]) -> None:
        if needed & self.pending:
            self.settle()

    def settle(self) -> None:
        """Everything that was copied is here, for all warps, and nobody reads any more."""
        if self.pending or self.dirty:
            if self.pending and self.asynchronous:
                self.u.w("copy_wait<0>();")
            self.u.w("__syncthreads();")
            self.pending.clear()
            self.dirty = False

    # ------------------------------------------------------------------------------------------------------ loops

    def loop(self, s: For) -> None:
        plan = self.u.analysis.plan(s)
        found = points(self.u, s)
        k = self.loop_count
        self.loop_count += 1
        w = self.u.w
        w("", self.u.comment(s), "{")
        if k not in self.scanned:
            self.scanned[k] = write_scan(self.u, plan, "0", "live - 1")
        write_joined(self.u, self.scanned[k])
        write_range(self.u, plan, f"range{k}", "0", "live - 1", self.scanned[k])
        w(f"const int count{k} = range{k}.count();")
        if found is None:
            if shared_copies(s.body):
                self.notes.append(f"loop {s.var}: copies are waited for where they stand, since its body is not straight")
            self.orders.append("in place")
            self._simple_loop(plan, k)
        else:
            self.orders.append(order_of(self, plan))
            pipeline(self, plan, k, found).write()
        for name in sorted(plan.schedule.deferred):
            w(f"FOR_ROWS {names.tile(name)}[t][r] = quad_sum({names.tile(name)}[t][r]);  // the parts of a row's sum together")
        w("}")

    def _simple_loop(self, plan: LoopPlan, k: int) -> None:
        self.settle()
        self.segments(plan, k, lambda setting: self._simple_body(plan, k, setting))

    def _simple_body(self, plan: LoopPlan, k: int, setting: Setting) -> None:
        self.u.w(f"const int {names.loop_variable(plan.loop.var)} = {iteration(plan, k, f'it{k}')};")
        self.body(plan.loop.body, setting)
        self.settle()

    def segments(self, plan: LoopPlan, k: int, body: Callable[[Setting], None], peeled: bool = False) -> None:
        """The loop in up to three parts: edges, where tests are made, and the middle, where all are true."""
        w, r = self.u.w, plan.range
        edge = Setting(deferred=frozenset(plan.schedule.deferred))
        middle = Setting(frozenset(plan.split), None, edge.deferred)
        if k == 0:
            self.announce()
        w(f"int it{k} = {int(peeled)};")
        if not plan.split or not has_edges(r):
            self._part(plan, k, f"count{k}", body, edge)
            return
        write_full(self.u, plan, f"range{k}", f"full_lo{k}", f"full_hi{k}", "0", "live - 1", scanned=self.scanned[k])
        below, above = f"range{k}.before(full_lo{k})", f"range{k}.before(full_hi{k})"
        begin, end = (f"count{k} - {above}", f"count{k} - {below}") if plan.loop.reversed else (below, above)
        w(f"const int begin{k} = {begin}, end{k} = max(begin{k}, {end});")
        first, last = (r.has_edge_above, r.has_edge_below) if plan.loop.reversed else (r.has_edge_below, r.has_edge_above)
        if first and plan.loop.reversed and peeled and r.edge_above is not None and r.edge_above <= 1:
            first = False
        if first and last:
            w("// the edge before the middle, the middle, the edge behind it", "#pragma unroll 1")
            w("for (int pass = 0; pass < 2; ++pass) {")
            self._part(plan, k, f"(pass ? count{k} : begin{k})", body, edge)
            self._part(plan, k, f"end{k}", body, middle)
            w("}")
        elif first:
            self._part(plan, k, f"begin{k}", body, edge)
            self._part(plan, k, f"count{k}", body, middle)
        else:
            self._part(plan, k, f"end{k}" if last else f"count{k}", body, middle)
            if last:
                self._part(plan, k, f"count{k}", body, edge)

    def by_warp(self, plan: LoopPlan, setting: Setting) -> bool:
        """Whether a warp passes over an edge's tiles that none of its own rows see.

        Worth it where both ends of the range move with the rows: at one end it is always the same warps that have less to do.
        """
        r = plan.range
        moving = [{ROW_FIRST, ROW_LAST} & set(walk(b)) for b in (r.lo, r.hi)]
        read = any(isinstance(x, Op) and x.fn in ("rows_min", "rows_max") for b in (r.lo, r.hi, *(r.gap or ())) for x in walk(b))
        return not setting.visible and self.shape.warps > 1 and all(moving) and not read and order_of(self, plan) == "program"

    def _part(self, plan: LoopPlan, k: int, stop: str, body: Callable[[Setting], None], setting: Setting) -> None:
        own = self.by_warp(plan, setting)
        if own:
            self.u.w("{")
            write_range(self.u, plan, f"own{k}", "warp_row", f"min(warp_row + {16 * self.shape.row_blocks - 1}, live - 1)")
        self._iterations(k, stop, lambda: body(setting))
        if own:
            self.u.w("}")

    def _iterations(self, k: int, stop: str, body: Callable[[], None]) -> None:
        self.u.w("#pragma unroll 1", f"for (; it{k} < {stop}; ++it{k}) {{")
        body()
        self.u.w("}")

    # --------------------------------------------------------------------------------------------------- products

    def gemm(self, g: Gemm) -> None:
        """C += A B, or C = A B, one warp's rows of it."""
        u, w = self.u, self.u.w
        if g.b == ONES:
            kind = TYPES[u.dtype(g.a)]
            w(u.comment(g), f"add_row_sums<{kind}, {u.shape(g.a)[1]}>({names.tile(g.into)}, {names.tile(g.a)});")
            return
        if g.b not in u.tiles:
            raise Refused("translate_failed", f"{g.b}: the right operand of a product lies in shared memory", g.span.line)
        b, c = u.tiles[g.b], names.tile(g.into)
        kind, k = TYPES[b.matrix.dtype], contraction(u, g)
        n = b.stored_rows if g.b_transposed else b.stored_cols
        w(u.comment(g))
        if not g.accumulate:
            w(f"FOR_TILE({round_up(u.shape(g.into)[1], COLUMN_UNIT)}) {c}[t][AT] = 0.0f;")
        b_text = f"OperandB<{b.stored_cols}, {str(g.b_transposed).lower()}>({self.slots[g.b]}, lane)"
        if g.a in self.resident:
            a_text = self.resident[g.a]
        elif g.a in u.tiles:
            a_text = self.operand_a(g)
        else:
            a_text = names.tile(g.a)
        w(f"gemm<{kind}, {k}, {n}>({c}, {a_text}, {b_text});")
        self.dirty = True

    def operand_a(self, g: Gemm) -> str:
        a = self.u.tiles[g.a]
        return f"OperandA<{a.stored_cols}, {str(g.a_transposed).lower()}>({self.slots[g.a]}, warp_row, lane)"


def _matrices_of(s: Stmt) -> set[str]:
    """Global matrices that a statement reads or writes, by tiles or by elements."""
    return uses(s) | {x.into if x.into_level == "global" else x.source for x in walk_statements((s,)) if isinstance(x, Copy)}
