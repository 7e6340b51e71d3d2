"""Mask rules: which keys a query may see, as TL text with what it reads. The verifier defines each again, apart.

A mask that tells visible keys by comparing `kv` with something fixed for the row lets translators find the tiles to skip: that is
the form to write, joined by `and` and `or`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from generator.rule_parts import ALIGN, UNBOUNDED, Captured, Number, Parameter, Scalar, resolve_parameters
from generator.spec import Rule, SpecError


@dataclass(frozen=True, slots=True)
class MaskRule:
    """A key is visible where `visible` holds (a test in TL); several masks of a spec must all hold.

    hides_future: no key after the query's own position is ever visible. key_extent: how many rows of K and V hold values, where
    that is fewer than SeqK (TL text, one number for a block); what memory holds behind them, NaN too, is never read.
    """

    name: str
    description: str
    visible: str
    parameters: tuple[Parameter, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    captured: tuple[Captured, ...] = ()
    hides_future: bool = False
    key_extent: str = ""


def _side(rule: str, name: str) -> Scalar:
    def value(parameters: Mapping[str, Number | str]) -> Number:
        reach = parameters[name]
        assert isinstance(reach, int)
        return UNBOUNDED if reach < 0 else reach

    return Scalar(f"{rule}{name.capitalize()}", "i32", f"keys visible to the {name} of the query's position (2^30: all)", value)


def _same(parameter: str, name: str, meaning: str) -> Scalar:
    def value(parameters: Mapping[str, Number | str]) -> Number:
        number = parameters[parameter]
        assert isinstance(number, int)
        return number

    return Scalar(name, "i32", meaning, value)


_LEFT = Parameter("left", "int", "keys before the query's position, -1 all; a model's window of N keys is N - 1", minimum=-1)
_RIGHT = Parameter("right", "int", "keys after the query's position, -1 all", 0, minimum=-1)

MASKS: dict[str, MaskRule] = {
    "causal": MaskRule(
        "causal",
        "a query sees no key after its own position",
        "kv <= q",
        (ALIGN,),
        hides_future=True,
    ),
    "window": MaskRule(
        "window",
        "a query sees the keys from `left` before to `right` after its position, both included (FlashAttention's window)",
        "kv >= q - WindowLeft and kv <= q + WindowRight",
        (_LEFT, _RIGHT, ALIGN),
        (_side("Window", "left"), _side("Window", "right")),
    ),
    "sink_window": MaskRule(
        "sink_window",
        "as window, and besides the first `sink` keys that do not lie after the window's right end",
        "(kv < Sink or kv >= q - SinkLeft) and kv <= q + SinkRight",
        (Parameter("sink", "int", "keys at the start that stay visible", minimum=0), _LEFT, _RIGHT, ALIGN),
        (_same("sink", "Sink", "keys at the start that stay visible"), _side("Sink", "left"), _side("Sink", "right")),
    ),
    "prefix": MaskRule(
        "prefix",
        "prefix-LM: a query sees the first `length` keys, and the keys up to its own position",
        "kv < max(Prefix, q + 1)",
        (Parameter("length", "int", "keys that every query sees", minimum=0), ALIGN),
        (_same("length", "Prefix", "keys that every query sees"),),
    ),
    "document": MaskRule(
        "document",
        "packed sequences: a query sees the keys of its own document, given for each query as first and one past the last key",
        "kv >= DocStart[row] and kv < DocEnd[row]",
        captured=(
            Captured("DocStart", "i32", "first key of the query's document", ("SeqQ",), ("b",)),
            Captured("DocEnd", "i32", "one past the last key of the query's document", ("SeqQ",), ("b",)),
        ),
    ),
    "padding": MaskRule(
        "padding",
        "a batch of sequences of unequal length: keys from the sequence's own length on are padding",
        "kv < KvLen[b]",
        captured=(Captured("KvLen", "i32", "number of keys of each sequence", ("Batch",)),),
        key_extent="KvLen[b]",
    ),
}


def mask_rule(name: str) -> MaskRule:
    """The registered rule. Raises SpecError that lists the known names."""
    if name not in MASKS:
        raise SpecError(f"masks: expected one of {', '.join(MASKS)}, found {name!r}")
    return MASKS[name]


def mask_parameters(rule: Rule) -> dict[str, Number | str]:
    """The parameters of one use, defaults filled in. Raises SpecError naming the field."""
    return resolve_parameters(rule, mask_rule(rule.name).parameters, f"masks.{rule.name}")
