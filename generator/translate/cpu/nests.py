"""Runs of element-wise statements as loop nests: what fuses into one pass over a tile, in which order. Emits no text.

A LANES nest walks blocks of lanes; inside, row phases (vertical code on row values) alternate with column phases (one loop over
the columns). A ROWS nest is one column phase, run row by row. Statements move to the earliest place that their dependences allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from generator.tl.ir import Expr, Op, Var
from generator.tl.types import Rank
from generator.translate.cpu.layouts import Layout, Placement, step_layout
from generator.translate.cpu.ops import Ops, Step, Tile
from generator.translate.cpu.types import Types

NestKind = Literal["lanes", "rows", "scalars"]


@dataclass(slots=True)
class Phase:
    """Steps of one pass: over row values, or over the columns of a tile. span: the loop whose visible columns they keep to."""

    over: Literal["rows", "columns"]
    columns: int
    span: int | None
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Nest:
    kind: NestKind
    rows: int
    phases: list[Phase] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [s for p in self.phases for s in p.steps]


def split_first(nest: Nest, made: str, tiles: dict[str, Tile]) -> tuple[Nest, Nest] | None:
    """The first pass as a nest of its own, where it only changes the tile `made` in place and takes maxima of it.

    Such a pass can run block by block, in any order of the blocks, while the tile is being made.
    """
    first, *others = nest.phases
    if nest.kind != "lanes" or first.over != "columns" or first.columns != tiles[made].shape[1]:
        return None
    if not all(s.kind == "rowmax" or (s.kind == "element" and s.into == made) for s in first.steps):
        return None
    if any(tiles[x].is_element and x != made for s in first.steps for x in s.reads if x in tiles):
        return None
    return Nest("lanes", nest.rows, [first]), Nest("lanes", nest.rows, others)


class Sections:
    """Schedules sections of one program. spans: (loop, tile) where a loop bounds the columns of a tile."""

    def __init__(self, ops: Ops, types: Types, placement: Placement, spans: frozenset[tuple[int, str]]) -> None:
        self.ops, self.types, self.placement, self.spans = ops, types, placement, spans
        self.loop = -1
        self.num_temporaries = 0

    def nests(self, section: list[Step], loop: int) -> list[Nest]:
        """The nests of statements that follow each other in the body of `loop` (-1: of the block)."""
        self.loop = loop
        out: list[Nest] = []
        for original in section:
            for s in self._with_row_values(original):
                self._put(s, out)
        return out

    def _with_row_values(self, s: Step) -> list[Step]:
        """A ROWS statement finds its row values in memory: each is a step of its own before it."""
        if s.kind not in ("element", "rowmax", "rowsum") or step_layout(s, self.ops, self.placement) is Layout.LANES:
            return [s]
        rows, before = self._rows(s), []

        def take(e: Expr) -> Expr:
            if self.types.rank(e) is Rank.ROW and self.types.tile(e) is None and not self.types.is_test(e):
                name = f"row@{self.num_temporaries}"
                self.num_temporaries += 1
                self.ops.tiles[name] = Tile(name, (rows,), "i32" if self.types.is_integer(e) else "f32")
                before.append(Step(name, e, "row", s.origin))
                return Var(name)
            return Op(e.fn, tuple(take(a) for a in e.args), span=e.span) if isinstance(e, Op) else e

        value = take(s.value)
        return [*before, replace(s, value=value)] if before else [s]

    def _rows(self, s: Step) -> int:
        return self.ops.tiles[s.into].rows

    def _put(self, s: Step, nests: list[Nest]) -> None:
        kind, rows = self._key(s)
        for i in range(len(nests) - 1, -2, -1):
            if i < 0 or any(self._conflict(t, s) for t in nests[i].steps):
                break
        for nest in nests[max(i, 0) :]:
            if nest.kind == kind and nest.rows == rows and self._join(s, nest):
                return
        nest = Nest(kind, rows)
        nests.append(nest)
        self._join(s, nest)

    def _key(self, s: Step) -> tuple[NestKind, int]:
        if s.kind == "scalar":
            return "scalars", 1
        if s.kind == "row" or step_layout(s, self.ops, self.placement) is Layout.LANES:
            return "lanes", self._rows(s)
        return "rows", self._rows(s)

    def _join(self, s: Step, nest: Nest) -> bool:
        over: Literal["rows", "columns"] = "rows" if s.kind in ("row", "scalar") else "columns"
        columns, span = (0, None) if over == "rows" else self._columns(s)
        first = 0
        for i in range(len(nest.phases) - 1, -1, -1):
            if clashing := [t for t in nest.phases[i].steps if self._conflict(t, s)]:
                first = i + (over != nest.phases[i].over or (over == "columns" and any(self._by_row(t, s) for t in clashing)))
                break
        for phase in nest.phases[first:]:
            if (phase.over, phase.columns, phase.span) == (over, columns, span):
                phase.steps.append(s)
                return True
        if nest.kind == "rows" and nest.phases:
            return False
        nest.phases.append(Phase(over, columns, span, [s]))
        return True

    def _columns(self, s: Step) -> tuple[int, int | None]:
        tiles = [x for x in (s.into, *sorted(s.reads)) if x in self.ops.tiles and self.ops.tiles[x].is_element]
        return self.ops.tiles[tiles[0]].shape[1], self.loop if (self.loop, tiles[0]) in self.spans else None

    def _memory(self, name: str) -> str:
        return self.placement.buffer.get(name, name)

    def _conflict(self, first: Step, then: Step) -> bool:
        """Whether two steps have to keep their order."""
        wrote, writes = self._memory(first.into), self._memory(then.into)
        return (
            wrote == writes
            or any(self._memory(x) == wrote for x in then.reads)
            or any(self._memory(x) == writes for x in first.reads)
        )

    def _by_row(self, first: Step, then: Step) -> bool:
        """Whether the order matters beyond one element: then the two cannot stand in one pass over the columns."""
        return first.kind != "element" and first.into in then.reads or then.kind != "element" and then.into in first.reads
