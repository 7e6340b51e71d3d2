"""Masks of a loop as column limits: for each row the columns it may see, and what follows for whole tiles.

A test that is affine in the column and the loop variable j, `column + kappa * j >= bound` or `<`, is a limit: its bound is
computed once a row and block, whatever captured tensors stand in it; the least and the largest bound of the rows tell which
columns of a tile anybody sees, and whether all do. Trees of limits (`and`, `or`) work alike. Other tests stay as written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from generator.tl.ir import COLS, Expr, Op, Var, names
from generator.tl.types import Rank
from generator.translate.cpu.names import folded
from generator.translate.cpu.ops import Loop, Step, every
from generator.translate.cpu.types import Types
from generator.translate.passes.affine import Affine, extremum, grows_with, to_expr
from generator.translate.passes.analysis import LoopPlan
from generator.translate.passes.conditions import AllOf, AnyOf, Condition, conjuncts
from generator.translate.passes.conditions import Limit as Form


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper: column + kappa * j < bound. Lower: column + kappa * j >= bound. `bound` is a whole number, the same along a row."""

    name: str
    upper: bool
    kappa: int
    bound: Expr


@dataclass(frozen=True, slots=True)
class Both:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Tree, ...]


Tree: TypeAlias = Limit | Both | Either


def conjuncts_of(tree: Tree | None) -> tuple[Tree, ...]:
    """The trees that must all hold; none for no tree."""
    match tree:
        case None:
            return ()
        case Both(parts):
            return parts
        case _:
            return (tree,)


@dataclass(frozen=True, slots=True)
class Masked:
    """One test of a `where`, as a tree of limits. skippable: where it is false for a whole tile, the tile does nothing."""

    test: Expr
    tree: Tree
    columns: int
    skippable: bool


@dataclass(slots=True)
class LimitTests:
    """The limits of one loop (of none: `masked` is empty). rows: of the tile that is masked.

    limits: every limit that some text asks for, named. seen: all skippable tests; whole: all tests.
    """

    index: int = -1
    rows: int = 0
    masked: tuple[Masked, ...] = ()
    limits: list[Limit] = field(default_factory=list)
    seen: Tree | None = None
    whole: Tree | None = None

    @property
    def columns(self) -> int:
        return self.masked[0].columns if self.masked else 0

    def offset(self, kappa: int) -> str:
        """The C++ name of kappa * j, which turns a column of the tile into a position."""
        return f"x{self.index}_{kappa}".replace("-", "m")

    @property
    def kappas(self) -> list[int]:
        return sorted({x.kappa for x in self.limits})

    def split(self, tests: Iterable[Expr]) -> tuple[Tree | None, list[Expr]]:
        """The tests that are limits as one tree, those that limit alike joined into one limit; and all others."""
        known = {m.test: m for m in self.masked}
        tests = list(tests)
        trees = [known[t].tree for t in tests if t in known]
        return (self.joined(trees) if trees else None), [t for t in tests if t not in known]

    def joined(self, trees: list[Tree]) -> Tree:
        """All of the trees; limits of one side and one kappa become one, whose bound is their least (largest). Names them."""
        flat = [p for t in trees for p in conjuncts_of(t)]
        out: list[Tree] = []
        groups: dict[tuple[bool, int], list[Expr]] = {}
        for t in flat:
            match t:
                case Limit():
                    groups.setdefault((t.upper, t.kappa), []).append(t.bound)
                case Either(parts):
                    out.append(Either(tuple(self.joined([p]) for p in parts)))
                case Both():
                    out.append(self.joined([t]))
        for (upper, kappa), bounds in groups.items():
            out.append(self._named(upper, kappa, extremum("min" if upper else "max", tuple(bounds))))
        return out[0] if len(out) == 1 else Both(tuple(out))

    def _named(self, upper: bool, kappa: int, bound: Expr) -> Limit:
        for x in self.limits:
            if (x.upper, x.kappa, x.bound) == (upper, kappa, bound):
                return x
        self.limits.append(Limit(f"limit{self.index}_{len(self.limits)}", upper, kappa, bound))
        return self.limits[-1]


def find_limits(loop: Loop, plan: LoopPlan, types: Types, use_skip: bool) -> LimitTests:
    """The limits of an innermost loop; none for a loop that holds another one."""
    if any(isinstance(x, Loop) for x in every(loop.body)):
        return LimitTests(loop.index)
    found = [(mask, tree) for mask in plan.masks if (tree := _tree(mask.condition, loop.stmt.var, types)) is not None]
    masked = tuple(Masked(mask.expr, tree, mask.columns, mask.skippable and use_skip) for mask, tree in found)
    if len({(mask.columns, mask.rows) for mask, _ in found}) != 1:
        return LimitTests(loop.index)
    out = LimitTests(loop.index, found[0][0].rows, masked)
    for op in every(loop.body):
        if isinstance(op, Step):
            for e in _wheres(op.value):
                out.split(conjuncts(e.args[0]))
    skipping = [m.tree for m in masked if m.skippable]
    out.seen = out.joined(skipping) if skipping else None
    out.whole = out.joined([m.tree for m in masked])
    return out


def _wheres(e: Expr) -> list[Op]:
    found = [x for a in (e.args if isinstance(e, Op) else ()) for x in _wheres(a)]
    return [e, *found] if isinstance(e, Op) and e.fn == "where" else found


def _tree(c: Condition, variable: str, types: Types) -> Tree | None:
    match c:
        case Form(form):
            return _limit(form, variable, types)
        case AllOf(parts) | AnyOf(parts):
            trees = [_tree(p, variable, types) for p in parts]
            known = tuple(t for t in trees if t is not None)
            if len(known) < len(trees):
                return None
            return Both(known) if isinstance(c, AllOf) else Either(known)
    return None


def _limit(form: Affine, variable: str, types: Types) -> Limit | None:
    """`form >= 0` as a limit without a name: the column's sign says which side."""
    sign, j = form.coefficient(COLS), Var(variable)
    rest = form.without(COLS, j)
    if abs(sign) != 1 or any(types.rank(s) & Rank.COL or names(s) & ({variable} | set(types.tiles)) for s in rest.symbols):
        return None
    kappa = form.coefficient(j) * sign
    return Limit("", sign < 0, kappa, to_expr(rest * -1 if sign > 0 else rest.plus(1)))


def seen_text(tree: Tree, tests: LimitTests) -> str:
    """The columns of a tile that some row may see, as a Span."""
    match tree:
        case Limit(name, upper, kappa):
            at = tests.offset(kappa)
            return f"Span{{0, {name}.most - {at}}}" if upper else f"Span{{{name}.least - {at}, {tests.columns}}}"
        case Both(parts):
            return folded("both({}, {})", [seen_text(p, tests) for p in parts])
        case Either(parts):
            return folded("either({}, {})", [seen_text(p, tests) for p in parts])
        case _:
            assert_never(tree)


def whole_text(tree: Tree, tests: LimitTests, first: str, last: str) -> str:
    """Whether every row sees all of the columns [first, last)."""
    match tree:
        case Limit(name, upper, kappa):
            at = tests.offset(kappa)
            return f"{last} + {at} <= {name}.least" if upper else f"{first} + {at} >= {name}.most"
        case Both(parts):
            return "(" + " && ".join(whole_text(p, tests, first, last) for p in parts) + ")"
        case Either(parts):
            return "(" + " || ".join(whole_text(p, tests, first, last) for p in parts) + ")"
        case _:
            assert_never(tree)


def seen_by_row(tests: LimitTests) -> str | None:
    """What each row sees of a tile, as a Seen: only where it is one interval, with at most one limit on each side."""
    flat = conjuncts_of(tests.seen)
    sides = {x.upper: x for x in flat if isinstance(x, Limit)}
    if not sides or len(sides) < len(flat):
        return None
    at = [f"{sides[side].name}.at" if side in sides else "nullptr" for side in (False, True)]
    by = [tests.offset(sides[side].kappa) if side in sides else "0" for side in (False, True)]
    return f"{{{', '.join(at + by)}}}"


def sees_more(axis: Var, tests: LimitTests) -> bool:
    """Whether a larger value of a grid axis lets rows see more: such blocks take longer."""
    return any(isinstance(x, Limit) and x.upper and grows_with(x.bound, axis) for x in conjuncts_of(tests.seen))
