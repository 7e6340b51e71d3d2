"""What a plan may name: mask and score rules with their parameters, and targets. Defines no rule itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from generator.masks import MASKS
from generator.rule_parts import Parameter
from generator.scores import SCORES
from generator.spec import Rule
from generator.targets import CPU_TARGETS, TARGETS, cpu_targets, find_target
from verifier.environment import cpu_flags

if TYPE_CHECKING:
    from farm.fields import Reader


#: `cpu` built for one instruction set, as a plan may name it.
CPU_FORMS = {f"cpu-{isa}": target for isa, target in CPU_TARGETS.items()}


@dataclass(frozen=True, slots=True)
class RuleReader:
    """Reads one use of a rule from a plan: every parameter checked and present, so that equal rules have equal hashes."""

    name: str
    parameters: tuple[Parameter, ...]

    def read(self, given: Reader | None, reader: Reader) -> Rule | None:
        if given is not None and not given.fields(self.describe()):
            return None
        before = len(reader.problems)
        values = {p.name: self._value(p, given, reader) for p in self.parameters}
        if given is not None:
            given.finish()
        return None if len(reader.problems) > before else Rule.make(self.name, **values)  # type: ignore[arg-type]

    def _value(self, parameter: Parameter, given: Reader | None, reader: Reader) -> int | float | str | None:
        found = given.get(parameter.name) if given is not None else None
        if found is None and parameter.default is None:
            return reader.wrong(f"{self.name} needs {parameter.name}: {parameter.allowed} ({parameter.meaning})")
        value = parameter.default if found is None else found.value
        if found is not None and not parameter.accepts(value):
            return found.expected(parameter.allowed)
        return float(value) if parameter.kind == "float" else value  # type: ignore[arg-type]

    def describe(self) -> str:
        return ", ".join(p.name for p in self.parameters) or "no parameters"


def known_rules(kind: str) -> dict[str, RuleReader]:
    """Name -> reader of the mask or score rules that are registered now."""
    rules = MASKS if kind == "mask" else SCORES
    return {name: RuleReader(name, rule.parameters) for name, rule in rules.items()}


def known_targets() -> tuple[str, ...]:
    """Names that a plan may give; `cpu` is the strongest instruction set of the machine that measures."""
    return tuple(dict.fromkeys((*TARGETS, *CPU_FORMS)))


def resolved_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Targets of a plan as what is built: `cpu` in the form of the strongest instruction set here. Raises ValueError."""
    found = (find_target(name, cpu_flags()) for name in targets)
    return tuple(dict.fromkeys(f"cpu-{t.isa}" if t.family == "cpu" else t.name for t in found))


def forms_here() -> tuple[str, ...]:
    """The forms of `cpu` that this processor runs, the strongest first."""
    return tuple(f"cpu-{t.isa}" for t in cpu_targets(cpu_flags()))
