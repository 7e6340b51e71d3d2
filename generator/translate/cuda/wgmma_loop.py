"""One loop of a wgmma consumer in the schedule of the passes, with what follows it: what loops of all schedules share.

`wgmma_rotated` and `wgmma_straight` write the loops of theirs. What a loop does with tiles is `Operations`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from generator.tl.ir import Gemm, Stmt
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.grid import has_edges, iteration, write_full
from generator.translate.cuda.tile_order import loads_of
from generator.translate.cuda.wgmma_kernel import cursor, forced, write_count
from generator.translate.cuda.wgmma_operations import Operations
from generator.translate.cuda.wgmma_tiles import ends_inside
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import uses_of

COLUMN_UNIT = 8


@dataclass
class Loop(ABC):
    """One loop with what follows it up to the next: some of that runs under the loop's last products."""

    consumer: Operations
    plan: LoopPlan
    k: int
    tail: list[Stmt]
    initial: set[str]  # tiles to give their initial value here

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
        if self.started and not self.frame.ahead:
            self._wait_outer()
            self._wait(self._inner(self.first), "a")
            self.consumer.issue(self.first, "a")
        write_count(self.frame, self.plan, self.k, uniform=True)
        self._split()
        if not self.started:
            self._wait_outer()
        self.run()
        self.w("}")

    @abstractmethod
    def run(self) -> None:
        """All iterations, and what follows them."""

    @property
    def started(self) -> bool:
        """Whether the first products are started before the loop's range is worked out: at the latest where the loop begins."""
        read = [self.u.tiles[n] for n in self._read(self.first)]
        rotated = self.plan.schedule.kind == "rotated" and forced(self.plan)
        return rotated and not any(ends_inside(t) for t in read) and self.u.program.hints.get("ahead") != "off"

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
        self.consumer.hold([n for n in outer if n in self.frame.resident])
        self.consumer.waited |= set(outer)

    def _done_outer(self, gemms: list[Gemm]) -> list[str]:
        """Tiles of products that come from before the loops and that no later loop reads."""
        later = {n for p in self.u.analysis.loops[self.k + 1 :] for n in uses_of(p.loop.body)}
        kept = self.frame.resident
        return [n for n in self._read(gemms) if n not in self.copied and n not in later and n not in kept]

    def _early_outer(self) -> list[str]:
        """Those with one slot that only the first products read: free behind the last of these, before the loop has ended."""
        alone = [n for n in self._done_outer(self.first) if self.u.tiles[n].stages == 1 and n not in self._read(self.second)]
        return alone if forced(self.plan) else []

    def _free_early(self, n: str) -> None:
        """Behind the first products of iteration `n`."""
        for tile in self._early_outer():
            t = self.u.tiles[tile]
            self.w(f"if (lane == 0 && {n} == count{self.k} - 1) mbar_arrive({self.frame.empty(t, cursor(self.frame, t, 'a'))});")

    def _release_outer(self) -> None:
        early = self._early_outer()
        self.consumer.advance(early, "a")
        self.consumer.release([n for n in self._done_outer(self.first + self.second) if n not in early], "a")

    def _split(self) -> None:
        """Iterations [begin, end) see everything in this warpgroup's rows."""
        k, r = self.k, self.plan.range
        if not self._has_edges():
            return
        rows = 64 * self.frame.row_blocks
        last = f"min(wg_row + {rows - 1}, live - 1)"
        write_full(self.u, self.plan, f"range{k}", f"full_lo{k}", f"full_hi{k}", "wg_row", last, rows)
        below, above = f"range{k}.before(full_lo{k})", f"range{k}.before(full_hi{k})"
        begin, end = (f"count{k} - {above}", f"count{k} - {below}") if self.plan.loop.reversed else (below, above)
        self.w(f"const int begin{k} = uniform({begin}), end{k} = uniform(max(begin{k}, {end}));")
        assert r.has_edge_below or r.has_edge_above

    def _has_edges(self) -> bool:
        return bool(self.plan.split) and has_edges(self.plan.range)

    def _segments(self, body: Callable[[Setting], None], peeled: bool) -> None:
        """The loop in up to three parts; with the first iteration peeled, an edge of at most one iteration in front is gone.

        Both edges are written out: around one body for the two, ptxas would take a warp for divergent (see `uniform`).
        """
        k, r, backwards = self.k, self.plan.range, self.plan.loop.reversed
        edge, middle = Setting(deferred=self.deferred), Setting(frozenset(self.plan.split), None, self.deferred)
        if not self._has_edges():
            self._part(f"count{k}", lambda: body(edge))
            return
        first, last = (r.has_edge_above, r.has_edge_below) if backwards else (r.has_edge_below, r.has_edge_above)
        if first and backwards and peeled and r.edge_above is not None and r.edge_above <= 1:
            first = False
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

    def _close_sums(self) -> None:
        for n in sorted(self.deferred):
            self.w(f"FOR_ROWS {names.tile(n)}[t][r] = quad_sum({names.tile(n)}[t][r]);  // the parts of a row's sum together")

    def _write_tail(self, tail: list[Stmt]) -> None:
        for s in tail:
            self.consumer.statement(s)
