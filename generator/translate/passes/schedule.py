"""The order in which a loop's body runs on a machine whose matrix products are asynchronous. Emits nothing; legal on any target.

stream: matrix products only. rotated: products that need no result of this loop (A) are started one iteration ahead of those that
do (C), and the code between (B) runs under them, what C reads or writes (held) left for last. plain: program order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from generator.tl.ir import Compute, Copy, Expr, For, Gemm, If, Num, Op, Program, Stmt, Var, walk
from generator.translate.passes.scope import carried, defs, defs_of, uses, uses_of

Kind = Literal["stream", "rotated", "plain"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Groups as positions in the loop's body; `why` tells why it is not rotated ("" when it is)."""

    kind: Kind
    first: tuple[int, ...]  # A: products that depend on no carried value
    early: tuple[int, ...]  # B that runs while C is in flight
    late: tuple[int, ...]  # B that touches what C reads or writes
    second: tuple[int, ...]  # C: the other products
    deferred: tuple[str, ...]  # row sums that may stay in parts until the loop ends (reassociates)
    why: str = ""


def schedule(loop: For, program: Program) -> Schedule:
    """The schedule of one loop. Hint `rotate = off` gives program order; only `Option row_sums = deferred` lets sums wait."""
    positions = [i for i, s in enumerate(loop.body) if not isinstance(s, Copy)]
    if any(isinstance(loop.body[i], For | If) for i in positions):
        return Schedule("plain", (), tuple(positions), (), (), (), "the body holds a loop or a branch")
    state = carried(loop.body)
    deferred = deferred_sums(loop.body, state, program) if program.options["row_sums"] != "each_tile" else ()
    gemms = [i for i in positions if isinstance(loop.body[i], Gemm)]
    if gemms and gemms == positions:
        return Schedule("stream", (), (), (), tuple(gemms), deferred, "the body holds matrix products only")
    first, rest = _independent(loop.body, positions, set(state))
    second = [i for i in rest if i in gemms]
    code = [i for i in rest if i not in gemms]
    why = _why_not_rotated(loop.body, first, code, second, state)
    if not why and program.hints.get("rotate") == "off":
        why = "the program's hint"
    if why:
        return Schedule("plain", tuple(first), tuple(code), (), tuple(second), deferred, why)
    early, late = _split(loop.body, code, second)
    return Schedule("rotated", tuple(first), tuple(early), tuple(late), tuple(second), deferred)


def _independent(body: tuple[Stmt, ...], positions: list[int], state: set[str]) -> tuple[list[int], list[int]]:
    """Products at the head of the body that depend on no carried value, and all that follows."""
    tainted = set(state)
    first: list[int] = []
    rest: list[int] = []
    for i in positions:
        s = body[i]
        if isinstance(s, Gemm) and not (uses(s) | defs(s)) & tainted and not rest:
            first.append(i)
        else:
            rest.append(i)
        if uses(s) & tainted:
            tainted |= defs(s)
    return first, rest


def _why_not_rotated(body: tuple[Stmt, ...], first: list[int], code: list[int], second: list[int], state: tuple[str, ...]) -> str:
    if not first or not second:
        return "one group of matrix products only: nothing to overlap"
    made_first = defs_of(body[i] for i in first)
    if any(i > second[0] for i in code):
        return "code stands after the second matrix product"
    for i in second:
        g = body[i]
        assert isinstance(g, Gemm)
        if uses(g) & made_first:
            return "the second product reads the first one's registers"
        if g.into not in state or not g.accumulate:
            return "the second product starts a new tile"
    copied = {s.into for s in body if isinstance(s, Copy) and s.into_level != "global"}
    if uses_of(body[i] for i in code) & copied:
        return "code between the products reads a copied tile"
    return ""


def _split(body: tuple[Stmt, ...], code: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    held = uses_of(body[i] for i in second) | defs_of(body[i] for i in second)
    early: list[int] = []
    late: list[int] = []
    for i in code:
        s, delayed = body[i], defs_of(body[x] for x in late)
        reads_late = (uses(s) | defs(s)) & delayed
        overwritten = defs(s) & uses_of(body[x] for x in late)  # a late statement must still see the old value
        (late if (uses(s) | defs(s)) & held or reads_late or overwritten else early).append(i)
    return early, late


def deferred_sums(body: tuple[Stmt, ...], state: tuple[str, ...], program: Program) -> tuple[str, ...]:
    """v = v * r + rowsum(x), or v + rowsum(x), from 0, v read nowhere else in the loop: a sum is linear, so parts may wait."""
    out = []
    for s in body:
        match s:
            case Compute(into=v, value=Op("+", (old, Op("rowsum")))) if v in state and _starts_at_zero(program, v):
                alone = sum(v in uses(x) | defs(x) for x in body) == 1
                if alone and (old == Var(v) or _scaled(old, v)):
                    out.append(v)
    return tuple(out)


def _starts_at_zero(program: Program, name: str) -> bool:
    init = program.allocations[name].init if name in program.allocations else None
    return isinstance(init, Num) and init.value == 0


def _scaled(old: Expr, v: str) -> bool:
    match old:
        case Op("*", (Var(name), factor)) if name == v:
            return not any(isinstance(x, Op) and x.fn in ("rowsum", "rowmax") or x == Var(v) for x in walk(factor))
    return False
