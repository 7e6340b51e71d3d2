"""What the CPU translator decides, read from its schedule: layouts, fusion, limits, sharing, and the reasons for a fallback."""

from __future__ import annotations

import re

from cpu_kernels import program_of, translated
from test_cpu_programs import source

ATTENTION = source("attention", BM=64, BN=96, D=64, DV=64)


def kernel_text(text: str, target: str = "cpu-avx2") -> str:
    """The part of the source that is not the runtime."""
    out = translated(program_of(text), target).source
    return out[out.index("// ---- the kernel") :]


def test_attention_fuses_into_two_passes_over_the_scores() -> None:
    schedule = translated(program_of(ATTENTION)).schedule
    fused = "columns: S, rowmax | rows: new_max, new_max, base, corr, row_max | columns: P, rowsum, PA | rows: row_sum"
    assert any(nest.endswith(fused) for nest in schedule["nests"])
    assert schedule["memory"] == {"P": "S", "PA": "S"}
    assert schedule["products"] == [
        "S = Q K^T: columns broadcast, rows in lanes",
        "acc += PA V: rows broadcast, columns in lanes, scaled by corr on loading",
    ]
    assert schedule["grid"][0] == "m: longest first"


def test_masks_become_limits_and_vanish_where_all_is_visible() -> None:
    text = kernel_text(ATTENTION)
    assert "min(SeqK, SeqK + 64 * m + rows - SeqQ + 1)" in text
    assert re.search(r"body0<false>\(\);  // every row sees every column", text)
    assert translated(program_of(ATTENTION)).schedule["unseen columns left out"] == ["P in loop 0", "PA in loop 0", "S in loop 0"]


def test_skipping_is_given_up_where_a_masked_tile_does_something() -> None:
    """Counting iterations is no identity: every tile runs, each with its mask."""
    counting = ATTENTION.replace(
        "  Compute row_sum = row_sum * corr + rowsum(P)", "  Compute row_sum = row_sum * corr + rowsum(P) + 1.0"
    )
    schedule = translated(program_of(counting)).schedule
    assert schedule["unseen columns left out"] == []
    assert "no tile is skipped" in schedule["loops"][0]["notes"][0]
    assert "continue;" not in kernel_text(counting)


def test_hints_change_nothing_but_skipping() -> None:
    unskipped = ATTENTION.replace("Grid m", "Hint skip = off\nGrid m")
    assert "continue;" not in kernel_text(unskipped)
    assert kernel_text(ATTENTION.replace("Grid m", "Hint stages = 3\nGrid m")) == kernel_text(ATTENTION)


def test_sixty_four_bit_offsets() -> None:
    """No product of an index and a stride is taken in 32 bits."""
    assert not re.search(r"\bint (?!main)\w+ =", kernel_text(ATTENTION).replace("for (int i", "").replace("for (int j", ""))


def test_equal_programs_translate_alike() -> None:
    assert translated(program_of(ATTENTION)).source == translated(program_of(ATTENTION + "\n# a comment\n")).source
    assert translated(program_of(ATTENTION), "cpu-avx512").source == translated(program_of(ATTENTION), "cpu-avx2").source
