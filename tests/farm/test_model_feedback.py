"""What a row tells the author of its program: facts, and never speed and correctness in one number."""

import dataclasses
import json
from pathlib import Path

import pytest

from farm import model_feedback
from farm.model_settings import ModelSettings
from generator.authors.prompting import task_prompts
from generator.authors.proposal import Proposal
from generator.spec import AttentionSpec
from verifier.records import REASONS
from verifier.reviewer import Wrong

STALLS = {"waiting": [["long_scoreboard", 0.41], ["math_pipe_throttle", 0.3]], "busy": [["multiprocessors", 0.62]], "why": ""}
OK = {
    "reason_code": "ok",
    "row_id": "r1",
    "p50_s": 100e-6,
    "floor_s": 40e-6,
    "baseline_name": "cudnn",
    "baseline_p50_s": 120e-6,
    "ratio_p50": 1.2,
    "registers": 168,
    "spill_bytes": 0,
    "shared_bytes": 98304,
    "tuning": json.dumps({"BM": 128, "BN": 64}),
    "resources": json.dumps({"stalls": STALLS}),
}


def test_what_was_measured_is_told():
    text = model_feedback.of_row(OK).text
    for fact in (
        "median time of a call: 100.0 us",
        "no right kernel can be faster than: 40.0 us",
        "cudnn in the same run: 120.0 us (1.20 times ours)",
        "168 registers a thread",
        "0 bytes spilled a thread",
        "98304 bytes of shared memory a block",
        "constants: BM = 128, BN = 64",
        "a warp waits for: long scoreboard 41%, math pipe throttle 30%",
        "busy, of what the device can do: multiprocessors 62%",
    ):
        assert fact in text


@pytest.mark.parametrize("missing", ["floor_s", "baseline_p50_s", "registers", "tuning", "resources"])
def test_what_was_not_measured_is_left_out(missing):
    text = model_feedback.of_row(OK | {missing: None}).text
    assert "None" not in text and "median time" in text


@pytest.mark.parametrize("reason", REASONS)
def test_only_right_programs_have_a_time_and_nothing_else_does(reason):
    """Correctness is a kind, speed is seconds: no failure has a score, however fast it ran, and no score says how right."""
    found = model_feedback.of_row(OK | {"reason_code": reason, "message": "m"})
    assert (found.score_s is not None) == found.is_correct == (reason == "ok")
    assert found.score_s in (None, OK["p50_s"])


def test_a_wrong_value_comes_with_the_smallest_input_that_shows_it():
    row = {"reason_code": "wrong_value", "message": "O differs", "witness_input": "length 1"}
    row |= {"witness_expected": "0.5", "witness_found": "0.25"}
    assert model_feedback.of_row(row).text == "wrong_value: O differs\ninput: length 1\nexpected: 0.5\nfound: 0.25"
    wrong = model_feedback.of_review(
        Wrong("S is not Q K^T.", 2, "5 queries, 5 keys, random"), "Kernel k\n  Compute GEMM Q, K and get S"
    )
    assert wrong.text.startswith("line 2: Compute GEMM Q, K and get S\nS is not Q K^T. (smallest input that shows it: 5 queries")


def test_a_right_program_is_asked_to_be_faster_with_what_was_measured():
    prompts = task_prompts(AttentionSpec(2, 1, 32, 32, 1, 64, 64), "a CPU", "cpu.", 24_000)
    asked = prompts.improve(Proposal("llm:m", "tl", "Kernel k\n"), model_feedback.of_row(OK))
    assert "This program is right" in asked and "Write a faster one" in asked
    assert "> median time of a call: 100.0 us" in asked and "> 168 registers a thread" in asked


def test_the_page_on_model_authors_names_every_option():
    page = (Path(__file__).parents[2] / "docs/model_author.md").read_text()
    options = {f.name for f in dataclasses.fields(ModelSettings)} - {"budget", "prices"}
    assert not [name for name in options if f"`{name}`" not in page]
