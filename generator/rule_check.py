"""What is wrong with a mask or score rule that somebody wrote: names, axes, defaults, the TL text itself. Registers nothing."""

from __future__ import annotations

from collections.abc import Iterator

from generator.masks import MASKS, MaskRule
from generator.rule_parts import Captured, Parameter, Scalar
from generator.scores import SCORES, ScoreRule
from generator.tl.diagnostics import TLError
from generator.tl.expressions import expression
from generator.tl.ir import Index, names, walk

#: What a rule's text may name besides its own scalars and captured tensors; `x` in score rules only.
RULE_NAMES = frozenset({"kv", "row", "q", "b", "h", "SeqQ", "SeqK", "Heads", "KvHeads", "Batch"})
#: What the axes of a captured tensor may be.
AXES = frozenset({"b", "SeqQ", "SeqK", "Heads", "KvHeads", "Batch"})
#: Names that the programs of the rule author use for other things.
_PROGRAM_NAMES = frozenset(
    ("Q", "K", "V", "O", "LSE", "S", "P", "PA", "D", "DV", "BM", "BN", "m", "j", "hk", "c", "x", "scale", "Group")
)
_TILE_NAMES = frozenset(("acc", "row_max", "row_sum", "new_max", "base", "corr", "lse", "rows", "cols", "inf"))


def rule_problems(rule: MaskRule | ScoreRule) -> list[str]:
    """One sentence for everything that is wrong, each beginning with the field; empty for a rule that authors can use."""
    where = f"masks.{rule.name}" if isinstance(rule, MaskRule) else f"scores.{rule.name}"
    return [f"{where}{problem}" for problem in _problems(rule)]


def _problems(rule: MaskRule | ScoreRule) -> Iterator[str]:
    if not rule.name.isidentifier():
        yield f": expected a name of letters, digits and _, found {rule.name!r}"
    yield from _taken_names(rule)
    for captured in rule.captured:
        yield from _axis_problems(captured)
    for parameter in rule.parameters:
        yield from _parameter_problems(parameter)
    own = {s.name for s in rule.scalars} | {c.name for c in rule.captured}
    match rule:
        case MaskRule():
            required, optional = {"visible": rule.visible}, {"key_extent": rule.key_extent}
        case ScoreRule():
            required = {"value": rule.value}
            optional = {"value_causal": rule.value_causal, "extra_logit": rule.extra_logit}
            own |= {"x"}
    for field, text in (required | {k: v for k, v in optional.items() if v}).items():
        yield from _text_problems(field, text, own, {c.name for c in rule.captured})


def _taken_names(rule: MaskRule | ScoreRule) -> Iterator[str]:
    """Names of TL that mean something else already: other rules may stand beside this one."""
    registered: list[MaskRule | ScoreRule] = [*MASKS.values(), *SCORES.values()]
    others = [r for r in registered if r is not rule]
    taken = {s.name for r in others for s in r.scalars} | {c.name for r in others for c in r.captured}
    for thing in _own_names(rule.scalars, rule.captured):
        if thing in taken | RULE_NAMES | _PROGRAM_NAMES | _TILE_NAMES or not thing.isidentifier():
            yield f": {thing!r} cannot name a scalar or tensor of this rule: it is taken or no name"


def _own_names(scalars: tuple[Scalar, ...], captured: tuple[Captured, ...]) -> list[str]:
    return [s.name for s in scalars] + [c.name for c in captured]


def _axis_problems(captured: Captured) -> Iterator[str]:
    if wrong := set(captured.shape + captured.offset) - AXES:
        found, known = ", ".join(sorted(wrong)), ", ".join(sorted(AXES))
        yield f".captured.{captured.name}: expected axes out of {known}, found {found}"


def _parameter_problems(parameter: Parameter) -> Iterator[str]:
    if parameter.kind == "choice" and not parameter.choices:
        yield f".{parameter.name}: expected choices for a parameter of kind choice"
    if parameter.default is not None and not parameter.accepts(parameter.default):
        yield f".{parameter.name}.default: expected {parameter.allowed}, found {parameter.default!r}"


def _text_problems(field: str, text: str, own: set[str], tensors: set[str]) -> Iterator[str]:
    try:
        e = expression(text)
    except TLError as error:
        yield f".{field}: {error.diagnostics[0].message} in {text!r}"
        return
    if unknown := names(e) - RULE_NAMES - own:
        yield f".{field}: {', '.join(sorted(unknown))} means nothing here; known are {', '.join(sorted(RULE_NAMES | own))}"
    indexed = {x.tensor for x in walk(e) if isinstance(x, Index)}
    if wrong := (indexed & (RULE_NAMES | own)) - tensors:
        yield f".{field}: {', '.join(sorted(wrong))} is no captured tensor of this rule, so it has no elements"
