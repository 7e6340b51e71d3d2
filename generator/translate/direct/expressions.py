"""Expressions of a launch description: which lists, names and numbers are one. Computes none (`verifier.cuda_arguments` does)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from generator.translate.direct.reading import Field

#: Function -> how many arguments it takes, least and most.
FUNCTIONS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("+", "-", "*", "//", "%", "ceildiv", "<", "<=", ">", ">=", "==", "!="), (2, 2)),
    **dict.fromkeys(("max", "min"), (2, 8)),
    "neg": (1, 1),
    "where": (3, 3),
}
MAX_DEPTH = 12
MAX_NUMBER = 2**53


def expression(field: Field, names: Collection[str], *, fractions: bool = False, depth: int = 0) -> Any:
    """The expression as it stands, or None. names: of scalars that it may use. fractions: whether numbers need not be whole."""
    value = field.value
    if depth > MAX_DEPTH:
        return field.wrong(f"expected at most {MAX_DEPTH} functions inside each other")
    if isinstance(value, bool) or not isinstance(value, (int, float, str, list)):
        return field.expected("a number, the name of a scalar, or [function, argument, ...]")
    if isinstance(value, (int, float)):
        return _number(field, fractions)
    if isinstance(value, str):
        return field.one_of(sorted(names), "a scalar of this call, one of")
    return _call(field, names, fractions, depth)


def _number(field: Field, fractions: bool) -> int | float | None:
    value = field.value
    fits = abs(value) <= MAX_NUMBER and (isinstance(value, int) or (fractions and math.isfinite(value)))
    return value if fits else field.expected(f"a {'' if fractions else 'whole '}number of at most 2^53")


def _call(field: Field, names: Collection[str], fractions: bool, depth: int) -> list[Any] | None:
    value = field.value
    if not value or not isinstance(value[0], str) or value[0] not in FUNCTIONS:
        return field.expected(f"[function, argument, ...] with one of {' '.join(FUNCTIONS)}")
    least, most = FUNCTIONS[value[0]]
    if not least <= len(value) - 1 <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        return field.wrong(f"{value[0]}: expected {count} argument{'s' if most > 1 else ''}, found {len(value) - 1}")
    arguments = [
        expression(field.at(x, f"[{i}]"), names, fractions=fractions, depth=depth + 1) for i, x in enumerate(value[1:], 1)
    ]
    return None if any(x is None for x in arguments) else [value[0], *arguments]
