"""The launch description of C++ that somebody wrote for the CPU target. Reads no source."""

from __future__ import annotations

from generator.spec import AttentionSpec
from generator.targets import CPU_TARGETS, Target
from generator.translate.direct.parameters import NEEDED_TENSORS, call_scalars, call_tensors
from generator.translate.direct.reading import Field
from generator.translate.facts import LaunchFacts
from generator.translate.records import Launch

#: Field -> what it holds, for prompts, messages and docs/direct_author.md.
CPU_FIELDS: dict[str, str] = {
    "entry": 'the name of the extern "C" function',
    "tensors": "the tensors in the order in which the code finds them in call->tensors and call->strides",
    "scalars": "the scalars in the order in which the code finds them: whole numbers in call->ints, the others in call->floats",
    "positive": "optional: scalars that the code only works for when they are above 0",
    "isa": f"optional: the instruction set that the code is compiled for instead of the target's own: {', '.join(CPU_TARGETS)}",
}
ENTRY = r"(?!farm_)[A-Za-z_][A-Za-z0-9_]{0,199}"
ENTRY_WORDS = "the name of a function: letters, digits and _, not beginning with farm_"


def cpu_launch(root: Field, spec: AttentionSpec, target: Target) -> Launch | None:
    """The launch, or None with every problem added to the list of `root`."""
    fields = root.fields(CPU_FIELDS, ("entry", "tensors", "scalars"))
    if fields is None:
        return None
    tensors, scalars = call_tensors(spec), call_scalars(spec)
    entry = fields["entry"].text(ENTRY, ENTRY_WORDS) if "entry" in fields else None
    listed = fields["tensors"].names(tensors, "tensors") if "tensors" in fields else None
    if listed is not None:
        require_tensors(fields["tensors"], listed)
    numbers = fields["scalars"].names(scalars, "scalars") if "scalars" in fields else None
    positive = fields["positive"].names(scalars, "scalars") if "positive" in fields else ()
    isa = fields["isa"].one_of(_isas(target)) if "isa" in fields else target.isa
    if root.problems or entry is None or listed is None or numbers is None or isa is None:
        return None
    promised = call_scalars(spec, frozenset(positive or ()))
    facts: LaunchFacts = {"isa": isa, "family": "direct", "foreign": True}
    order = (*numbers, *(name for name in positive or () if name not in numbers))
    return Launch(entry, tuple(tensors[n] for n in listed), tuple(promised[n] for n in order), facts)


def require_tensors(field: Field, used: tuple[str, ...]) -> None:
    """Every kernel takes the call's own tensors: a result that misses one cannot be right."""
    if missing := [name for name in NEEDED_TENSORS if name not in used]:
        field.wrong(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} used nowhere; every kernel takes them")


def _isas(target: Target) -> tuple[str, ...]:
    """The instruction sets that a processor of the target has, the weakest first."""
    known = tuple(CPU_TARGETS)
    return known[: known.index(target.isa) + 1]
