"""Rank and kind of every expression: what the checker, the interpreter and the translators agree on. Reports nothing.

Rank says how a value varies over the tile that a statement writes: not at all, by row, by column, by element. Kind says how it is
computed: exact integers, f32 floats, or tests. An integer turns into a float where it meets one, or where a float is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum

from generator.tl.ir import (
    Allocate,
    Argument,
    Constant,
    Copy,
    DType,
    Expr,
    For,
    Grid,
    Index,
    Level,
    Num,
    Op,
    Program,
    Reshape,
    Var,
    walk_statements,
)


class Rank(IntFlag):
    """What a value depends on inside a tile; the rank of a combination is the union of its parts'."""

    SCALAR = 0
    ROW = 1
    COL = 2
    ELEMENT = 3


class Kind(StrEnum):
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"


@dataclass(frozen=True, slots=True)
class Typing:
    rank: Rank
    kind: Kind


@dataclass(frozen=True, slots=True)
class Tile:
    """A block-wide tile in shared memory or registers; `shape` has two axes, or one: a value a row.

    operand: made by a Reshape, read by GEMMs only.
    """

    name: str
    level: Level
    shape: tuple[Expr, ...]
    dtype: DType
    operand: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of a tile of core code. Raises TypeError where an extent is not constant."""
        return tuple(_constant(e) for e in self.shape)

    @property
    def typing(self) -> Typing:
        return Typing((Rank.SCALAR, Rank.ROW, Rank.ELEMENT)[len(self.shape)], kind_of_dtype(self.dtype))


def _constant(e: Expr) -> int:
    if isinstance(e, Num) and isinstance(e.value, int):
        return e.value
    raise TypeError(f"{e} is not constant")


def kind_of_dtype(dtype: DType) -> Kind:
    return Kind.INT if dtype == "i32" else Kind.FLOAT


_INT_SCALAR = Typing(Rank.SCALAR, Kind.INT)
_POSITION: dict[str, Typing] = {"rows": Typing(Rank.ROW, Kind.INT), "cols": Typing(Rank.COL, Kind.INT)}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the names of an expression stand for. A shared tile and the matrix it was copied from often share a name:
    `K` reads the tile, `K[i, j]` the matrix.
    """

    scalars: Mapping[str, Typing] = field(default_factory=dict)
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    matrices: Mapping[str, Allocate] = field(default_factory=dict)

    def of_name(self, name: str) -> Typing | None:
        """The typing of a name that stands alone, or None where nothing has it."""
        if name in _POSITION:
            return _POSITION[name]
        if name in self.tiles:
            return self.tiles[name].typing
        return self.scalars.get(name)


def environment(program: Program) -> Environment:
    """The names of core code (`generator.tl.expand`): each means one thing throughout the program."""
    scalars: dict[str, Typing] = {}
    for s in walk_statements(program.body):
        match s:
            case Argument():
                scalars |= {name: Typing(Rank.SCALAR, kind_of_dtype(s.dtype)) for name in s.names}
            case Constant():
                scalars[s.name] = _INT_SCALAR
            case Grid():
                scalars |= {axis.name: _INT_SCALAR for axis in s.axes}
            case For():
                scalars[s.var] = _INT_SCALAR
            case _:
                pass
    return Environment(scalars, tiles(program), {n: a for n, a in program.allocations.items() if a.level == "global"})


def tiles(program: Program) -> dict[str, Tile]:
    """Every tile of core code, in the order of the statements that make them; an Allocate decides over a Copy."""
    found = {a.name: Tile(a.name, a.level, a.shape, a.dtype) for a in program.allocations.values() if a.level != "global"}
    matrices = {a.name: a for a in program.allocations.values() if a.level == "global"}
    for s in walk_statements(program.body):
        match s:
            case Copy() if s.into_level != "global" and s.into not in found:
                source = matrices.get(s.source) if s.source_level == "global" else found.get(s.source)
                if source is not None:
                    found[s.into] = Tile(s.into, s.into_level, s.shape, source.dtype)
            case Reshape() if s.source in found and s.into not in found:
                found[s.into] = Tile(s.into, "register", found[s.source].shape, s.dtype, operand=True)
            case _:
                pass
    return found


INTEGER_FUNCTIONS = frozenset({"//", "%", "ceildiv"})
COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})
LOGIC = frozenset({"and", "or", "not"})
REDUCTIONS = frozenset({"rowmax", "rowsum"})
#: The result is an integer if every argument is one, else a float.
ARITHMETIC = frozenset({"+", "-", "*", "neg", "max", "min", "abs"})


def rank(e: Expr, env: Environment) -> Rank:
    return typing_of(e, env).rank


def kind(e: Expr, env: Environment) -> Kind:
    return typing_of(e, env).kind


def typing_of(e: Expr, env: Environment) -> Typing:
    """Rank and kind of a checked expression. Raises KeyError for a name that `env` does not have."""
    match e:
        case Num():
            return Typing(Rank.SCALAR, Kind.INT if isinstance(e.value, int) else Kind.FLOAT)
        case Var():
            known = env.of_name(e.name)
            if known is None:
                raise KeyError(e.name)
            return known
        case Index():
            return Typing(join(*(typing_of(i, env).rank for i in e.indices)), kind_of_dtype(env.matrices[e.tensor].dtype))
        case Op():
            return operation(e.fn, [typing_of(a, env) for a in e.args])


def join(*ranks: Rank) -> Rank:
    """The rank of a combination."""
    result = Rank.SCALAR
    for r in ranks:
        result |= r
    return result


def operation(fn: str, args: list[Typing]) -> Typing:
    """What a function gives for arguments that suit it.

    `/` and the functions of analysis give floats, `floor` and integer division integers, comparisons tests; a reduction gives one
    float a row.
    """
    if fn in REDUCTIONS:
        return Typing(Rank.ROW, Kind.FLOAT)
    joined = join(*(a.rank for a in args))
    if fn in COMPARISONS or fn in LOGIC:
        return Typing(joined, Kind.BOOL)
    if fn in INTEGER_FUNCTIONS or fn == "floor":
        return Typing(joined, Kind.INT)
    values = args[1:] if fn == "where" else args
    if fn == "where" and values and all(a.kind is Kind.BOOL for a in values):
        return Typing(joined, Kind.BOOL)
    if (fn == "where" or fn in ARITHMETIC) and all(a.kind is Kind.INT for a in values):
        return Typing(joined, Kind.INT)
    return Typing(joined, Kind.FLOAT)
