"""What each name of a program means, block by block in textual order: defined once, before it is used, never hidden.

Tiles and matrices are the whole program's from the statement that makes them; Lets and loop variables end with their block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from generator.tl.checks.report import Report, name_list
from generator.tl.expressions import did_you_mean
from generator.tl.grammar import RESERVED
from generator.tl.ir import (
    Allocate,
    Argument,
    Constant,
    Copy,
    For,
    Grid,
    Let,
    Named,
    Program,
    Reshape,
    Span,
    Stmt,
    walk_statements,
)
from generator.tl.types import Kind, Rank, Tile, Typing


@dataclass(slots=True)
class Scope:
    """The names that an expression may use at one place of the text.

    `typings` holds scalars and Lets; a Let whose value is wrong has None: it is known, and says nothing more. `later` is where
    each name of the program is first defined, for hints; about `silent` names everything has been said; `unpromised` arguments
    need not be positive.
    """

    report: Report
    later: dict[str, Span]
    silent: set[str] = field(default_factory=set)
    typings: dict[str, Typing | None] = field(default_factory=dict)
    tiles: dict[str, Tile] = field(default_factory=dict)
    matrices: dict[str, Allocate] = field(default_factory=dict)
    places: dict[str, Span] = field(default_factory=dict)
    let_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    block: set[str] = field(default_factory=set)
    unpromised: set[str] = field(default_factory=set)

    @staticmethod
    def of(program: Program, report: Report, silent: Iterable[str] = ()) -> Scope:
        later: dict[str, Span] = {}
        for name, span in _definitions(program.body):
            later.setdefault(name, span)
        return Scope(report, later, set(silent))

    def inner(self) -> Scope:
        """The scope of a block: what it declares ends with it, tiles excepted."""
        return Scope(
            self.report,
            self.later,
            self.silent,
            dict(self.typings),
            self.tiles,
            self.matrices,
            dict(self.places),
            self.let_sizes,
            unpromised=self.unpromised,
        )

    def define(self, name: str, typing: Typing | None, span: Span) -> None:
        """A scalar or a Let. A name that is taken is reported and keeps its first meaning."""
        if self.is_free(name, span):
            self.typings[name] = typing
            self._take(name, span)

    def define_matrix(self, s: Allocate) -> None:
        if self.is_free(s.name, s.span):
            self.matrices[s.name] = s
            self._take(s.name, s.span)

    def allocate_tile(self, tile: Tile, span: Span) -> None:
        if self.is_free(tile.name, span):
            self.tiles[tile.name] = tile
            self._take(tile.name, span)

    def make_tile(self, tile: Tile, span: Span, of_matrix: bool = False) -> None:
        """A tile that a Copy or a Reshape makes. One that exists stays as it is: shapes are compared elsewhere.

        of_matrix: `Copy K from global to shared` makes a tile that has its matrix's name.
        """
        if tile.name in self.tiles:
            return
        if of_matrix:
            self.tiles[tile.name] = tile
        else:
            self.allocate_tile(tile, span)

    def _take(self, name: str, span: Span) -> None:
        self.places[name] = span
        self.block.add(name)

    def is_free(self, name: str, span: Span) -> bool:
        """Whether the name may be defined here; says so if not."""
        if name.lower() in RESERVED:
            self.report.error("reserved-name", f"{name} is a word of the language", span, "choose another name", found=name)
            return False
        if name not in self.places:
            return True
        place = f"line {self.places[name].line}" if self.places[name].line else "above"
        if name in self.block:
            hint = "each name is defined once"
            self.report.error("duplicate-name", f"{name} is defined already ({place})", span, hint, found=name)
        else:
            hint = "a name of an outer block cannot be reused inside: choose another"
            self.report.error("shadowing", f"{name} hides the one of {place}", span, hint, found=name)
        return False

    def first_report(self, name: str) -> bool:
        """Whether something may be said about this name: once for each, never for names whose line could not be read."""
        new = name not in self.silent
        self.silent.add(name)
        return new

    def of_name(self, name: str) -> Typing | None:
        """The typing of a name in an expression, None if it has none or none that is known."""
        if name in POSITIONS:
            return POSITIONS[name]
        return self.tiles[name].typing if name in self.tiles else self.typings.get(name)

    def knows(self, name: str) -> bool:
        return name in POSITIONS or name in self.tiles or name in self.typings

    def unknown(self, name: str, span: Span, what: str = "name") -> None:
        """Report a name that nothing has at this place; silent for names that stand in a line with a mistake of its own."""
        if not self.first_report(name):
            return
        if name in self.later and name not in self.places:
            line = self.later[name].line
            where = f" (line {line})" if line else ""
            if line == span.line:
                hint = "it cannot be defined by itself: give the new value another name, or keep it in a tile"
            else:
                hint = "move the definition up" if line > span.line else "it ends with its block: define it where it is needed"
            self.report.error("use-before-definition", f"{name} is not defined here{where}", span, hint, found=name)
            return
        known = [*self.typings, *self.tiles, *self.matrices, *POSITIONS]
        hint = did_you_mean(name, known) or f"known here: {name_list(known)}"
        self.report.error("unknown-name", f"{name} is no {what} of this program", span, hint, found=name)


POSITIONS = {"rows": Typing(Rank.ROW, Kind.INT), "cols": Typing(Rank.COL, Kind.INT)}


def _definitions(body: tuple[Stmt, ...]) -> Iterator[tuple[str, Span]]:
    for s in walk_statements(body):
        match s:
            case Argument():
                yield from ((name, s.span) for name in s.names)
            case Grid():
                yield from ((axis.name, axis.span) for axis in s.axes)
            case Constant() | Let() | Allocate():
                yield s.name, s.span
            case For():
                yield s.var, s.span
            case Copy() if s.into_level != "global":
                yield s.into, s.span
            case Reshape():
                yield s.into, s.span
            case Named() if s.into is not None:
                yield s.into, s.span
