"""Rank and kind of expressions inside the CPU translator, whose tiles carry version marks. Checks nothing."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import COLS, ROWS, Expr, Index, Num, Op, Program, Var
from generator.tl.types import Kind, Rank, Typing, join, kind_of_dtype, operation
from generator.translate.cpu.ops import Tile


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

    def typing(self, e: Expr) -> Typing:
        """Rank and kind, by the language's own table of operations."""
        match e:
            case Num(value):
                return Typing(Rank.SCALAR, Kind.INT if isinstance(value, int) else Kind.FLOAT)
            case Var(name):
                if e in (ROWS, COLS):
                    return Typing(Rank.ROW if e == ROWS else Rank.COL, Kind.INT)
                tile = self.tile(e)
                if tile is None:
                    return Typing(Rank.SCALAR, Kind.FLOAT if name in self.floats else Kind.INT)
                return Typing((Rank.SCALAR, Rank.ROW, Rank.ELEMENT)[len(tile.shape)], kind_of_dtype(tile.dtype))
            case Index(name, indices):
                return Typing(join(*(self.rank(i) for i in indices)), Kind.FLOAT if name in self.floats else Kind.INT)
            case Op(fn, args):
                return operation(fn, [self.typing(a) for a in args])

    def rank(self, e: Expr) -> Rank:
        return self.typing(e).rank

    def is_integer(self, e: Expr) -> bool:
        return self.typing(e).kind is Kind.INT

    def is_test(self, e: Expr) -> bool:
        return self.typing(e).kind is Kind.BOOL
