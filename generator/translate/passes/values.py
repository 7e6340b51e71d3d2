"""Abstract values: shared expression nodes with simplification, and the signs each node can have.

Runs statements, proves nothing.

Two values that get the same node are equal, whatever the numbers are. The element of a tile, the value of a row and a scalar are
all one node: a statement treats every element and row alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from generator.tl.ir import Compute, Copy, Expr, Gemm, Index, Num, Op, Reshape, Stmt, Var
from generator.tl.types import COMPARISONS, Rank
from generator.translate.passes.scope import Scope
from generator.translate.passes.signs import Signs, apply, is_finite, of_number, refine

Node = int
Facts = frozenset[tuple[Node, bool]]
NOTHING: Facts = frozenset()


@dataclass
class Values:
    """A table of nodes. `visible`: tests that hold for at least one element of every row, which a rowmax may use."""

    scope: Scope
    visible: tuple[Node, ...] = ()
    _key: list[tuple[str, tuple[Node, ...], object]] = field(default_factory=list)
    _node: dict[tuple[str, tuple[Node, ...], object], Node] = field(default_factory=dict)
    _signs: dict[tuple[Node, Facts, bool], Signs] = field(default_factory=dict)

    def _intern(self, fn: str, args: tuple[Node, ...] = (), payload: object = None) -> Node:
        key = (fn, args, payload)
        if key not in self._node:
            self._node[key] = len(self._key)
            self._key.append(key)
        return self._node[key]

    def number(self, value: int | float) -> Node:
        return self._intern("number", (), repr(float(value)))

    def test(self, value: bool) -> Node:
        return self._intern("test", (), value)

    def fresh(self, signs: Signs) -> Node:
        """A value that nothing is known of but its signs, different from every other."""
        return self._intern("fresh", (), (len(self._key), signs))

    def named(self, name: object, signs: Signs) -> Node:
        """A scalar, index or captured value: the same node wherever it is named."""
        return self._intern("named", (), (name, signs))

    def make(self, fn: str, args: tuple[Node, ...]) -> Node:
        """The node of a function on nodes, simplified."""
        if fn == "where":
            return self._where(*args)
        if (simple := self._identity(fn, args)) is not None:
            return simple
        node = self._intern(fn, args)
        constant = {Signs.ZERO: 0.0, Signs.NEG_INF: float("-inf"), Signs.POS_INF: float("inf"), Signs.NAN: float("nan")}
        match self.signs(node):
            case Signs.TRUE:
                return self.test(True)
            case Signs.FALSE:
                return self.test(False)
            case known if known in constant:
                return self.number(constant[known])
        return node

    def _identity(self, fn: str, args: tuple[Node, ...]) -> Node | None:
        zero, one, minus_inf = self.number(0), self.number(1), self.number(float("-inf"))
        match fn, args:
            case "+", (a, b):
                return a if b == zero else b if a == zero else None
            case "-", (a, b):
                if b == zero:
                    return a
                return zero if a == b and is_finite(self.signs(a)) else None
            case "*", (a, b):
                return a if b == one else b if a == one else None
            case "/", (a, b):
                return a if b == one else None
            case "max", (a, b):
                return a if b in (a, minus_inf) else b if a == minus_inf else None
            case "min", (a, b):
                return a if a == b else None
            case (("exp" | "exp2"), (a,)):
                return one if a == zero else None
            case "rowmax", (a,):
                return a if self._key[a][0] == "number" else None
            case (("<" | "<=" | ">" | ">=" | "==" | "!="), (a, b)) if a == b and not self.signs(a) & Signs.NAN:
                return self.test(fn in ("<=", ">=", "=="))
        return None

    def _where(self, test: Node, a: Node, b: Node) -> Node:
        known = self.signs(test)
        if known in (Signs.TRUE, Signs.FALSE):
            return a if known == Signs.TRUE else b
        a, b = self._assume(a, test, True, {}), self._assume(b, test, False, {})
        return a if a == b else self._intern("where", (test, a, b))

    def _assume(self, node: Node, test: Node, holds: bool, memo: dict[Node, Node]) -> Node:
        """The node with every `where` on the same test replaced by its branch."""
        fn, args, _ = self._key[node]
        if not args or node in memo:
            return memo.get(node, node)
        if fn == "where" and args[0] == test:
            memo[node] = self._assume(args[1 if holds else 2], test, holds, memo)
        else:
            new = tuple(self._assume(a, test, holds, memo) for a in args)
            memo[node] = node if new == args else self.make(fn, new)
        return memo[node]

    def signs(self, node: Node, facts: Facts = NOTHING) -> Signs:
        key = (node, facts, bool(self.visible))
        if key not in self._signs:
            self._signs[key] = self._refined(node, self._raw(node, facts), facts)
        return self._signs[key]

    def _raw(self, node: Node, facts: Facts) -> Signs:
        fn, args, payload = self._key[node]
        match fn:
            case "number":
                return of_number(float(str(payload)))
            case "test":
                return Signs.TRUE if payload else Signs.FALSE
            case "fresh" | "named":
                assert isinstance(payload, tuple)
                return Signs(payload[1])
            case "where":
                test = self.signs(args[0], facts)
                out = Signs.NONE
                if test & Signs.TRUE:
                    out |= self.signs(args[1], facts | {(args[0], True)})
                if test & Signs.FALSE:
                    out |= self.signs(args[2], facts | {(args[0], False)})
                return out
            case "rowmax":
                return self._row_maximum(args[0], facts)
        return apply(fn, tuple(self.signs(a, facts) for a in args))

    def _row_maximum(self, x: Node, facts: Facts) -> Signs:
        every = self.signs(x, facts)
        if (
            self.visible
            and is_finite(self.signs(x, facts | {(t, True) for t in self.visible}))
            and not every & (Signs.NAN | Signs.POS_INF)
        ):
            return every & ~Signs.NEG_INF
        return every

    def _refined(self, node: Node, s: Signs, facts: Facts) -> Signs:
        for test, holds in facts:
            if test == node:
                return Signs.TRUE if holds else Signs.FALSE
            fn, args, _ = self._key[test]
            if fn in COMPARISONS and args[0] == node and not self._key[args[1]][1]:
                s = refine(s, fn, self.signs(args[1]), holds) or s
        return s

    def value(self, e: Expr, env: Mapping[str, Node], forced: Mapping[Expr, bool]) -> Node:
        """The node of an expression. `forced`: tests whose outcome is given."""
        if e in forced:
            return self.test(forced[e])
        match e:
            case Num(number):
                return self.number(number)
            case Var(name):
                if name in env:
                    return env[name]
                return self.named(name, Signs.POS if name in self.scope.promised else Signs.FINITE)
            case Index(tensor, indices):
                return self._captured(tensor, tuple(self.value(i, env, forced) for i in indices))
            case Op(fn, args):
                node = self.make(fn, tuple(self.value(a, env, forced) for a in args))
                return self._scalar(e, node)

    def _captured(self, tensor: str, indices: tuple[Node, ...]) -> Node:
        return self.named((tensor, indices), Signs.FINITE)

    def _scalar(self, e: Op, node: Node) -> Node:
        """Scalars computed from arguments are finite by contract: a slope or a scale that is not makes every output worthless."""
        signs = self.signs(node)
        doubtful = signs & Signs.FINITE and not signs & Signs.EITHER and not is_finite(signs)
        if doubtful and self.scope.rank(e) is Rank.SCALAR:  # the rank last: it goes through the whole expression
            return self.named(e, signs & Signs.FINITE)
        return node

    def run(self, body: Iterable[Stmt], env: Mapping[str, Node], forced: Mapping[Expr, bool]) -> dict[str, Node]:
        """The environment after straight-line statements. 0 times anything in memory is taken as 0."""
        out = dict(env)
        for s in body:
            match s:
                case Compute():
                    out[s.into] = self.value(s.value, out, forced)
                case Reshape():
                    out[s.into] = out.get(s.source, self.fresh(Signs.ANY))
                case Gemm():
                    out[s.into] = self._gemm(s, out)
                case Copy(into_level="shared" | "register"):
                    out[s.into] = self.fresh(Signs.FINITE)
                case Copy():
                    pass
                case _:
                    raise TypeError(f"not a straight-line statement: {s!r}")
        return out

    def _gemm(self, s: Gemm, env: Mapping[str, Node]) -> Node:
        zero = self.number(0)
        old = env.get(s.into, self.fresh(Signs.ANY)) if s.accumulate else zero
        if zero in (env.get(s.a), env.get(s.b)):
            return old
        operands = (self.signs(env[x]) if x in env else Signs.FINITE for x in (s.a, s.b))
        return self.fresh(Signs.FINITE if all(map(is_finite, operands)) and is_finite(self.signs(old)) else Signs.ANY)
