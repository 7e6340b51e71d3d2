"""Loop nests of element-wise statements as C++ member functions. What fuses was decided in `nests.py`."""

from __future__ import annotations

import re

from generator.tl.ir import Expr, Op, Var, names
from generator.tl.printer import print_statement
from generator.tl.rewrite import map_children
from generator.translate.cpu.folding import touched
from generator.translate.cpu.limits import LimitTests
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.nests import Nest, Phase
from generator.translate.cpu.ops import Step
from generator.translate.cpu.unit import Unit, indent, padded
from generator.translate.cpu.vectors import TYPES, LaneVectors, RowVectors, Vectors

ROUND = {"f32": "{}", "bf16": "vround_bf16({})", "f16": "vround_f16({})", "i32": "{}"}
SCALAR_ROUND = {"f32": "{}", "bf16": "round_bf16({})", "f16": "round_f16({})", "i32": "(int32_t)({})"}


def comment(s: Step) -> str:
    text = next(iter(print_statement(s.origin))).strip()
    return f"// {text}" if s.kind not in ("rowmax", "rowsum") else f"// {s.kind} of: {text}"


class Versions:
    """Static single assignment inside one nest: `S#1` is the value of S after its first assignment there."""

    def __init__(self, tiles: set[str]) -> None:
        self.tiles, self.count = tiles, {}  # type: ignore[var-annotated]

    def current(self, name: str) -> str:
        return f"{name}#{self.count.get(name, 0)}"

    def next(self, name: str) -> str:
        self.count[name] = self.count.get(name, 0) + 1
        return self.current(name)

    def rename(self, e: Expr) -> Expr:
        """The expression with each tile's name replaced by its current version's."""
        if isinstance(e, Var) and e.name in self.tiles:
            return Var(self.current(e.name))
        return map_children(e, self.rename)


class NestWriter:
    """One nest. `after`: tiles whose values are read later, outside of this nest or by a later nest of its section.

    blockwise: one pass, of columns [n0, n1) that the caller names; its maxima go on from what memory holds.
    """

    def __init__(self, unit: Unit, nest: Nest, after: set[str], limits: LimitTests, blockwise: bool = False) -> None:
        self.unit, self.nest, self.after, self.limits = unit, nest, after, limits
        self.versioned = {n for s in nest.steps for n in {s.into, *names(s.value)} if n in unit.ops.tiles and unit.tile(n).shape}
        self.versions = Versions(self.versioned)
        self.pairs: list[str] = []  # tiles of pairs that the pass at hand writes
        self.blockwise, self.has_edge = blockwise, False
        self.guarded: set[str] = set()  # tiles that may be a flag for zeros, where this nest takes that into account
        self.in_memory: set[str] = set()  # names of elements that were loaded, so that memory holds their values

    def finish(self, number: int) -> list[str]:
        """Adds the function to the unit; returns the lines that call it."""
        match self.nest.kind:
            case "lanes":
                return self._lanes(number)
            case "rows":
                return self._rows(number)
            case "scalars":
                return self._scalars()

    # -------------------------------------------------------------------------------------------------- scalars

    def _scalars(self) -> list[str]:
        out = []
        for s in self.nest.steps:
            whole = self.unit.tile(s.into).dtype == "i32"
            text = self.unit.names.text(s.value, as_float=not whole)
            out += [comment(s), f"{tile_name(s.into)} = {SCALAR_ROUND[self.unit.tile(s.into).dtype].format(text)};"]
        return out

    # ------------------------------------------------------------------------------------------- rows in lanes

    def _lanes(self, number: int) -> list[str]:
        self.text = LaneVectors(self.unit.names, self.limits)
        body: list[str] = []
        for i, phase in enumerate(self.nest.phases):
            body += self._row_phase(phase) if phase.over == "rows" else self._column_phase(phase, i)
        body += self._store_rows()
        self.has_edge = any("EDGE" in x for x in body)
        flags, given = (
            (", bool EDGE" if self.has_edge else ""),
            (", const int64_t n0, const int64_t n1" if self.blockwise else ""),
        )
        head = f"template <int N{flags}> MEMBER void nest{number}(const int64_t lane{given}) {{"
        self.unit.functions += [head, *indent(self.text.top + body), "}"]
        return self._calls(number)

    def _calls(self, number: int) -> list[str]:
        """Every block of lanes, and a narrower one."""
        rows, flags = padded(self.nest.rows), ", EDGE" if self.has_edge else ""
        phase = self.nest.phases[0]
        given = ", {}, {}".format(*self.unit.span(phase.span, phase.columns)) if self.blockwise else ""
        calls = [f"for (int64_t lane = 0; lane + LANES <= {rows}; lane += LANES) nest{number}<NV{flags}>(lane{given});"]
        if self.nest.rows % 64:
            rest = f"nest{number}<{rows} % LANES / VL{flags}>({rows} - {rows} % LANES{given});"
            calls.append(f"if constexpr ({rows} % LANES != 0) {rest}")
        return calls

    def _row_phase(self, phase: Phase) -> list[str]:
        out: list[str] = []
        for s in phase.steps:
            self.text.level, self.text.outer = "row", []
            self._load_rows(s)
            dtype = self.unit.tile(s.into).dtype
            value = self.versions.rename(s.value)
            text = self.text.text(value) if dtype == "i32" else self.text.f(value)
            array = self.text.fresh("r")
            self.text.row_arrays[self.versions.next(s.into)] = array
            kind = TYPES["i" if dtype == "i32" else "f"]
            out += [*self.text.outer, comment(s), f"{kind} {array}[N];"]
            out.append(f"UNROLL for (int j = 0; j < N; ++j) {array}[j] = {ROUND[dtype].format(text)};")
        return out

    def _load_rows(self, s: Step) -> None:
        """Row values that were made before this nest."""
        for n in sorted(names(s.value)):
            if (
                n in self.versioned
                and not self.unit.tile(n).is_element
                and (v := self.versions.current(n)) not in self.text.row_arrays
            ):
                whole = self.unit.tile(n).dtype == "i32"
                array = self.text.fresh("r")
                load = "viload" if whole else "vload"
                self.text.outer += [
                    f"{'vi' if whole else 'vf'} {array}[N];",
                    f"UNROLL for (int j = 0; j < N; ++j) {array}[j] = {load}({tile_name(n)} + lane + j * VL);",
                ]
                self.text.row_arrays[v] = array

    def _store_rows(self) -> list[str]:
        out = []
        for n in sorted(self.versions.count):
            if n in self.after and not self.unit.tile(n).is_element:
                store = "vistore" if self.unit.tile(n).dtype == "i32" else "vstore"
                array = self.text.row_arrays[self.versions.current(n)]
                out.append(f"UNROLL for (int j = 0; j < N; ++j) {store}({tile_name(n)} + lane + j * VL, {array}[j]);")
        return out

    def _column_phase(self, phase: Phase, position: int) -> list[str]:
        """One loop over the columns; every statement of the phase in its body, element by element."""
        text, ld = self.text, padded(self.nest.rows)
        text.outer, start = [], []
        for s in phase.steps:
            self._load_rows(s)
        text.start_columns()
        before, body, finished = [], [], {}
        for s in phase.steps:
            body += self._load_elements(s, text, f"n * {ld} + lane + j * VL")
            value = self.versions.rename(s.value)
            body.append(comment(s))
            if s.kind == "element":
                body += self._assign(s, value, text, f"n * {ld} + lane + j * VL", position)
            else:
                array, update = self._reduction(s, value)
                begin = f"vload({tile_name(s.into)} + lane + j * VL)" if self.blockwise else self._identity(s)
                start += [f"vf {array}[N];", f"UNROLL for (int j = 0; j < N; ++j) {array}[j] = {begin};"]
                body.append(update)
                finished[self.versions.next(s.into)] = array
        before = [*text.outer, *start]
        text.row_arrays |= finished
        text.level = "row"
        first, last = ("n0", "n1") if self.blockwise else self.unit.span(phase.span, phase.columns)
        body = [*text.column, "UNROLL for (int j = 0; j < N; ++j) {", *indent(body), "}"]
        if self.pairs:
            return [*before, *self._in_pairs(body, phase, first, last)]
        loop = [f"for (int64_t n = {first}; n < {last}; ++n) {{", *indent(body), "}"]
        return [*before, *self._only_where_it_changes(phase, loop)]

    def _in_pairs(self, body: list[str], phase: Phase, first: str, last: str) -> list[str]:
        """Two columns at a time: a tile of pairs takes both in one store."""
        kept = [f"vf pair_{tile_name(n)}[2][N];" for n in self.pairs]
        columns = ["UNROLL for (int u = 0; u < 2; ++u) {", "  const int64_t n = even + u;", *indent(body), "}"]
        stores = [
            f"store_pairs({t} + (lane / 16 + j) * {phase.columns * 16} + even * 16, pair_{t}[0][j], pair_{t}[1][j]);"
            for t in map(tile_name, self.pairs)
        ]
        stores = ["UNROLL for (int j = 0; j < N; ++j) {", *indent(stores), "}"]
        self.pairs = []
        return [f"for (int64_t even = {first}; even < {last}; even += 2) {{", *indent([*kept, *columns, *stores]), "}"]

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

    @staticmethod
    def _identity(s: Step) -> str:
        return "vset(-INF)" if s.kind == "rowmax" else "vset(0)"

    def _reduction(self, s: Step, value: Expr) -> tuple[str, str]:
        array, element = self.text.fresh("r"), self.text.f(value)
        combined = f"vmax({element}, {array}[j])" if s.kind == "rowmax" else f"{array}[j] + {element}"
        return array, f"{array}[j] = {combined};"

    # ------------------------------------------------------------------------------------- elements, both layouts

    def _load_elements(self, s: Step, text: LaneVectors | RowVectors, at: str) -> list[str]:
        out = []
        for n in sorted(names(s.value)):
            if n in self.versioned and self.unit.tile(n).is_element and (v := self.versions.current(n)) not in text.elements:
                name = f"e_{v.replace('#', '_').replace('@', '_at_')}"
                whole = self.unit.tile(n).dtype == "i32"
                out.append(f"const {'vi' if whole else 'vf'} {name} = {'viload' if whole else 'vload'}({self._address(n, at)});")
                text.elements[v] = name
                self.in_memory.add(name)
        return out

    def _address(self, n: str, at: str) -> str:
        if not self.unit.tile(n).loaded:
            return f"{self.unit.buffer(n)} + {at}"
        if n in self.unit.placement.turned and self.nest.kind == "lanes":
            return f"q_{n} + {at}"
        return f"w_{n}.p + r * w_{n}.ld + n"

    def _assign(self, s: Step, value: Expr, text: LaneVectors | RowVectors, at: str, position: int) -> list[str]:
        dtype = self.unit.tile(s.into).dtype
        whole = dtype == "i32"
        text.degree = self._degree(s)
        written = text.text(value) if whole else text.f(value)
        text.degree = 5
        version = self.versions.next(s.into)
        name = f"e_{version.replace('#', '_').replace('@', '_at_')}"
        text.elements[version] = name
        if s.into in self.unit.placement.pairs:  # rounded as it is stored
            self.pairs.append(s.into)
            return [f"pair_{tile_name(s.into)}[u][j] = {written};"]
        out = [f"const {'vi' if whole else 'vf'} {name} = {ROUND[dtype].format(written)};"]
        if self._is_kept(s, position):
            only_masks = self._only_masks(written, s.into, version)
            store = "vistore" if whole else "vstore"
            out.append(f"{'if (EDGE) ' if only_masks else ''}{store}({self.unit.buffer(s.into)} + {at}, {name});")
        return out

    def _only_masks(self, written: str, tile: str, version: str) -> bool:
        """Whether the statement changes nothing but in edge tiles: then memory holds the value already."""
        before = f"e_{tile.replace('@', '_at_')}_{int(version.split('#')[1]) - 1}"
        return before in self.in_memory and bool(re.fullmatch(rf"edge_sel<EDGE>\(.*, {before}, \w+\)", written))

    def _is_kept(self, s: Step, position: int) -> bool:
        """Whether an element has to go to memory: its value is read outside of this pass, before the tile is assigned again."""
        steps = self.nest.phases[position].steps
        for t in steps[next(i for i, t in enumerate(steps) if t is s) + 1 :]:
            if t.into == s.into:
                return False
        for phase in self.nest.phases[position + 1 :]:
            for t in phase.steps:
                if s.into in t.reads:
                    return True
                if t.into == s.into:
                    return False
        return s.into in self.after

    def _degree(self, s: Step) -> int:
        """exp2 as exactly as its value is kept, where the program allows fast functions.

        Sums of it do not count: what divides by them errs alike, and a sum errs no more than its terms do.
        """
        if self.unit.program.options.get("functions") != "fast":
            return 5
        rounded = [t.into for t in self.nest.steps if t.value == Var(s.into) and t.kind == "element"]
        kept = {self.unit.tile(n).dtype for n in rounded} if rounded and s.into not in self.after else set()
        return 3 if kept == {"bf16"} else 4 if kept == {"f16"} else 5

    # ------------------------------------------------------------------------------------------------ row by row

    def _rows(self, number: int) -> list[str]:
        text = RowVectors(self.unit.names, self.limits)
        (phase,) = self.nest.phases
        width = padded(phase.columns)
        body: list[str] = []
        reductions: list[tuple[Step, str]] = []
        for s in phase.steps:
            body += self._load_elements(s, text, f"r * {width} + n")
            value = self.versions.rename(s.value)
            body.append(comment(s))
            if s.kind == "element":
                body += self._assign(s, value, text, f"r * {width} + n", 0)
            else:
                body.append(self._row_reduction(s, value, text, phase.columns))
                reductions.append((s, f"s_{tile_name(s.into)}"))
        starts = [f"vf {x} = {self._identity(s)};" for s, x in reductions]
        ends = [f"{tile_name(s.into)}[r] = {'vhmax' if s.kind == 'rowmax' else 'vhadd'}({x});" for s, x in reductions]
        first, last = self.unit.span(phase.span, phase.columns)
        begin = first if first == "0" else f"{first} / VL * VL"
        loop = [f"for (int64_t n = {begin}; n < {last}; n += VL) {{", *indent(body), "}"]
        rows = [
            f"for (int64_t r = 0; r < {self.unit.rows(self.nest.rows)}; ++r) {{",
            *indent([*text.row, *starts, *loop, *ends]),
            "}",
        ]
        has_edge = any("EDGE" in x for x in rows)
        head = f"{'template <bool EDGE> ' if has_edge else ''}MEMBER void nest{number}() {{"
        self.unit.functions += [head, *indent([*text.top, *rows]), "}"]
        return [f"nest{number}{'<EDGE>' if has_edge else ''}();"]

    def _row_reduction(self, s: Step, value: Expr, text: Vectors, columns: int) -> str:
        x, element = f"s_{tile_name(s.into)}", text.f(value)
        if columns % 16:  # lanes past the last column take no part
            element = f"vsel(vlt(viset(n) + viota(), viset({columns})), {element}, {self._identity(s)})"
        return f"{x} = " + (f"vmax({element}, {x});" if s.kind == "rowmax" else f"{x} + {element};")
