"""Kernels on mma.sync (sm_75, sm_80, and any program that wgmma has no rule for): every warp copies, multiplies and computes.

A loop whose body is straight runs its copies ahead: at each place that waits for tiles, a barrier shows that all warps are done
with what came before, and the copy for a later place is started. Anything else copies where the statement stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from generator.tl.ir import Allocate, Copy, For, Stmt, walk_statements
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.epilogue import write_alignment, write_width
from generator.translate.cuda.grid import (
    iteration,
    live_rows,
    longest_first,
    write_decode,
    write_joined,
    write_place,
    write_range,
    write_scan,
)
from generator.translate.cuda.launch import blocks
from generator.translate.cuda.mma_block import MmaBlock
from generator.translate.cuda.mma_loop import Loop
from generator.translate.cuda.mma_order import Order, order_of, slots_of
from generator.translate.cuda.mma_overlap import Rotated, Turns
from generator.translate.cuda.mma_pipeline import Pipeline
from generator.translate.cuda.mma_tiles import COLUMN_UNIT, fetch_arguments, place, points, shared_copies
from generator.translate.cuda.parameters import Parameters, add_program, write_addresses, write_extents
from generator.translate.cuda.registers import write_declarations, write_initial
from generator.translate.cuda.tile_order import add_sections
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import uses

MAX_REGISTERS = 255
#: How a loop is written, by its order.
LOOPS: dict[Order, type[Loop]] = {"turns": Turns, "rotated": Rotated, "program": Pipeline}


@dataclass
class MmaKernel(MmaBlock):
    """One kernel's text: its parameters, its block's code in order, its loops."""

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

    def _blocks_per_sm(self) -> int:
        fit = min(65536 // (self.shape.threads * MAX_REGISTERS), self.u.target.shared_bytes // max(1, self.smem))
        return max(1, fit)

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
            order = order_of(self, plan)
            self.orders.append(order)
            LOOPS[order](self, plan, k, found).write()
        for name in sorted(plan.schedule.deferred):
            w(f"FOR_ROWS {names.tile(name)}[t][r] = quad_sum({names.tile(name)}[t][r]);  // the parts of a row's sum together")
        w("}")

    def segments(self, plan: LoopPlan, k: int, body: Callable[[Setting], None], peeled: bool = False) -> None:
        """As any block's; the first loop is where the block has time to announce."""
        if k == 0:
            self.announce()
        super().segments(plan, k, body, peeled)

    def _simple_loop(self, plan: LoopPlan, k: int) -> None:
        self.settle()
        self.segments(plan, k, lambda setting: self._simple_body(plan, k, setting))

    def _simple_body(self, plan: LoopPlan, k: int, setting: Setting) -> None:
        self.u.w(f"const int {names.loop_variable(plan.loop.var)} = {iteration(plan, k, f'it{k}')};")
        self.body(plan.loop.body, setting)
        self.settle()


def _matrices_of(s: Stmt) -> set[str]:
    """Global matrices that a statement reads or writes, by tiles or by elements."""
    return uses(s) | {x.into if x.into_level == "global" else x.source for x in walk_statements((s,)) if isinstance(x, Copy)}
