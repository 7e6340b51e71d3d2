"""Loops of mma.sync kernels in program order, their copies running ahead of the code. `mma_overlap` holds the other orders.

At each place that waits for tiles, a barrier shows that all warps are done with what came before, and the copy for a later place
is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from generator.tl.ir import Copy, Gemm
from generator.translate.cuda import names
from generator.translate.cuda.elementwise import Setting
from generator.translate.cuda.mma_kept import between, keeps, write_settled, write_state, write_tried
from generator.translate.cuda.mma_sums import ONES
from generator.translate.cuda.mma_tiles import Point, contraction, fetch_arguments, fetch_call, slot, staged_type
from generator.translate.cuda.unit import round_up
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import defs_of, uses_of

if TYPE_CHECKING:
    from generator.translate.cuda.mma_kernel import MmaKernel

COLUMN_UNIT = 16  # columns of register tiles are padded to the width of two products


def iteration(plan: LoopPlan, k: int, n: str) -> str:
    """The loop variable's value in the n-th iteration that is run."""
    return f"range{k}.at(count{k} - 1 - ({n}))" if plan.loop.reversed else f"range{k}.at({n})"


@dataclass
class Pipeline:
    """A straight loop with its copies running ahead by `distance` places."""

    kernel: MmaKernel
    plan: LoopPlan
    k: int
    points: list[Point]
    distance: int = 0

    @property
    def copies(self) -> list[Copy]:
        return [c for p in self.points for c in p.copies]

    def bind(self, n: str) -> str:
        """C: the loop variable of iteration n."""
        return f"const int {names.loop_variable(self.plan.loop.var)} = {iteration(self.plan, self.k, n)};"

    def write(self) -> None:
        kernel, w = self.kernel, self.kernel.u.w
        self.distance = kernel.distance(self.points)
        copied = {c.into for c in self.copies}
        self.enter()
        if not kernel.asynchronous:
            for c in self.copies:
                w(f"{staged_type(kernel.u, c)} staged_{c.into};")
        write_state(self)
        w("// the first copies")
        for ahead in range(self.distance):
            self.start(ahead, "0", first=True)
        self.load_resident(copied)
        kernel.segments(self.plan, self.k, self.body)
        kernel.resident.clear()
        if kernel.asynchronous:
            w("copy_wait<0>();")
        kernel.dirty = True
        kernel.pending -= copied

    @property
    def repeats(self) -> bool:
        """Whether the first products can be made again behind the code that follows them: no copy meets what they read.

        A place starts the copy of a later one into a slot that all warps are done with before it: up to the next place all tiles
        of this one are there.
        """
        s = self.plan.schedule
        code = (*s.first, *s.early, *s.late)
        return bool(s.first and s.second) and not any(min(code) < p.at <= max(code) for p in self.points)

    @property
    def remembers(self) -> bool:
        """Whether it is known, at the cost of a register, that all rows of a warp have a reference (`mma_kept`)."""
        return False

    def run(self, positions: tuple[int, ...], setting: Setting) -> None:
        for i in positions:
            self.kernel.pending = set()
            self.kernel.statement(self.plan.loop.body[i], setting)

    def enter(self) -> None:
        if self.kernel.dirty:
            self.kernel.u.w("__syncthreads();  // every warp is done with the tiles of before")
            self.kernel.dirty = False

    def start(self, place: int, it: str, first: bool = False) -> None:
        """Starts the copies of a place, counted from the first place of iteration `it`; none behind the last iteration."""
        kernel, u, w = self.kernel, self.kernel.u, self.kernel.u.w
        ahead, point = divmod(place, len(self.points))
        n = f"{it} + {ahead}" if ahead else it
        w(f"if ({n} < count{self.k}) {{" if ahead or first else "{", self.bind(n))
        for c in self.points[point].copies:
            if kernel.asynchronous:
                w(u.comment(c), fetch_call(u, c, slot(u.tiles[c.into], n)))
            else:
                w(u.comment(c), f"staged_{c.into}.fetch({fetch_arguments(u, c)});")
        w("}")
        if kernel.asynchronous:
            w("copy_commit();")

    def load_resident(self, copied: set[str]) -> None:
        """Left operands that every iteration reads stay in registers where there is room."""
        kernel, u, w = self.kernel, self.kernel.u, self.kernel.u.w
        for g in [s for s in self.plan.loop.body if isinstance(s, Gemm)]:
            if g.a in u.tiles and g.a not in copied and g.a not in kernel.resident and has_room(kernel, g, self.plan):
                k = contraction(u, g)
                if g.a in kernel.pending:
                    w(f"copy_wait<{self.distance}>();" if kernel.asynchronous else "", "__syncthreads();")
                w(f"u32 held_{g.a}[MT][{k // 4}];  // {g.a} as an operand, for all iterations")
                w(f"load_operand<{k}>(held_{g.a}, {kernel.operand_a(g)});")
                kernel.resident[g.a] = f"held_{g.a}"

    def body(self, setting: Setting) -> None:
        kernel, w = self.kernel, self.kernel.u.w
        it = f"it{self.k}"
        w(self.bind(it))
        pending, own, inside = set(kernel.pending), kernel.by_warp(self.plan, setting), False
        repeated = (*self.plan.schedule.first, *between(self.plan)) if keeps(self, setting) else ()
        for i, s in enumerate(self.plan.loop.body):
            for number, p in enumerate(self.points):
                if p.at == i:
                    if inside:
                        w("}")
                        inside = False
                    self.arrive(number, it)
            if isinstance(s, Copy) and s.into_level == "shared":
                continue
            if own and not inside:
                w(f"if (own{self.k}.has({iteration(self.plan, self.k, it)})) {{")
                inside = True
            kernel.pending = set()
            if i not in repeated:
                kernel.statement(s, setting)
            elif i == repeated[0]:
                write_tried(self, setting)
            if self.plan.kept is not None and not repeated and i == max(between(self.plan)):
                write_settled(self)
        if inside:
            w("}")
        kernel.pending = pending

    def arrive(self, number: int, it: str) -> None:
        """The tiles of a place are here, the slots of a later one free: start its copies."""
        kernel, u, w = self.kernel, self.kernel.u, self.kernel.u.w
        for c in self.points[number].copies:
            kernel.slots[c.into] = slot(u.tiles[c.into], it)
            if not kernel.asynchronous:
                w(f"staged_{c.into}.land({kernel.slots[c.into]});")
        if kernel.asynchronous:
            w(f"copy_wait<{self.distance - 1}>();")
        w("__syncthreads();")
        self.start(number + self.distance, it)


def has_room(kernel: MmaKernel, g: Gemm, plan: LoopPlan) -> bool:
    """Whether an operand of the loop fits beside its tiles: `Hint resident = on` or `off`, else by counting registers."""
    hint = kernel.u.program.hints.get("resident")
    if hint in ("on", "off"):
        return hint == "on"
    if g.a_transposed:
        return False
    return tile_registers(kernel, plan) + kernel.shape.row_blocks * (contraction(kernel.u, g) // 4) <= 160


def tile_registers(kernel: MmaKernel, plan: LoopPlan) -> int:
    """Registers of a thread that the loop's tiles of numbers take; operands apart."""
    live = {x for s in plan.loop.body for x in defs_of((s,)) | uses_of((s,))}
    sums = {s.into for s in plan.loop.body if isinstance(s, Gemm) and s.b == ONES}  # as few as a row's values
    wide = {n for n in live - sums if n in kernel.u.register_tiles() and len(kernel.u.shape(n)) == 2}
    roots = {kernel.u.analysis.storage.get(n, n) for n in wide}
    return kernel.shape.row_blocks * sum(round_up(kernel.u.shape(n)[1], COLUMN_UNIT) // 2 for n in roots)
