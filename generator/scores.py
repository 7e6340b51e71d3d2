"""Score rules: what happens to a scaled score before masks and softmax, as TL text. The verifier defines each again, apart.

`scale * Q K^T` itself is no rule: every spec has it. Rules apply in the order in which the spec lists them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from generator.rule_parts import ALIGN, Captured, Number, Parameter, Scalar, resolve_parameters
from generator.spec import Rule, SpecError


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """value: the new score from the score `x` (TL text); value_causal: the same where a mask hides the future.

    extra_logit: a logit for each row that takes part in the softmax's denominator, and in the LSE, but has no key or value.
    """

    name: str
    description: str
    value: str = "x"
    value_causal: str = ""
    extra_logit: str = ""
    parameters: tuple[Parameter, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    captured: tuple[Captured, ...] = ()


def _cap(parameters: Mapping[str, Number | str]) -> Number:
    cap = parameters["cap"]
    assert not isinstance(cap, str)
    return float(cap)


SCORES: dict[str, ScoreRule] = {
    "softcap": ScoreRule(
        "softcap",
        "scores are bent into (-cap, cap): cap * tanh(score / cap)",
        "cap * tanh(x / cap)",
        parameters=(Parameter("cap", "float", "bound of the scores", above=0),),
        scalars=(Scalar("cap", "f32", "bound of the scores", _cap, positive=True),),
    ),
    "alibi": ScoreRule(
        "alibi",
        "scores fall with the distance of key and query, by a slope for each head: - slope * abs(position of query - key)",
        "x - Slopes[h] * abs(q - kv)",
        "x + Slopes[h] * (kv - q)",
        parameters=(ALIGN,),
        captured=(Captured("Slopes", "f32", "slope of each query head, positive", ("Heads",)),),
    ),
    "sink_logit": ScoreRule(
        "sink_logit",
        "exp(logit of the head) is added to the softmax's denominator and takes part in the LSE; it has no value row",
        extra_logit="SinkLogit[h]",
        captured=(Captured("SinkLogit", "f32", "logit of each query head", ("Heads",)),),
    ),
}


def score_rule(name: str) -> ScoreRule:
    """The registered rule. Raises SpecError that lists the known names."""
    if name not in SCORES:
        raise SpecError(f"scores: expected one of {', '.join(SCORES)}, found {name!r}")
    return SCORES[name]


def score_parameters(rule: Rule) -> dict[str, Number | str]:
    """The parameters of one use, defaults filled in. Raises SpecError naming the field."""
    return resolve_parameters(rule, score_rule(rule.name).parameters, f"scores.{rule.name}")


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The published slope of each head. For a power of two n: 2^(-8 i / n), i = 1 to n; else those of the power of two
    below, then every second one of the power of two above.
    """
    if num_heads < 1:
        raise SpecError(f"num_heads: expected a whole number of at least 1, found {num_heads!r}")
    below = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    if below < num_heads:
        slopes += [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)][: num_heads - below]
    return tuple(slopes)
