"""Rank and kind of expressions inside the CPU translator, whose tiles carry version marks. Checks nothing."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import COLS, ROWS, Expr, Index, Num, Op, Program, Var
from generator.translate.cpu.ops import Tile
from generator.translate.passes.scope import INTEGER_FUNCTIONS, TEST_FUNCTIONS, Rank


def plain(name: str) -> str:
    """The tile's name without its version: `S#2` is the third value of S in one loop nest."""
    return name.split("#")[0]


@dataclass(frozen=True, slots=True)
class Types:
    """`tiles` is shared with the ops: temporaries that later stages add are seen here."""

    tiles: dict[str, Tile]
    floats: frozenset[str]  # float scalars and captured tensors of floats

    @staticmethod
    def of(program: Program, tiles: dict[str, Tile]) -> Types:
        floats = {n for n, a in program.arguments.items() if a.dtype != "i32"}
        return Types(
            tiles, frozenset(floats | {a.name for a in program.allocations.values() if a.level == "global" and a.dtype != "i32"})
        )

    def tile(self, e: Expr) -> Tile | None:
        return self.tiles.get(plain(e.name)) if isinstance(e, Var) else None

    def rank(self, e: Expr) -> Rank:
        match e:
            case Num():
                return Rank.SCALAR
            case Var():
                if e in (ROWS, COLS):
                    return Rank.ROW if e == ROWS else Rank.COL
                tile = self.tile(e)
                return (Rank.SCALAR, Rank.ROW, Rank.ELEMENT)[len(tile.shape)] if tile else Rank.SCALAR
            case Op("rowmax" | "rowsum"):
                return Rank.ROW
            case Op(_, parts) | Index(_, parts):
                out = Rank.SCALAR
                for p in parts:
                    out |= self.rank(p)
                return out

    def is_integer(self, e: Expr) -> bool:
        match e:
            case Num(value):
                return isinstance(value, int)
            case Var(name):
                tile = self.tile(e)
                return tile.dtype == "i32" if tile else name not in self.floats
            case Index(name, _):
                return name not in self.floats
            case Op("where", (_, a, b)):
                return self.is_integer(a) and self.is_integer(b)
            case Op("floor", (a,)):
                return self.is_integer(a)
            case Op(fn, args):
                return fn in INTEGER_FUNCTIONS and all(self.is_integer(a) for a in args)

    def is_test(self, e: Expr) -> bool:
        return isinstance(e, Op) and (e.fn in TEST_FUNCTIONS or e.fn == "where" and self.is_test(e.args[1]))
