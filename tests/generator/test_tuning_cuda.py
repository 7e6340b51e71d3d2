"""Which tile sizes are tried on a GPU: the good ones of each head size, nothing that cannot fit. Measures nothing."""

from __future__ import annotations

import pytest

from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec
from generator.targets import TARGETS
from generator.tl.fill import fill
from generator.translate import translate
from generator.translate.records import Translated
from generator.tuning import ordered_choices

#: Target, head sizes, tiles (queries, keys) that measured best on some shape.
GOOD = [
    ("sm_90a", 64, 64, {(192, 128)}),
    ("sm_90a", 128, 128, {(128, 128), (128, 176), (192, 80)}),
    ("sm_90a", 192, 128, {(128, 112)}),
    ("sm_90a", 256, 256, {(128, 80)}),
    ("sm_80", 64, 64, {(128, 128), (128, 64)}),
    ("sm_80", 128, 128, {(128, 64)}),
    ("sm_75", 64, 64, {(128, 64)}),
    ("sm_75", 128, 128, {(128, 32), (64, 64)}),
]


@pytest.mark.parametrize(("target", "d", "dv", "good"), GOOD)
def test_good_tiles_are_tried_early_and_all_translate(target: str, d: int, dv: int, good: set[tuple[int, int]]) -> None:
    code = RuleAuthor().code(AttentionSpec(4, 2, d, dv, 1, 256, 256, "fp16"), target)
    choices = ordered_choices(code, TARGETS[target], {})
    assert good <= {(c["BM"], c["BN"]) for c in choices[:6]}
    for c in choices:
        assert isinstance(translate(fill(code, c), TARGETS[target]), Translated), c


def test_what_exceeds_the_registers_is_left_out() -> None:
    code = RuleAuthor().code(AttentionSpec(4, 2, 128, 128, 1, 256, 256, "bf16"), "sm_90a")
    tried = {(c["BM"], c["BN"]) for c in ordered_choices(code, TARGETS["sm_90a"], {})}
    assert (192, 176) not in tried and (192, 128) not in tried and (128, 176) in tried
