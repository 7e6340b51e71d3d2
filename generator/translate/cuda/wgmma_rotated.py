"""Loops whose first products run one iteration ahead of the second ones, with the code between under them."""

from __future__ import annotations

from generator.tl.ir import Compute, Expr, Gemm, Num, Op, Reshape, Stmt, Var, walk
from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.elementwise import compute_in_two
from generator.translate.cuda.grid import bound_of_rows, iteration, reads_rows
from generator.translate.cuda.registers import write_initial
from generator.translate.cuda.wgmma_kernel import forced
from generator.translate.cuda.wgmma_loop import COLUMN_UNIT, Loop
from generator.translate.passes.conditions import conjuncts
from generator.translate.passes.scope import defs, uses

#: Sixteenths of the second products' next operand that stand before the wait for those in flight.
UNDER_SECOND = 3


class RotatedLoop(Loop):
    """The first iteration is peeled: it has no second products before it."""

    def run(self) -> None:
        c, k = self.consumer, self.k
        if not forced(self.plan):
            self.w(f"if (count{k} > 0) {{")
        self.w("int it = 0;")
        self._first_iteration()
        self.w("++it;")
        self._segments(self._rotated_body, peeled=True)
        if forced(self.plan):
            self._release_outer()
        self._wait(self._inner_second(), "c", f"count{k} - 1")
        c.issue(self.second, "c")
        self._close_sums()
        early, late = self._tail_under(self.second) if forced(self.plan) else ([], [])
        self._write_tail(early)
        if self.frame.ahead:
            c.start_next(self.first)
        c.retire(self.second, 1 if self.frame.ahead else 0)
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
        if not self.started:
            self._wait(self._inner(self.first), "a", "0")
            c.issue(self.first, "a")
        write_initial(self.u, COLUMN_UNIT, self.initial)
        if self.started and self.anchored:  # the coordinates above are worked out under the products
            self.w(f"anchor(__int_as_float(count{self.k}), scratch);")
        c.retire(self.first)
        self._after_first()
        self._free_early("0")
        if self.skips:
            self._skip_front()
        self.w("{", f"const int {self._variable} = {iteration(self.plan, self.k, 'it')};")
        off = next(((m.expr, f"none{self.k}") for m in self.plan.masks if m.skippable), None) if forced(self.plan) else None
        setting = Setting(frozenset(), off, self.deferred)
        for i in (*self.plan.schedule.early, *self.plan.schedule.late):
            if i not in self.plan.dead_first:
                self._peeled(self.plan.loop.body[i], setting)
        self.w("}")

    @property
    def skips(self) -> bool:
        """Whether a warpgroup passes over iterations at the front that none of its own rows sees, and over all but one of a tile
        whose rows lie past the end. The block's proof that masked tiles change nothing holds for a part of its rows.
        """
        return self.started and self.frame.groups > 1 and self.u.program.hints.get("skip") != "off"

    def _skip_front(self) -> None:
        """Tiles of the rings are passed on unread; the first products are made again for the first iteration that counts."""
        c, k, rows = self.consumer, self.k, 64 * self.frame.row_blocks
        r, skipped = self.plan.range, f"wg_row >= live ? count{k} - 1 : 0"
        bound = r.hi if self.plan.loop.reversed else r.lo
        if reads_rows(bound):
            seen = f"range{k}.before({bound_of_rows(self.u, bound, 'wg_row', f'min(wg_row + {rows - 1}, live - 1)')})"
            front = f"count{k} - {seen}" if self.plan.loop.reversed else seen
            skipped = f"wg_row >= live ? count{k} - 1 : clamp({front}, 0, count{k} - 1)"
        self.w(f"const int skip{k} = uniform(none{k} ? 0 : {skipped});", f"if (skip{k} > 0) {{")
        self.w("#pragma unroll 1", f"for (it = 1; it <= skip{k}; ++it) {{")
        c.wait(self._inner(self.first), "a")
        self.consumer.turn(True)
        self.w(f"if (it == skip{k}) {{")
        c.issue(self.first, "a")
        c.retire(self.first)
        self.w("}")
        self.consumer.turn(False)
        self._after_first()
        self._free_early("it")
        c.wait(self._inner_second(), "c")
        c.release(self._inner(self.second), "c")
        self.w("}", f"it = skip{k};", "}")

    def _peeled(self, s: Stmt, setting: Setting) -> None:
        """A mask is left out where the tile needs none."""
        if self._has_edges() and _only_masks(s, frozenset(self.plan.split)):
            none = f"none{self.k} || " if forced(self.plan) else ""
            self.w(f"if ({none}begin{self.k} > it || end{self.k} <= it) {{")
            self.consumer.statement(s, setting)
            self.w("}")
        else:
            self.consumer.statement(s, setting)

    def _rotated_body(self, setting: Setting) -> None:
        c, body = self.consumer, self.plan.loop.body
        self._wait(self._inner(self.first), "a")
        self.consumer.turn(True)
        c.issue(self.first, "a")
        self._wait(self._inner_second(), "c", "it - 1")
        c.issue(self.second, "c")
        self.consumer.turn(False)
        c.retire(self.first, 1)
        self._after_first()
        self._free_early("it")
        cut = self._cut()
        for i in self.plan.schedule.early:
            if body[i] is cut:
                self._cut_statement(cut, setting)
            else:
                c.statement(body[i], setting)
        if cut is None:
            self._anchor()
            self._retire_second()
        for s in self._late(cut):
            c.statement(s, setting, lazy=self.u.program.hints.get("lazy") != "off")

    def _retire_second(self) -> None:
        self.consumer.retire(self.second)
        self.consumer.release(self._inner(self.second), "c")

    def _cut(self) -> Compute | None:
        """The statement that makes the second products' next operand. The wait for those in flight stands inside it: they are
        done by then, and what is left of the statement runs beside the casts of what it makes.
        """
        body = self.plan.loop.body
        sources = {s.source for i in self.plan.schedule.late if isinstance(s := body[i], Reshape)}
        made = [s for i in self.plan.schedule.early if isinstance(s := body[i], Compute) and s.into in sources]
        return made[-1] if made and self.anchored else None

    def _late(self, cut: Compute | None) -> list[Stmt]:
        """Casts first where nothing forbids it: the others may be branches, and instructions do not move across those."""
        late = [self.plan.loop.body[i] for i in self.plan.schedule.late]
        casts = [s for s in late if isinstance(s, Reshape)]
        others = [s for s in late if not isinstance(s, Reshape)]
        apart = not any((defs(s) & (uses(x) | defs(x))) or (uses(s) & defs(x)) for s in casts for x in others)
        return [*casts, *others] if cut is not None and apart else late

    def _cut_statement(self, s: Compute, setting: Setting) -> None:
        w, x, n = self.w, names.tile(s.into), self.u.shape(s.into)[1] // 8
        k = max(1, n * UNDER_SECOND // 16)
        head, tail = compute_in_two(self.u.code, s, setting, k)
        w(
            self.u.comment(s),
            *head,
            f"UNROLL for (int t = 0; t < MT; ++t) anchor({x}[t][{4 * k - 3}] + {x}[t][{4 * k - 1}], scratch);",
        )
        self._retire_second()
        w(*tail)

    @property
    def anchored(self) -> bool:
        return self.u.program.hints.get("anchor") != "off"

    def _anchor(self) -> None:
        """Keeps the wait for the second products behind the code that should run under them."""
        if not self.anchored:
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


def _only_masks(s: Stmt, split: frozenset[Expr]) -> bool:
    """Whether a statement does nothing where every test of `split` is true: `S = where(tests, S, constant)`."""
    match s:
        case Compute(into=x, value=Op("where", (test, Var(y), Num()))):
            return x == y and all(c in split for c in conjuncts(test))
    return False
