"""Everything that the emitters of one kernel share: the ops, where tiles lie, the limits of each loop. Decides nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from generator.tl.ir import Allocate, Copy, Expr, Program
from generator.translate.cpu.layouts import Layout, Placement
from generator.translate.cpu.limits import LimitTests
from generator.translate.cpu.names import Names, tile_name
from generator.translate.cpu.ops import Ops, Tile
from generator.translate.cpu.types import Types
from generator.translate.passes import Analysis

ELEMENT_TYPES = {"f32": "float", "f16": "f16", "bf16": "bf16", "i32": "int32_t"}
Form = Literal["rows", "rows16", "turned16"]


@dataclass(frozen=True, slots=True)
class Pack:
    """One packed form of a loaded tile. size: bytes of a tile, as C++ text; the tiles of all packs lie behind each other."""

    copy: Copy
    form: Form
    size: str

    @property
    def tile(self) -> str:
        return self.copy.into


@dataclass(slots=True)
class Unit:
    """One kernel: what was decided of it, and the texts that emitters add as they go (`functions`, `members`, `decisions`).

    limits: loop -> the columns that its rows see. spans: (loop, tile): the tile's columns are computed only where that loop's
    rows see them. live_rows: how many rows of a block some output keeps; None where all are computed.
    """

    program: Program
    analysis: Analysis
    ops: Ops
    types: Types
    names: Names
    placement: Placement
    limits: dict[int, LimitTests]
    spans: frozenset[tuple[int, str]]
    live_rows: Expr | None
    block_rows: int
    chunked: frozenset[int]  # loops whose visible columns are taken in chunks of 32, as bf16 products want them
    packs: tuple[Pack, ...] = ()
    zeros: frozenset[str] = frozenset()  # tiles whose first zeros are a flag: products start from it
    functions: list[str] = field(default_factory=list)  # member functions of the block, finished texts
    members: list[str] = field(default_factory=list)  # declarations of the block's variables
    decisions: list[str] = field(default_factory=list)  # one line a nest, for the schedule

    def tile(self, name: str) -> Tile:
        return self.ops.tiles[name]

    def matrix(self, name: str) -> Allocate:
        return self.program.allocations[name]

    def buffer(self, name: str) -> str:
        return tile_name(self.placement.buffer.get(name, name))

    def is_lanes(self, name: str) -> bool:
        return self.placement.layout[name] is Layout.LANES

    def settle(self, name: str) -> list[str]:
        """Before anything but a product touches a tile that may still be a flag: its zeros are written."""
        if name not in self.zeros:
            return []
        return [f"if (zero_{name}) clear({tile_name(name)}, sizeof {tile_name(name)}), zero_{name} = false;"]

    def rows(self, rows: int) -> str:
        """How many rows of a tile of `rows` rows count: those that some output keeps, in a block whose rows stay apart."""
        return "live_rows" if self.live_rows is not None and rows == self.block_rows else str(rows)

    def span_of(self, name: str, loop: int | None) -> int | None:
        """The loop whose visible columns bound a tile's columns, for a statement in the body of `loop`."""
        return loop if loop is not None and (loop, name) in self.spans else None

    def columns(self, name: str, loop: int | None) -> tuple[str, str]:
        """The columns of a tile that hold values: all, or those that some row of the block may see."""
        return self.span(self.span_of(name, loop), self.tile(name).shape[1])

    @staticmethod
    def span(loop: int | None, columns: int) -> tuple[str, str]:
        return ("0", str(columns)) if loop is None else (f"first{loop}", f"last{loop}")


def indent(lines: list[str], by: int = 1) -> list[str]:
    return ["  " * by + x for x in lines]
