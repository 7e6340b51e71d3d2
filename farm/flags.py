"""Flags that say something else than the plan: read, checked and put into it. Runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.console import InputError
from farm.fields import did_you_mean
from farm.plan import AUTHORS, Budget, Plan
from farm.rules import known_targets


def changed_plan(
    plan: Plan,
    *,
    targets: str | None = None,
    author: str | None = None,
    budget: str | None = None,
    model: Mapping[str, Any] | None = None,
    tune: int | None = None,
) -> Plan:
    """The plan with what the flags say; None leaves a field alone. Raises InputError that names the flag."""
    if model and (author or plan.author) == "rules":
        flag = "--" + next(iter(model)).replace("_", "-")
        raise InputError(flag, "says how a language model is asked; expected --author llm with it, found the rule author")
    return plan.with_changes(
        targets=None if targets is None else _targets(targets),
        author=None if author is None else _one_of("--author", author, AUTHORS),
        budget=None if budget is None else read_budget(budget, plan.budget),
        tuning=None if tune is None else dataclasses.replace(plan.tuning, candidates=tune),
        author_options=tuple(sorted({**dict(plan.author_options), **model}.items())) if model else None,
    )


def _targets(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_one_of("--targets", name.strip(), known_targets()) for name in text.split(",")))


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InputError(flag, f"expected one of {', '.join(allowed)}, found {value!r}{did_you_mean(value, allowed)}")
    return value


def read_budget(text: str, plan: Budget) -> Budget:
    """`minutes=10,attempts=200,usd=5`, over what the plan says."""
    names = tuple(f.name for f in dataclasses.fields(Budget))
    changes: dict[str, float | int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if _one_of("--budget", name.strip(), names) in changes:
            raise InputError("--budget", f"expected {name.strip()} once, found it twice in {text!r}")
        try:
            number = int(value) if name.strip() in ("attempts", "tokens") else float(value)
        except ValueError:
            number = -1
        if not 0 <= number < float("inf"):
            raise InputError("--budget", f"expected {name.strip()}=NUMBER of at least 0, found {part!r}")
        changes[name.strip()] = number
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]
