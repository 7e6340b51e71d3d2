"""Programs are found in whatever a model says; nothing in the text can crash, stall or mislead the search."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.authors.answers import MAX_ANSWER_CHARS, MAX_BLOCK_CHARS, clean, estimate_tokens, extract, fenced_blocks

PROGRAM = "Kernel k\nGrid m = 0:1\n"


@pytest.mark.parametrize(
    "text",
    [
        f"```tl\n{PROGRAM}```",
        f"Sure! Here it is:\n\n```tl\n{PROGRAM}```\nHope this helps.",
        f"```TL\r\n{PROGRAM}```".replace("\n", "\r\n").replace("\r\r", "\r"),
        f"~~~tl\n{PROGRAM}~~~",
        f"````tl\n{PROGRAM}````",
        f"```\n{PROGRAM}```",
        f"```tl title=kernel\n{PROGRAM}```",
        f"   ```tl\n{PROGRAM}   ```",
        f"\ufeff\u200b```tl\n{PROGRAM}```",
        f"```tl\n{PROGRAM}",
        f"```tl\nKernel old\n```\nWait, that is wrong.\n```tl\n{PROGRAM}```",
        f"Here is the program.\n{PROGRAM}That is all.",
    ],
)
def test_the_program_is_found(text):
    assert extract(text).get("tl").strip() == PROGRAM.strip()


def test_sketch_and_code_are_told_apart():
    found = extract(f"```sketch\nCopy Q from global to shared\n```\n```tl\n{PROGRAM}```\n```cuda\n__global__ void f();\n```")
    assert found.get("sketch") == "Copy Q from global to shared\n" and found.get("source") == "__global__ void f();\n"


@pytest.mark.parametrize(
    "text", ["", "I cannot help with that.", "```python\nprint(1)\n```", "```", "Kernel", "The Kernel is fast.\n", "\x00" * 1000]
)
def test_no_program_is_none(text):
    assert extract(text).get("tl") is None


def test_what_was_cut_is_said():
    assert "ends inside" in extract(f"```tl\n{PROGRAM}").remarks[0]
    assert "outside" in extract(PROGRAM).remarks[0]
    assert "only the first" in extract("x" * (MAX_ANSWER_CHARS + 1)).remarks[0]
    found = extract("```tl\n" + "x" * (MAX_BLOCK_CHARS + 1) + "\n```")
    assert found.get("tl") is None and "at most" in found.remarks[0]


def test_invisible_and_bidirectional_characters_do_not_reach_the_parser():
    assert clean("Copy\u202e Q\u200b fr\u0000om\ufeff") == "Copy Q from"


@pytest.mark.parametrize(
    "text",
    ["`" * 2_000_000, "```tl\n" * 300_000, ("```" + " " * 100_000) * 20, "Kernel a\n" * 500_000, "~" * 10**6 + "\n" * 10**6],
)
def test_hostile_lengths_take_under_a_second(text):
    start = time.process_time()
    extract(text)
    assert time.process_time() - start < 1


@given(st.text())
def test_any_text_is_survived(text):
    extract(text)
    assert estimate_tokens(text) >= len(text) / 3


@given(st.lists(st.sampled_from(["```", "~~~", "```tl", "````", "text", "Kernel k", "", "   ```"]), max_size=30))
def test_blocks_hold_no_fence_that_closes_them(lines):
    for block in fenced_blocks("\n".join(lines)):
        assert block.text.endswith("\n")
