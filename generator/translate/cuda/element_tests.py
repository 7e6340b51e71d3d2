"""Tests of masks and branches in element-wise code: of the column against a row's limits, of a row, or of anything else.

A row's limits are worked out once, counted from the lane's first column; an element then compares a compile-time column with
them, or looks its bit up in a mask of the row. How values are written is not known here (`element_values`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from generator.tl.ir import COLS, Expr, Op
from generator.tl.types import Kind, Rank
from generator.translate.cuda.element_code import ElementCode, Setting
from generator.translate.cuda.scalars import INFIX
from generator.translate.passes.affine import extremum, to_expr
from generator.translate.passes.conditions import AllOf, AnyOf, Condition, Limit, condition, conjuncts, is_column_limit
from generator.translate.passes.scope import Scope

#: C of an expression as a value of a kind, at some rank.
Part = Callable[[Expr, Kind], str]
#: A largest column that no column is up to, and a smallest one that none reaches: half the range, so that sums do not overflow.
NEVER_UP, NEVER_FROM = -0x40000000, 0x40000000


@dataclass
class ElementTests(ABC):
    """Of one statement. before: lines that stand ahead of its element loop, with what `memo` gave a name to."""

    code: ElementCode
    setting: Setting
    into: str
    before: list[str] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)
    columns: int = 0  # of the tile that the element loop being written goes over

    @abstractmethod
    def row(self, e: Expr, kind: Kind = Kind.FLOAT) -> str:
        """C inside a FOR_ROWS loop."""

    @property
    def scope(self) -> Scope:
        return self.code.scope

    def kind(self, e: Expr) -> Kind:
        return self.scope.typing(e).kind

    def condition(self, test: Expr, part: Part) -> str:
        """C of a test. Tests of the column against the row's limits become one compare against a compile-time column."""
        uppers: list[Expr] = []
        lowers: list[Expr] = []
        others: list[str] = []
        off = ""
        for c in conjuncts(test):
            if c in self.setting.visible:
                continue
            known = condition(c, self.scope) if self.scope.rank(c) & Rank.COL else None
            sides = column_range(known, self.scope) if known is not None else None
            if self.setting.off is not None and c == self.setting.off[0]:
                off = self.setting.off[1]
            if sides is not None:
                uppers += [sides[0]] if sides[0] is not None else []
                lowers += [sides[1]] if sides[1] is not None else []
            elif known is not None and _columns_only(known, self.scope):
                others.append(self._either(known))
            else:
                others.append(self._plain_test(c, part))
        if self.code.masks_as_bits and (uppers or lowers):
            others.append(self._seen(uppers, lowers, off))
            off = ""
        elif uppers:
            others.append(f"COL <= {self._limit(extremum('min', tuple(uppers)), off)}")
            off = ""
        if lowers and not self.code.masks_as_bits:
            others.append(f"COL >= {self._limit(extremum('max', tuple(lowers)))}")
        others += [f"!{off}"] if off else []
        return " && ".join(f"({o})" for o in others) if others else "true"

    def _plain_test(self, c: Expr, part: Part) -> str:
        if not self.scope.rank(c) & Rank.COL:
            return part(c, Kind.BOOL) if self.scope.rank(c) is Rank.SCALAR else self.row(c, Kind.BOOL)
        assert isinstance(c, Op)
        if c.fn in ("and", "or", "not"):
            inner = [self.condition(a, part) for a in c.args]
            return f"!({inner[0]})" if c.fn == "not" else f" {INFIX[c.fn]} ".join(f"({i})" for i in inner)
        whole_numbers = all(self.kind(a) is Kind.INT for a in c.args)
        a, b = (part(x, Kind.INT if whole_numbers else Kind.FLOAT) for x in c.args)
        return f"{a} {INFIX[c.fn]} {b}"

    def _either(self, c: Condition) -> str:
        """A condition whose parts are all limits of the column, as tests of them joined."""
        sides = column_range(c, self.scope)
        if sides is not None:
            tests = [f"COL <= {self._limit(sides[0])}"] if sides[0] is not None else []
            tests += [f"COL >= {self._limit(sides[1])}"] if sides[1] is not None else []
            return " && ".join(tests)
        assert isinstance(c, AllOf | AnyOf)
        return (" && " if isinstance(c, AllOf) else " || ").join(f"({self._either(p)})" for p in c.parts)

    def _seen(self, uppers: list[Expr], lowers: list[Expr], off: str) -> str:
        """Whether an element's column lies within the row's limits: a bit of the row's mask, which costs less than compares."""
        off_above, off_below = (off, "") if uppers else ("", off)
        above = self._limit(extremum("min", tuple(uppers)), off_above) if uppers else ""
        below = self._limit(extremum("max", tuple(lowers)), off_below, never=NEVER_FROM) if lowers else ""
        key = ("seen", above, below)
        if key not in self.memo:
            x, words = self.code.temporary(), -(-self.columns // 128)
            parts = [f"columns_upto({above}, w)"] if above else []
            parts += [f"~columns_upto({below} - 1, w)"] if below else []
            self.before.append(f"u32 {x}[MT][2][{words}];")
            self.before.append(f"FOR_ROWS UNROLL for (int w = 0; w < {words}; ++w) {x}[t][r][w] = {' & '.join(parts)};")
            self.memo[key] = f"({x}[t][r][i / 16] & COLUMN_BIT) != 0"
        return self.memo[key]

    def _limit(self, e: Expr, off: str = "", never: int = NEVER_UP) -> str:
        """The row's limit, counted from the lane's first column; where `off` is true, `never`, which no column meets."""
        key = ("limit", e, off)
        if key not in self.memo:
            x, value = self.code.temporary(), self.row(e, Kind.INT)
            value = f"({off} ? {never:#x} : {value})" if off else value
            self.before += [f"int {x}[MT][2];", f"FOR_ROWS {x}[t][r] = {value} - lane_col;"]
            self.memo[key] = f"{x}[t][r]"
        return self.memo[key]


def column_range(c: Condition, scope: Scope) -> tuple[Expr | None, Expr | None] | None:
    """(largest, smallest) column for which a condition holds, as expressions of the row; None where it is no such range."""
    match c:
        case Limit(form) if is_column_limit(form, scope):
            rest = form.without(COLS)
            return (to_expr(rest), None) if form.coefficient(COLS) < 0 else (None, to_expr(rest * -1))
        case AllOf(parts) | AnyOf(parts):
            sides = [column_range(p, scope) for p in parts]
            if None in sides:
                return None
            uppers = [s[0] for s in sides if s is not None and s[0] is not None]
            lowers = [s[1] for s in sides if s is not None and s[1] is not None]
            if isinstance(c, AnyOf) and uppers and lowers:
                return None
            up, down = ("min", "max") if isinstance(c, AllOf) else ("max", "min")
            return extremum(up, tuple(uppers)) if uppers else None, extremum(down, tuple(lowers)) if lowers else None
    return None


def _columns_only(c: Condition, scope: Scope) -> bool:
    match c:
        case Limit(form):
            return is_column_limit(form, scope)
        case AllOf(parts) | AnyOf(parts):
            return all(_columns_only(p, scope) for p in parts)
    return False
