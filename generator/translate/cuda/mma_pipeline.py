"""Loops of mma.sync kernels in program order, their copies running ahead of the code. `mma_overlap` holds the other orders.

At each place that waits for tiles, a barrier shows that all warps are done with what came before, and the copy for a later place
is started.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Copy
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.grid import iteration
from generator.translate.cuda.mma_kept import between, keeps, write_settled, write_state, write_tried
from generator.translate.cuda.mma_loop import Loop
from generator.translate.cuda.mma_tiles import fetch_arguments, fetch_call, slot, staged_type


@dataclass
class Pipeline(Loop):
    """A straight loop with its copies running ahead by `distance` places."""

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
