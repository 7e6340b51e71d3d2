"""Proofs about loops: which masked tiles leave the state as it was, and with which values a loop starts. Decides no schedule.

Each row's state before an iteration is one of a few cases: as it was before the loop, or touched, with finite values. The body
is run on abstract values from every case, once with a test false everywhere (nothing may change) and once with something visible
(all must end finite). Together they are an induction: a masked tile can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from generator.tl.ir import Expr, For, If, Program, Stmt, walk_statements
from generator.translate.passes.columns import column_tiles, neutral
from generator.translate.passes.scope import Scope, carried, defs, defs_of
from generator.translate.passes.signs import Signs, is_finite
from generator.translate.passes.values import Node, Values

MAX_CASES = 8
Env = dict[str, Node]


@dataclass(frozen=True, slots=True)
class LoopProof:
    """skippable: the tests whose falsity over a whole tile makes the tile the identity. why: what could not be shown.

    dead_first: positions in the body of statements that leave a carried value as it was when the first iteration runs them.
    columns: the tests of `skippable` that, false for a whole column of `column_tiles`, leave nothing of it behind.
    """

    skippable: tuple[Expr, ...]
    why: str
    dead_first: tuple[int, ...]
    columns: tuple[Expr, ...] = ()
    column_tiles: frozenset[str] = frozenset()


def prove(program: Program, scope: Scope, tests: Mapping[int, tuple[Expr, ...]]) -> dict[int, LoopProof]:
    """Proofs for every loop, by its position among all loops in textual order; `tests` are the candidates of each."""
    return _Prover(program, scope, tests).run()


class _Prover:
    def __init__(self, program: Program, scope: Scope, tests: Mapping[int, tuple[Expr, ...]]) -> None:
        self.program, self.scope, self.tests = program, scope, tests
        self.values = Values(scope)
        self.order = [s for s in walk_statements(program.code) if isinstance(s, For)]
        self.proofs: dict[int, LoopProof] = {}

    def run(self) -> dict[int, LoopProof]:
        self._body(self.program.code, [self._initial()])
        for i in range(len(self.order)):
            self.proofs.setdefault(i, LoopProof((), "inside another loop", ()))
        return self.proofs

    def _initial(self) -> Env:
        """Tiles at the start of the program: their initial value, or anything."""
        env: Env = {}
        for a in self.program.allocations.values():
            if a.level != "global":
                env[a.name] = self.values.value(a.init, {}, {}) if a.init is not None else self.values.fresh(Signs.ANY)
        return env

    def _body(self, body: tuple[Stmt, ...], cases: list[Env]) -> list[Env]:
        for s in body:
            match s:
                case For():
                    cases = self._loop(s, cases)
                case If():
                    cases = self._body(s.then, cases) + self._body(s.otherwise, cases)
                case _:
                    cases = [self.values.run((s,), env, {}) for env in cases]
            if len(cases) > MAX_CASES:
                cases = [self._forget(cases[0], defs_of(self.program.code))]
        return cases

    def _forget(self, env: Env, names: set[str], signs: Signs = Signs.ANY) -> Env:
        return env | {n: self.values.fresh(signs) for n in sorted(names)}

    def _loop(self, loop: For, cases: list[Env]) -> list[Env]:
        index = next(i for i, s in enumerate(self.order) if s is loop)
        straight = not any(isinstance(s, For | If) for s in loop.body)
        state = carried(loop.body, live_after=self.scope.tiles)
        changed = defs_of(loop.body)
        unknown = [self._forget(env, changed) for env in cases]
        if not straight:
            self._body(loop.body, unknown)
            self.proofs[index] = LoopProof((), "its body holds a loop or a branch", ())
            return unknown
        touched = [self._forget(self._forget(env, changed), set(state), Signs.FINITE) for env in cases]
        from_anything = self._identities(loop, index, state, unknown)
        closed = self._closed(loop, index, state, cases + touched)
        from_cases = self._identities(loop, index, state, cases + touched) if closed else ()
        skippable = tuple(t for t in self.tests.get(index, ()) if t in from_anything or t in from_cases)
        tied = column_tiles(loop, self.program, self.scope, skippable)
        hidden = neutral(loop, tied, skippable, cases + touched if closed else unknown, self.values)
        why = self._why(index, skippable, closed)
        self.proofs[index] = LoopProof(
            skippable, why, self._dead_first(loop, state, cases), hidden, tied if hidden else frozenset()
        )
        return cases + touched if closed else unknown

    def _why(self, index: int, skippable: tuple[Expr, ...], closed: bool) -> str:
        if len(skippable) == len(self.tests.get(index, ())):
            return ""
        return "a masked tile may change the state" if closed else "the state may stop being finite"

    def _identities(self, loop: For, index: int, state: tuple[str, ...], starts: list[Env]) -> tuple[Expr, ...]:
        """The tests that, false everywhere, leave the state as it was from every start."""

        def holds(test: Expr) -> bool:
            for start in starts:
                end = self.values.run(loop.body, start, {test: False})
                if any(end[n] != start[n] for n in state):
                    return False
            return True

        return tuple(t for t in self.tests.get(index, ()) if holds(t))

    def _closed(self, loop: For, index: int, state: tuple[str, ...], starts: list[Env]) -> bool:
        """Whether a tile with something visible in a row leaves that row's state finite, from every start."""
        old = self.values.visible
        self.values.visible = tuple(self.values.value(t, {}, {}) for t in self.tests.get(index, ()))
        try:
            ends = [self.values.run(loop.body, start, {}) for start in starts]
            return all(is_finite(self.values.signs(end[n])) for end in ends for n in state)
        finally:
            self.values.visible = old

    def _dead_first(self, loop: For, state: tuple[str, ...], cases: list[Env]) -> tuple[int, ...]:
        """Statements that leave a carried value as it was when the first iteration runs them."""
        if len(cases) != 1:
            return ()
        env, out = cases[0], []
        for i, s in enumerate(loop.body):
            after = self.values.run((s,), env, {})
            if (written := defs(s)) <= set(state) and written and all(after[n] == env.get(n) for n in written):
                out.append(i)
            env = after
        return tuple(out)
