"""Loops in which nothing runs ahead of the code around it: products only, or everything in program order."""

from __future__ import annotations

from generator.tl.ir import Gemm, Num
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.registers import write_initial
from generator.translate.cuda.tile_order import loads_of
from generator.translate.cuda.wgmma_loop import COLUMN_UNIT, Loop


class StreamLoop(Loop):
    """Products only: one group in flight while the next is issued; a slot is free when the group after its own was issued."""

    def run(self) -> None:
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


class PlainLoop(Loop):
    """Program order, every product waited for where it stands."""

    def run(self) -> None:
        write_initial(self.u, COLUMN_UNIT, self.initial)
        self.w("int it = 0;")
        self._segments(self._plain_body, peeled=False)
        self._release_outer()
        self._close_sums()
        self._write_tail(self.tail)

    def _plain_body(self, setting: Setting) -> None:
        c, body = self.consumer, self.plan.loop.body
        gemms, loads = [s for s in body if isinstance(s, Gemm)], loads_of(body)
        last_reader = {n: g for g in gemms for n in self._inner([g])}
        waited: set[str] = set()
        lazy = self.u.program.hints.get("lazy") != "off"
        for s in body:
            if isinstance(s, Gemm):
                self._wait([n for n in self._inner([s]) if n not in waited], "")
                waited |= set(self._inner([s]))
                if s is gemms[0]:
                    self.consumer.turn(True)
                c.issue([s], "")
                if s is gemms[0]:
                    self.consumer.turn(False)
                c.retire([s])
                c.release([n for n, g in last_reader.items() if g is s], "")
            elif s not in loads:
                c.statement(s, setting, lazy)
