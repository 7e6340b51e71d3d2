"""A spec in words, and its declarations in TL, for prompts: from the registries that the rule author and the binding read."""

from __future__ import annotations

from collections.abc import Iterator

from generator.binding import key_extent, rule_scalars, rule_tensors, rule_uses
from generator.masks import MaskRule
from generator.rule_parts import Number
from generator.scores import ScoreRule
from generator.spec import TL_DTYPES, AttentionSpec
from generator.tl.ir import FUNCTIONS

_SIZES = ("SeqQ", "SeqK", "Heads", "KvHeads", "Batch")


def operators() -> str:
    return ", ".join(f"`{fn}`" for fn in FUNCTIONS if not fn.isidentifier() or fn in ("and", "or", "not"))


def functions() -> str:
    words = [fn for fn in FUNCTIONS if fn.isalnum() and fn not in ("and", "or", "not", "neg")]
    return ", ".join(f"`{fn}({', '.join('xyz'[: FUNCTIONS[fn]])})`" for fn in words)


def task_in_words(spec: AttentionSpec) -> str:
    """What is to be computed, with each rule's meaning and its expression."""
    heads = {
        "mha": "as many key heads as query heads",
        "gqa": "grouped-query heads (query head h reads key head h // (Heads // KvHeads))",
        "mqa": "one key head for all query heads",
        "mla": "keys and queries wider than values",
    }[spec.head_layout]
    lines = [
        f"attention forward, {spec.dtype}, head dim {spec.head_dim} (values {spec.head_dim_v}), {heads}.",
        "Scores are scale * (q . k), softmax over the visible keys, output O = P V; second output LSE.",
        "The scale is positive."
        if spec.scale > 0
        else "The scale may be negative or zero: a maximum must be taken of scaled scores.",
        "Query row `row` has the position q = row + SeqK - SeqQ on the key axis (bottom-right) unless a rule says top_left.",
    ]
    for source, rule, parameters in rule_uses(spec):
        lines.append(f"- {source}: {rule_in_words(rule, parameters)}")
    if not spec.masks:
        lines.append("- no mask: every key below SeqK is visible.")
    return "\n".join(lines)


def rule_in_words(rule: MaskRule | ScoreRule, parameters: dict[str, Number | str]) -> str:
    choices = "".join(f"; {name} = {value}" for name, value in parameters.items() if isinstance(value, str))
    match rule:
        case MaskRule():
            expression = f"visible where {rule.visible}" + (", q = row" if parameters.get("align") == "top_left" else "")
        case ScoreRule():
            expression = (
                f"extra logit {rule.extra_logit} a row" if rule.extra_logit else f"score = {rule.value}, x being the score so far"
            )
    return f"{rule.description}{choices}: {expression}."


def declarations(spec: AttentionSpec) -> str:
    """Argument and Allocate lines that every program for this spec may start from; tile sizes are left to the author."""
    dtype = TL_DTYPES[spec.dtype]
    scale = "Argument scale f32" + (" positive" if spec.scale > 0 else "")
    lines = [scale, f"Argument {', '.join(_SIZES)} i32"]
    for name, (_, scalar, _) in rule_scalars(spec).items():
        lines.append(f"Argument {name} {scalar.dtype}{' positive' if scalar.positive else ''}  # {scalar.meaning}")
    keys = key_extent(spec)
    if keys != "SeqK":
        lines.append("# K and V end at the sequence's own length: what memory holds beyond (NaN too) then reads as zero")
    lines += _captured_lines(spec)
    lines += [
        f"Constant D = {spec.head_dim}, DV = {spec.head_dim_v}",
        f"Allocate Q in global (SeqQ, D) {dtype} with offset [b, h]",
        f"Allocate K in global ({keys}, D) {dtype} with offset [b, h // (Heads // KvHeads)]",
        f"Allocate V in global ({keys}, DV) {dtype} with offset [b, h // (Heads // KvHeads)]",
        f"Allocate O in global (SeqQ, DV) {dtype} with offset [b, h]",
        "Allocate LSE in global (SeqQ) f32 with offset [b, h]",
    ]
    return "\n".join(lines)


def _captured_lines(spec: AttentionSpec) -> Iterator[str]:
    for captured in rule_tensors(spec).values():
        offset = f" with offset [{', '.join(captured.offset)}]" if captured.offset else ""
        yield f"Allocate {captured.name} in global ({', '.join(captured.shape)}) {captured.dtype}{offset}  # {captured.meaning}"
