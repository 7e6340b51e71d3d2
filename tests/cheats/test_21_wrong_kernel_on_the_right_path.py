"""Old code judged twice: a right kernel passes and a wrong one fails on the same path, and the bytes that ran are the row's."""

from pathlib import Path

import pytest

from verifier.judge import judge
from verifier.launch import LaunchError
from verifier.records import Failed, Passed
from verifier.traps import kernel


def test_right_passes_and_wrong_fails_in_turn(verdict_on):
    assert isinstance(verdict_on("good"), Passed)
    assert isinstance(verdict_on("zeros"), Failed)
    assert isinstance(verdict_on("good"), Passed)


def test_another_file_under_the_binarys_name_is_not_judged(compiled, spec):
    good, zeros = compiled("good", spec), compiled("zeros", spec)
    kept = Path(good.path).read_bytes()
    try:
        Path(good.path).write_bytes(Path(zeros.path).read_bytes())
        with pytest.raises(LaunchError, match="not what was built"):
            judge(good, kernel(spec, "good").launch, spec)
    finally:
        Path(good.path).write_bytes(kept)
