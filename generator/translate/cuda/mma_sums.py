"""Row sums as one more product: of the weights' operand, by ones (`Option row_sums = rounded`). A rewriting of core code.

    v = v * f + rowsum(P); Reshape P ... and get PA; Compute GEMM PA, V and accumulate acc

becomes a tile of eight equal columns, which is rescaled and added to beside acc; v is read from it behind the loop:

    v_parts = v_parts * f; ...; Compute GEMM PA, V and accumulate acc; Compute GEMM PA, ones and accumulate v_parts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from generator.tl.ir import Allocate, Compute, Expr, For, Gemm, Num, Op, Program, Reshape, Stmt, Var, walk_statements
from generator.tl.softmax import fresh, names_of
from generator.translate.passes.schedule import deferred_sums
from generator.translate.passes.scope import carried, defs, uses

#: The right operand that is no tile: ones in registers. No name of a program holds a space.
ONES = "of ones"
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class _Sum:
    """One row sum of a loop: where it is added to, the factor of what was there before, and the product it goes with."""

    name: str
    at: int
    factor: Expr | None
    operand: str
    product: int


def with_rounded_sums(core: Program) -> Program:
    """The program with its loops' row sums taken by products, where the option is stated and products read the weights."""
    if core.options["row_sums"] != "rounded":
        return core
    taken = set(names_of(core))
    body: list[Stmt] = []
    for s in core.body:
        sums = _sums(s, core) if isinstance(s, For) else []
        parts = {x.name: fresh(f"{x.name}_parts", taken) for x in sums}
        if isinstance(s, For) and sums:
            body = [*_allocated(body, parts), replace(s, body=tuple(_rewritten(s, sums, parts)))]
            body += [Compute(x.name, Op("rowmax", (Var(parts[x.name]),))) for x in sums]
        else:
            body.append(s)
    return replace(core, body=tuple(body))


def _allocated(body: list[Stmt], parts: dict[str, str]) -> Iterator[Stmt]:
    for s in body:
        yield s
        if isinstance(s, Allocate) and s.name in parts:
            yield Allocate(parts[s.name], "register", (*s.shape, Num(COLUMNS)), "f32", (), s.init)


def _sums(loop: For, core: Program) -> list[_Sum]:
    body, out = loop.body, []
    if any(isinstance(s, For) for s in walk_statements(body)):
        return []
    for name in deferred_sums(body, carried(body), core):
        at = next(i for i, s in enumerate(body) if isinstance(s, Compute) and s.into == name)
        match body[at]:
            case Compute(value=Op("+", (old, Op("rowsum", (Var(weights),))))):
                reshapes = [i for i, s in enumerate(body) if isinstance(s, Reshape) and s.source == weights]
                made = [i for i, s in enumerate(body) if weights in defs(s)]
                if len(reshapes) != 1 or len(made) != 1 or not made[0] < min(at, reshapes[0]):
                    continue
                operand = defs(body[reshapes[0]]).pop()
                read = [i for i, s in enumerate(body) if operand in uses(s)]
                if read and all(isinstance(body[i], Gemm) for i in read) and min(read) > max(at, reshapes[0]):
                    factor = old.args[1] if isinstance(old, Op) else None
                    out.append(_Sum(name, at, factor, operand, read[0]))
    return out


def _rewritten(loop: For, sums: list[_Sum], parts: dict[str, str]) -> Iterator[Stmt]:
    for i, s in enumerate(loop.body):
        here = [x for x in sums if x.at == i]
        for x in here:
            if x.factor is not None:
                yield Compute(parts[x.name], Op("*", (Var(parts[x.name]), x.factor)))
        if not here:
            yield s
        yield from (Gemm(x.operand, False, ONES, False, parts[x.name], True) for x in sums if x.product == i)
