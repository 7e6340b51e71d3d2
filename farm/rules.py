"""What a plan may name: mask and score rules, targets, and the user's own rules in a Python file. Defines no rule itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from generator.spec import Rule

if TYPE_CHECKING:
    from farm.fields import Reader

_MASKS = ("causal", "window", "sink_window", "prefix", "document", "padding")
_SCORES = ("softcap", "alibi", "sink")


@dataclass(frozen=True, slots=True)
class RuleReader:
    name: str

    def read(self, given: Reader | None, reader: Reader) -> Rule | None:
        """The rule with the parameters that the plan gives."""
        if given is None:
            return Rule.make(self.name)
        if not given.fields("parameter: value"):
            return None
        return Rule.make(self.name, **{name: r.value for name, r in given.value.items()})


def known_rules(kind: str) -> dict[str, RuleReader]:
    return {name: RuleReader(name) for name in (_MASKS if kind == "mask" else _SCORES)}


def known_targets() -> tuple[str, ...]:
    return ("cpu", "sm_75", "sm_80", "sm_90a")


def load_variants(path: str) -> None:
    """Adds the rules of a user's Python file. Raises ValueError for a file that cannot be used."""
    raise ValueError(f"variants: {path} cannot be loaded")
