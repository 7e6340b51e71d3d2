"""Loops of mma.sync kernels that run products beside element-wise code. The orders of copies and barriers; no single statement.

First and second products: see `mma_order`, which says which loop runs in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Compute, Copy, Op, walk
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.mma_kept import keeps, write_kept, write_settled, write_state
from generator.translate.cuda.mma_loop import Loop
from generator.translate.cuda.mma_order import reads
from generator.translate.cuda.mma_tiles import fetch_call, slot


@dataclass
class Overlapped(Loop):
    """What both orders share. `ahead`, `behind`: slots of the tiles of the first and of the second products."""

    def __post_init__(self) -> None:
        first, tiles = reads(self.plan, "first"), self.kernel.u.tiles
        self.first = [c for c in self.copies if c.into in first]
        self.second = [c for c in self.copies if c.into not in first]
        self.ahead = min((tiles[c.into].stages for c in self.first), default=1)
        self.behind = min((tiles[c.into].stages for c in self.second), default=1)

    def copy(self, copies: list[Copy], n: str, guarded: bool = True) -> None:
        """Starts the copies for iteration n; `guarded`: none behind the last."""
        u, w = self.kernel.u, self.kernel.u.w
        w(f"if ({n} < count{self.k}) {{" if guarded else "{", self.bind(n))
        for c in copies:
            w(u.comment(c), fetch_call(u, c, slot(u.tiles[c.into], f"({n})")))
        w("}")

    def point(self, copies: list[Copy], n: str) -> None:
        """From here on statements read these tiles as iteration n has them."""
        for c in copies:
            self.kernel.slots[c.into] = slot(self.kernel.u.tiles[c.into], f"({n})")

    def leave(self) -> None:
        self.kernel.resident.clear()
        self.kernel.pending.clear()
        self.kernel.dirty = True


@dataclass
class Rotated(Overlapped):
    """The first products of an iteration run before the second ones of the iteration before, and these beside its other code.

    One barrier an iteration shows that the tiles of both have come. Tiles of the first products in one slot need a second one,
    behind those products. Copies start behind the first products, which every warp can begin at once.
    """

    def write(self) -> None:
        kernel, w, k = self.kernel, self.kernel.u.w, self.k
        self.enter()
        w(f"if (count{k} > 0) {{", "// the first copies")
        for n in range(self.ahead):
            self.copy(self.first, str(n))
            if n and self.behind > 1:
                self.copy(self.second, str(n - 1))
            w("copy_commit();")
        if self.ahead == 1 and self.behind > 1:
            self.copy(self.second, "0")
            w("copy_commit();")
        write_state(self)
        self._first_iteration()
        kernel.segments(self.plan, k, self.body, peeled=True)
        last = f"count{k} - 1"
        if self.behind == 1:
            w("__syncthreads();")
            self.copy(self.second, last)
            w("copy_commit();")
        w("copy_wait<0>();", "__syncthreads();")
        self.point(self.second, last)
        self.run(self.plan.schedule.second, Setting())
        w("}")
        self.leave()

    def _first_iteration(self) -> None:
        """Without second products of an iteration before, and without statements that leave their tile as it starts."""
        w, plan = self.kernel.u.w, self.plan
        w(f"copy_wait<{self.ahead - 1 if self.ahead > 1 else int(self.behind > 1)}>();", "__syncthreads();")
        self.kernel.pending.clear()
        self.load_resident({c.into for c in self.copies})
        w("{", self.bind("0"))
        self.point(self.first, "0")
        self.run(plan.schedule.first, Setting())
        if self.ahead == 1:
            w("__syncthreads();")
            self.copy(self.first, "1")
            w("copy_commit();")
        alive = tuple(i for i in (*plan.schedule.early, *plan.schedule.late) if i not in plan.dead_first)
        self.run(alive, Setting(deferred=frozenset(plan.schedule.deferred)))
        write_settled(self)
        w("}")

    @property
    def repeats(self) -> bool:
        """With one slot, tiles of the first products are copied over behind them."""
        return self.ahead > 1

    @property
    def remembers(self) -> bool:
        return True

    def body(self, setting: Setting) -> None:
        w, it, s = self.kernel.u.w, f"it{self.k}", self.plan.schedule
        w(self.bind(it), f"copy_wait<{max(0, self.ahead - 2)}>();", "__syncthreads();")
        if self.behind == 1:
            self.copy(self.second, f"{it} - 1", guarded=False)
            w("copy_commit();")
        self.point(self.first, it)
        self.point(self.second, f"{it} - 1")
        self.run(s.first, setting)
        if self.ahead == 1 or self.behind == 1:
            w("copy_wait<0>();" if self.behind == 1 else "", "__syncthreads();")
        if self.behind > 1:
            self.copy(self.second, f"{it} + {self.behind - 2}" if self.behind > 2 else it, guarded=self.behind > 2)
        self.copy(self.first, f"{it} + {max(1, self.ahead - 1)}")
        w("copy_commit();")
        self.run(s.second, setting)
        if keeps(self, setting):
            write_kept(self, setting)
        else:
            self.run((*s.early, *s.late), setting)
            write_settled(self)


@dataclass
class Turns(Overlapped):
    """Two groups of warps take turns: while one runs products, the other runs element-wise code.

    Both run the same code, the second group one barrier behind. Products: the second ones of an iteration and the first ones of
    the next. A slot is free when both groups are done with it, so the group behind may copy one iteration further than the other.
    """

    def write(self) -> None:
        kernel, w, k = self.kernel, self.kernel.u.w, self.k
        self.enter()
        half = kernel.shape.warps // 2
        w(f"if (count{k} > 0) {{", f"const int behind = warp >= {half};  // the group that is one barrier behind")
        w("// the first copies")
        for n in range(self.ahead - 1):
            self.copy(self.first, str(n))
            if n:
                self.copy(self.second, str(n - 1))
        w("if (behind) {")
        self.copy(self.first, str(self.ahead - 1))
        self.copy(self.second, str(self.ahead - 2))
        w("}", "copy_commit();", "copy_wait<0>();", "__syncthreads();")
        kernel.pending.clear()
        self.load_resident({c.into for c in self.copies})
        w(f"if (behind) {self.barrier}")
        self.point(self.first, "0")
        self.run(self.plan.schedule.first, Setting())
        w(self.barrier)
        kernel.segments(self.plan, k, self.body)
        w(f"if (!behind) {self.barrier}", "}")
        self.leave()

    @property
    def repeats(self) -> bool:
        """The group behind copies over what its first products read while it is at the code behind them."""
        return False

    @property
    def barrier(self) -> str:
        """One that the groups meet at in different places of the code: a named one, by its number of threads."""
        return "bar_sync(1, THREADS);"

    def body(self, setting: Setting) -> None:
        w, it, s = self.kernel.u.w, f"it{self.k}", self.plan.schedule
        w(self.bind(it))
        self.copy(self.first, f"{it} + {self.ahead - 1} + behind")
        self.copy(self.second, f"{it} + {self.ahead - 2} + behind")
        w("copy_commit();")
        self.run((*s.early, *s.late), setting)
        self._anchor()
        w(f"copy_wait<{self.ahead - 2}>();", self.barrier)
        self.point(self.second, it)
        self.run(s.second, setting)
        self.point(self.first, f"{it} + 1")
        w(f"if ({it} + 1 < count{self.k}) {{")
        self.run(s.first, setting)
        w("}", self.barrier)

    def _anchor(self) -> None:
        """Keeps the element-wise code in front of the barrier: the compiler would move it among the products behind it."""
        if self.kernel.u.program.hints.get("anchor") == "off":
            return
        between = [self.plan.loop.body[i] for i in self.plan.schedule.early]
        sums = [
            s.into for s in between if isinstance(s, Compute) for e in walk(s.value) if isinstance(e, Op) and e.fn == "rowsum"
        ]
        if sums:
            self.kernel.u.w(f"FOR_ROWS anchor({names.tile(sums[-1])}[t][r], smem);")
