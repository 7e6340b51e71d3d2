"""Which tile sizes are tried on a GPU: the good ones of each head size, nothing that cannot fit. Measures nothing."""

from __future__ import annotations

import pytest

from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec
from generator.targets import TARGETS
from generator.tl.fill import fill
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program
from generator.translate import translate
from generator.translate.records import Translated
from generator.tuning import TUNED_HINTS, neighbours, ordered_choices, with_choice

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


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_neighbours_differ_by_a_step_and_their_hints_reach_the_translator(target: str) -> None:
    code = RuleAuthor().code(AttentionSpec(4, 2, 64, 64, 1, 256, 256, "fp16"), target)
    tiles = ordered_choices(code, TARGETS[target], {})
    near = list(neighbours(tiles[0], tiles, TARGETS[target]))
    assert len({str(sorted(c.items())) for c in near}) == len(near) and tiles[0] not in near
    for name, value in TUNED_HINTS[target]:
        assert tiles[0] | {name: value} in near
    for choice in near[: len(TUNED_HINTS[target]) + 2]:
        assert len(choice.items() ^ tiles[0].items()) in (1, 2)
        program = with_choice(code, choice)
        assert not program.holes and program.hints.items() >= {n: v for n, v in choice.items() if n not in tiles[0]}.items()
        made = translate(program, TARGETS[target])
        assert isinstance(made, Translated) or made.reason in ("does_not_fit", "translate_failed"), made


def test_hints_of_a_choice_replace_those_of_the_program() -> None:
    code = RuleAuthor().code(AttentionSpec(4, 2, 64, 64, 1, 256, 256, "fp16"), "sm_80")
    once = with_choice(code, {"BM": 128, "BN": 64, "stages": "2"})
    assert with_choice(once, {"stages": "3"}).hints["stages"] == "3"
    assert print_program(with_choice(once, {"stages": "3"})).count("Hint stages") == 1
    assert parse_or_raise(print_program(once)).hints["stages"] == "2"
