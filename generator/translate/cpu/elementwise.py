"""Loop nests of element-wise statements as C++: what nests of both layouts share. `nests.py` decided what fuses.

`lanes.py` and `rows.py` write the loops of their layout.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from generator.tl.ir import Expr, Var, names
from generator.tl.printer import print_statement
from generator.tl.rewrite import map_children
from generator.translate.cpu.limits import LimitTests
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.nests import Nest
from generator.translate.cpu.ops import Step
from generator.translate.cpu.unit import Unit
from generator.translate.cpu.vectors import EXP_DEGREE, LOAD, STORE, TYPES, Vectors, kind_of

ROUND = {"f32": "{}", "bf16": "vround_bf16({})", "f16": "vround_f16({})", "i32": "{}"}


def comment(s: Step) -> str:
    """The statement that a step was made of."""
    text = next(iter(print_statement(s.origin))).strip()
    return f"// {text}" if s.kind not in ("rowmax", "rowsum") else f"// {s.kind} of: {text}"


class Versions:
    """Static single assignment inside one nest: `S#1` is the value of S after its first assignment there."""

    def __init__(self, tiles: set[str]) -> None:
        self.tiles = tiles
        self.count: dict[str, int] = {}

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


def element_name(version: str) -> str:
    """The C++ variable of one element of a tile's version."""
    return f"e_{version.replace('#', '_').replace('@', '_at_')}"


class NestWriter(ABC):
    """One nest. `after`: tiles whose values are read later, outside of this nest or by a later nest of its section."""

    def __init__(self, unit: Unit, nest: Nest, after: set[str], limits: LimitTests) -> None:
        self.unit, self.nest, self.after, self.limits = unit, nest, after, limits
        self.versioned = {n for s in nest.steps for n in {s.into, *names(s.value)} if n in unit.ops.tiles and unit.tile(n).shape}
        self.versions = Versions(self.versioned)
        self.pairs: list[str] = []  # tiles of pairs that the pass at hand writes
        self.has_edge = False
        self.guarded: set[str] = set()  # tiles that may be a flag for zeros, where this nest takes that into account
        self.in_memory: set[str] = set()  # names of elements that were loaded, so that memory holds their values

    @abstractmethod
    def finish(self, number: int) -> list[str]:
        """Adds the nest's function to the unit; returns the lines that call it."""

    def address(self, name: str, at: str) -> str:
        """Of an element: `at` counts from the tile's start where a statement made the tile."""
        if not self.unit.tile(name).loaded:
            return f"{self.unit.buffer(name)} + {at}"
        return f"w_{name}.p + r * w_{name}.ld + n"

    def load_elements(self, s: Step, text: Vectors, at: str) -> list[str]:
        """The elements that a step reads and that this pass has not yet."""
        out = []
        for n in sorted(names(s.value)):
            if n in self.versioned and self.unit.tile(n).is_element and (v := self.versions.current(n)) not in text.elements:
                kind, name = kind_of(self.unit.tile(n).dtype), element_name(v)
                out.append(f"const {TYPES[kind]} {name} = {LOAD[kind].format(self.address(n, at))};")
                text.elements[v] = name
                self.in_memory.add(name)
        return out

    def assign(self, s: Step, value: Expr, text: Vectors, at: str, position: int) -> list[str]:
        """The element that a step makes, and its store where memory has to hold it. position: of the pass in the nest."""
        dtype = self.unit.tile(s.into).dtype
        kind = kind_of(dtype)
        text.degree = self._degree(s)
        written = text.typed(value, kind)
        text.degree = EXP_DEGREE["f32"]
        version = self.versions.next(s.into)
        text.elements[version] = name = element_name(version)
        if s.into in self.unit.placement.pairs:  # rounded as it is stored
            self.pairs.append(s.into)
            return [f"pair_{tile_name(s.into)}[u][j] = {written};"]
        out = [f"const {TYPES[kind]} {name} = {ROUND[dtype].format(written)};"]
        if self._is_kept(s, position):
            edge_only = "if (EDGE) " if self._only_masks(written, s.into, version) else ""
            out.append(f"{edge_only}{STORE[kind].format(f'{self.unit.buffer(s.into)} + {at}', name)};")
        return out

    def _only_masks(self, written: str, tile: str, version: str) -> bool:
        """Whether the statement changes nothing but in edge tiles: then memory holds the value already."""
        before = element_name(f"{tile}#{int(version.split('#')[1]) - 1}")
        return before in self.in_memory and bool(re.fullmatch(rf"edge_sel<EDGE>\(.*, {before}, \w+\)", written))

    def _is_kept(self, s: Step, position: int) -> bool:
        """Whether an element has to go to memory: its value is read outside of this pass, before the tile is assigned again."""
        steps = self.nest.phases[position].steps
        at = next(i for i, t in enumerate(steps) if t is s)
        if any(t.into == s.into for t in steps[at + 1 :]):
            return False
        for t in (t for phase in self.nest.phases[position + 1 :] for t in phase.steps):
            if s.into in t.reads:
                return True
            if t.into == s.into:
                return False
        return s.into in self.after

    def _degree(self, s: Step) -> int:
        """exp2 as exactly as its value is kept, where the program allows fast functions.

        Sums of it do not count: what divides by them errs alike, and a sum errs no more than its terms do.
        """
        rounded = [t.into for t in self.nest.steps if t.value == Var(s.into) and t.kind == "element"]
        kept = {self.unit.tile(n).dtype for n in rounded}
        if self.unit.program.options["functions"] != "fast" or len(kept) != 1 or s.into in self.after:
            return EXP_DEGREE["f32"]
        (dtype,) = kept
        return EXP_DEGREE.get(dtype, EXP_DEGREE["f32"])


def identity(s: Step) -> str:
    """What a reduction starts from."""
    return "vset(-INF)" if s.kind == "rowmax" else "vset(0)"


def combined(s: Step, element: str, so_far: str) -> str:
    """One more element in a reduction."""
    return f"vmax({element}, {so_far})" if s.kind == "rowmax" else f"{so_far} + {element}"
