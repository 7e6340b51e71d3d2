"""Holes filled and enumerated. Chooses nothing: the tuner does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from generator.tl.diagnostics import Diagnostic, TLError
from generator.tl.expressions import did_you_mean
from generator.tl.ir import Constant, Program, Stmt


def fill(program: Program, values: Mapping[str, int]) -> Program:
    """The program with `Constant NAME in {...}` set to `values[NAME]`; holes that are not named stay.

    A constant that is no hole may only be given the value it has. Raises TLError for unknown names and values that are no choice.
    """
    constants = program.constants
    errors = [_unknown(name, constants) for name in values if name not in constants]
    given = [(c, values[name]) for name, c in constants.items() if name in values]
    errors += [_no_choice(c, value) for c, value in given if type(value) is not int or value not in c.choices]  # 64.0 in (64,)
    if errors:
        raise TLError(errors)

    def one(s: Stmt) -> Stmt:
        return replace(s, choices=(values[s.name],)) if isinstance(s, Constant) and s.name in values else s

    return replace(program, body=tuple(one(s) for s in program.body))


def hole_choices(program: Program) -> Iterator[dict[str, int]]:
    """Every way to fill all holes, the first hole slowest; one empty choice where there is no hole."""
    holes = program.holes
    for choice in product(*(h.choices for h in holes.values())):
        yield dict(zip(holes, choice, strict=True))


def spread_choices(program: Program, limit: int) -> list[dict[str, int]]:
    """`hole_choices`, or `limit` of them at equal distances where there are more: a stranger's program may have any number."""
    holes = program.holes
    total = prod(len(h.choices) for h in holes.values())
    if total <= limit:
        return list(hole_choices(program))
    picked = []
    for i in range(limit):
        rest, choice = i * total // limit, {}
        for name, hole in reversed(holes.items()):
            rest, at = divmod(rest, len(hole.choices))
            choice[name] = hole.choices[at]
        picked.append({name: choice[name] for name in holes})
    return picked


def _unknown(name: str, constants: Mapping[str, Constant]) -> Diagnostic:
    hint = did_you_mean(name, constants) or f"the constants are {', '.join(constants) or 'none'}"
    return Diagnostic("unknown-name", "error", f"{name} is no constant of this program", hint=hint, found=name)


def _no_choice(c: Constant, value: int) -> Diagnostic:
    allowed = ", ".join(map(str, c.choices))
    return Diagnostic("hole", "error", f"{c.name} = {value} is no choice: {allowed}", c.span, expected=allowed, found=str(value))
