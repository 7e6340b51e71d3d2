"""A straight loop of an mma.sync kernel: what every order of its copies and products shares. Decides on none."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Copy, Gemm
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.grid import iteration
from generator.translate.cuda.mma_block import MmaBlock
from generator.translate.cuda.mma_order import has_room
from generator.translate.cuda.mma_tiles import Point, contraction
from generator.translate.passes import LoopPlan


@dataclass
class Loop:
    """The k-th loop of a kernel. points: places that wait for tiles; distance: places ahead that copies are started."""

    kernel: MmaBlock
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
        """The whole loop, its first copies included."""
        raise NotImplementedError

    @property
    def repeats(self) -> bool:
        """Whether the first products can be made again behind the code that follows them: no copy meets what they read."""
        raise NotImplementedError

    @property
    def remembers(self) -> bool:
        """Whether it is known, at the cost of a register, that all rows of a warp have a reference (`mma_kept`)."""
        return False

    def run(self, positions: tuple[int, ...], setting: Setting) -> None:
        """Statements of the body by their positions; their tiles are here."""
        for i in positions:
            self.kernel.pending = set()
            self.kernel.statement(self.plan.loop.body[i], setting)

    def enter(self) -> None:
        """In front of the loop's first copies."""
        if self.kernel.dirty:
            self.kernel.u.w("__syncthreads();  // every warp is done with the tiles of before")
            self.kernel.dirty = False

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
