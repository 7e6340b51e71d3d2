"""The code of one block of an mma.sync kernel, statement by statement: copies where they stand, products, parts of loops.

Which order a loop runs in is the kernel's to say (`mma_kernel`): here a statement meets whatever its loop has set up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from generator.tl.ir import Compute, Copy, For, Gemm, If, Op, Reshape, Stmt, walk
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import TYPES
from generator.translate.cuda.element_code import PLAIN, Setting
from generator.translate.cuda.epilogue import write_store
from generator.translate.cuda.grid import Scanned, has_edges, write_full, write_range
from generator.translate.cuda.mma_order import Block, order_of
from generator.translate.cuda.mma_sums import ONES
from generator.translate.cuda.mma_tiles import (
    COLUMN_UNIT,
    Point,
    contraction,
    fetch_arguments,
    fetch_call,
    reads_shared,
    staged_type,
)
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.registers import write_statement
from generator.translate.cuda.unit import round_up
from generator.translate.passes import LoopPlan
from generator.translate.passes.ranges import ROW_FIRST, ROW_LAST
from generator.translate.passes.scope import uses


@dataclass
class MmaBlock(Block):
    """The text of a block's code, and what is known where it stands."""

    entry: str
    smem: int = 0
    slots: dict[str, str] = field(default_factory=dict)  # tile -> C of the slot that statements read now
    resident: dict[str, str] = field(default_factory=dict)  # tile -> registers that hold it as an operand
    pending: set[str] = field(default_factory=set)  # tiles on their way, not yet waited for
    dirty: bool = False  # shared memory was read since the last barrier
    loop_count: int = 0
    scanned: dict[int, Scanned] = field(default_factory=dict)  # of each loop that has begun: what was read row by row
    notes: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)  # of each loop: see `mma_order.Order`; "in place" where copies wait

    def loop(self, s: For) -> None:
        """A loop, in whichever order."""
        raise NotImplementedError

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

    def distance(self, found: list[Point]) -> int:
        """How many places ahead copies are started: tiles with s slots and n places an iteration allow n s - 1."""
        stages = min(self.u.tiles[c.into].stages for p in found for c in p.copies)
        return max(1, len(found) * stages - 1) if self.asynchronous else 1

    def segments(self, plan: LoopPlan, k: int, body: Callable[[Setting], None], peeled: bool = False) -> None:
        """The loop in up to three parts: edges, where tests are made, and the middle, where all are true."""
        w, r = self.u.w, plan.range
        edge = Setting(deferred=frozenset(plan.schedule.deferred))
        middle = Setting(frozenset(plan.split), None, edge.deferred)
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
