"""The order in which tile sizes are tried: by what moves for each score, without what exceeds the caches."""

from __future__ import annotations

from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec, Rule
from generator.targets import CPU_TARGETS
from generator.tl.fill import hole_choices
from generator.tuning import ordered_choices

CODE = RuleAuthor().code(AttentionSpec(32, 8, 128, 128, 1, 2048, 2048, masks=(Rule.make("causal"),)), "cpu")
AVX512 = CPU_TARGETS["avx512"]


def test_every_choice_that_fits_comes_once() -> None:
    choices = ordered_choices(CODE, AVX512, {"l2": 64 << 20})
    assert sorted(map(str, choices)) == sorted(map(str, hole_choices(CODE)))


def test_larger_tiles_come_first_until_they_exceed_l2() -> None:
    large = ordered_choices(CODE, AVX512, {"l2": 2 << 20})
    small = ordered_choices(CODE, AVX512, {"l2": 256 << 10})
    assert large[0]["BM"] * large[0]["BN"] > small[0]["BM"] * small[0]["BN"]
    assert len(small) < len(large)


def test_something_is_left_on_the_smallest_cache() -> None:
    assert ordered_choices(CODE, AVX512, {"l2": 1024}) == [{"BM": 32, "BN": 64}]
