"""Nests whose tiles lie row by row, columns in lanes; and runs of single values, which need no loop."""

from __future__ import annotations

from generator.tl.ir import Expr
from generator.translate.cpu.elementwise import NestWriter, combined, comment, identity
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Step
from generator.translate.cpu.unit import indent
from generator.translate.cpu.vectors import RowVectors
from generator.translate.cpu.widths import VECTOR, padded

SCALAR_ROUND = {"f32": "{}", "bf16": "round_bf16({})", "f16": "round_f16({})", "i32": "(int32_t)({})"}


class ScalarNest(NestWriter):
    """One value a block: assignments where they stand."""

    def finish(self, number: int) -> list[str]:
        out = []
        for s in self.nest.steps:
            dtype = self.unit.tile(s.into).dtype
            text = self.unit.names.text(s.value, as_float=dtype != "i32")
            out += [comment(s), f"{tile_name(s.into)} = {SCALAR_ROUND[dtype].format(text)};"]
        return out


class RowNest(NestWriter):
    """One column phase, row by row."""

    def finish(self, number: int) -> list[str]:
        text = RowVectors(self.unit.names, self.limits)
        (phase,) = self.nest.phases
        at = f"r * {padded(phase.columns)} + n"
        body: list[str] = []
        reductions: list[tuple[Step, str]] = []
        for s in phase.steps:
            body += self.load_elements(s, text, at)
            value = self.versions.rename(s.value)
            body.append(comment(s))
            if s.kind == "element":
                body += self.assign(s, value, text, at, 0)
            else:
                so_far = f"s_{tile_name(s.into)}"
                body.append(f"{so_far} = {combined(s, self._element(s, value, text, phase.columns), so_far)};")
                reductions.append((s, so_far))
        first, last = self.unit.span(phase.span, phase.columns)
        begin = first if first == "0" else f"{first} / VL * VL"
        loop = [f"for (int64_t n = {begin}; n < {last}; n += VL) {{", *indent(body), "}"]
        starts = [f"vf {x} = {identity(s)};" for s, x in reductions]
        ends = [f"{tile_name(s.into)}[r] = {'vhmax' if s.kind == 'rowmax' else 'vhadd'}({x});" for s, x in reductions]
        rows = f"for (int64_t r = 0; r < {self.unit.rows(self.nest.rows)}; ++r) {{"
        return self._function(number, text.top, [rows, *indent([*text.row, *starts, *loop, *ends]), "}"])

    def _function(self, number: int, top: list[str], rows: list[str]) -> list[str]:
        self.has_edge = any("EDGE" in x for x in rows)
        template, flag = ("template <bool EDGE> ", "<EDGE>") if self.has_edge else ("", "")
        self.unit.functions += [f"{template}MEMBER void nest{number}() {{", *indent([*top, *rows]), "}"]
        return [f"nest{number}{flag}();"]

    @staticmethod
    def _element(s: Step, value: Expr, text: RowVectors, columns: int) -> str:
        """What a reduction takes; lanes past the last column give what changes nothing."""
        element = text.f(value)
        if columns % VECTOR:
            return f"vsel(vlt(viset(n) + viota(), viset({columns})), {element}, {identity(s)})"
        return element
