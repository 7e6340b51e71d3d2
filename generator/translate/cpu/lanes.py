"""Nests whose tiles lie with rows in lanes: blocks of lanes, row phases and loops over the columns inside."""

from __future__ import annotations

from generator.tl.ir import Expr, Op, Var, names
from generator.translate.cpu.elementwise import ROUND, NestWriter, combined, comment, identity
from generator.translate.cpu.folding import touched
from generator.translate.cpu.limits import LimitTests
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.nests import Nest, Phase
from generator.translate.cpu.ops import Step
from generator.translate.cpu.unit import Unit, indent
from generator.translate.cpu.vectors import EACH_VECTOR, LOAD, STORE, LaneVectors, kind_of, lane_array
from generator.translate.cpu.widths import BLOCK, VECTOR, padded


class LaneNest(NestWriter):
    """blockwise: one pass, of columns [n0, n1) that the caller names; its maxima go on from what memory holds."""

    def __init__(self, unit: Unit, nest: Nest, after: set[str], limits: LimitTests, blockwise: bool = False) -> None:
        super().__init__(unit, nest, after, limits)
        self.blockwise, self.text = blockwise, LaneVectors(unit.names, limits)

    def finish(self, number: int) -> list[str]:
        body: list[str] = []
        for position, phase in enumerate(self.nest.phases):
            body += self._row_phase(phase) if phase.over == "rows" else self._column_phase(phase, position)
        body += self._store_rows()
        self.has_edge = any("EDGE" in x for x in body)
        flags = ", bool EDGE" if self.has_edge else ""
        given = ", const int64_t n0, const int64_t n1" if self.blockwise else ""
        head = f"template <int N{flags}> MEMBER void nest{number}(const int64_t lane{given}) {{"
        self.unit.functions += [head, *indent(self.text.top + body), "}"]
        return self._calls(number)

    def address(self, name: str, at: str) -> str:
        turned = self.unit.tile(name).loaded and name in self.unit.placement.turned
        return f"q_{name} + {at}" if turned else super().address(name, at)

    def _calls(self, number: int) -> list[str]:
        """Every block of lanes, and a narrower one."""
        rows, flags = padded(self.nest.rows), ", EDGE" if self.has_edge else ""
        phase = self.nest.phases[0]
        given = ", {}, {}".format(*self.unit.span(phase.span, phase.columns)) if self.blockwise else ""
        calls = [f"for (int64_t lane = 0; lane + LANES <= {rows}; lane += LANES) nest{number}<NV{flags}>(lane{given});"]
        if self.nest.rows % BLOCK:
            rest = f"nest{number}<{rows} % LANES / VL{flags}>({rows} - {rows} % LANES{given});"
            calls.append(f"if constexpr ({rows} % LANES != 0) {rest}")
        return calls

    def _row_phase(self, phase: Phase) -> list[str]:
        """Statements on one value a row: vertical code."""
        out: list[str] = []
        for s in phase.steps:
            self.text.level, self.text.outer = "row", []
            self._load_rows(s)
            dtype = self.unit.tile(s.into).dtype
            kind, value = kind_of(dtype), self.versions.rename(s.value)
            text, array = self.text.typed(value, kind), self.text.fresh("r")
            self.text.row_arrays[self.versions.next(s.into)] = array
            declared, filled = lane_array(array, kind, ROUND[dtype].format(text))
            out += [*self.text.outer, comment(s), declared, filled]
        return out

    def _load_rows(self, s: Step) -> None:
        """Row values that were made before this nest."""
        for n in sorted(names(s.value)):
            if n not in self.versioned or self.unit.tile(n).is_element:
                continue
            if (version := self.versions.current(n)) not in self.text.row_arrays:
                kind, array = kind_of(self.unit.tile(n).dtype), self.text.fresh("r")
                self.text.outer += lane_array(array, kind, LOAD[kind].format(f"{tile_name(n)} + lane + j * VL"))
                self.text.row_arrays[version] = array

    def _store_rows(self) -> list[str]:
        out = []
        for n in sorted(self.versions.count):
            if n in self.after and not self.unit.tile(n).is_element:
                array = self.text.row_arrays[self.versions.current(n)]
                store = STORE[kind_of(self.unit.tile(n).dtype)].format(f"{tile_name(n)} + lane + j * VL", f"{array}[j]")
                out.append(f"{EACH_VECTOR} {store};")
        return out

    def _column_phase(self, phase: Phase, position: int) -> list[str]:
        """One loop over the columns; every statement of the phase in its body, element by element."""
        text, at = self.text, f"n * {padded(self.nest.rows)} + lane + j * VL"
        text.outer, start = [], []
        for s in phase.steps:
            self._load_rows(s)
        text.start_columns()
        body, finished = [], {}
        for s in phase.steps:
            body += self.load_elements(s, text, at)
            value = self.versions.rename(s.value)
            body.append(comment(s))
            if s.kind == "element":
                body += self.assign(s, value, text, at, position)
            else:
                array, update = self._reduction(s, value)
                begin = f"vload({tile_name(s.into)} + lane + j * VL)" if self.blockwise else identity(s)
                start += lane_array(array, "f", begin)
                body.append(update)
                finished[self.versions.next(s.into)] = array
        text.row_arrays |= finished
        text.level = "row"
        body = [*text.column, f"{EACH_VECTOR} {{", *indent(body), "}"]
        return [*text.outer, *start, *self._over_columns(body, phase)]

    def _reduction(self, s: Step, value: Expr) -> tuple[str, str]:
        array, element = self.text.fresh("r"), self.text.f(value)
        return array, f"{array}[j] = {combined(s, element, f'{array}[j]')};"

    def _over_columns(self, body: list[str], phase: Phase) -> list[str]:
        first, last = ("n0", "n1") if self.blockwise else self.unit.span(phase.span, phase.columns)
        if self.pairs:
            return self._in_pairs(body, phase, first, last)
        return self._only_where_it_changes(phase, [f"for (int64_t n = {first}; n < {last}; ++n) {{", *indent(body), "}"])

    def _in_pairs(self, body: list[str], phase: Phase, first: str, last: str) -> list[str]:
        """Two columns at a time: a tile of pairs takes both in one store."""
        kept = [f"vf pair_{tile_name(n)}[2][N];" for n in self.pairs]
        columns = ["UNROLL for (int u = 0; u < 2; ++u) {", "  const int64_t n = even + u;", *indent(body), "}"]
        at = f"(lane / {VECTOR} + j) * {phase.columns * VECTOR} + even * {VECTOR}"
        stores = [f"store_pairs({t} + {at}, pair_{t}[0][j], pair_{t}[1][j]);" for t in map(tile_name, self.pairs)]
        self.pairs = []
        lines = [*kept, *columns, f"{EACH_VECTOR} {{", *indent(stores), "}"]
        return [f"for (int64_t even = {first}; even < {last}; even += 2) {{", *indent(lines), "}"]

    def _only_where_it_changes(self, phase: Phase, loop: list[str]) -> list[str]:
        """`x = x * r` alone in its pass: where r is 1 in every lane, x stays as it is. Exact, and r is 1 most of the time.

        Zeros that are only a flag stay one, unless some r is no number.
        """
        match phase.steps:
            case [Step(into, Op("*", (Var(x), Var(r))))] if x == into and (
                array := self.text.row_arrays.get(self.versions.current(r))
            ):
                if x not in self.unit.zeros or touched((s for s in self.nest.steps if s not in phase.steps), x):
                    return [f"if (any_not_one<N>({array})) {{", *indent(loop), "}"]
                self.guarded.add(x)
                test = f"zero_{x} ? any_not_finite<N>({array}) : any_not_one<N>({array})"
                return [f"if ({test}) {{", *indent([*self.unit.settle(x), *loop]), "}"]
        return loop
