"""compute-sanitizer around a kernel: which inputs it sees, what its words become, and what is said where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_gpu import HALF, FakeNvml, fake_binary

from verifier import cuda_sanitize
from verifier.cuda_sanitize import Clean, NoSanitizer, chosen_trials, find_sanitizer, outcome_of, sanitize
from verifier.records import Failed
from verifier.trial import trials_for

#: Starts what it is to watch, then says what the test put into a file.
TOOL = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2; shift 2
"$@" || exit 9
cat "{said}" > "$log"
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUTSIDE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at attention_kernel(Params)+0x1230
=========     by thread (0,0,0) in block (39,0,0)
=========     Access at 0x7fd2c0000280 is out of bounds
========= ERROR SUMMARY: 1 error
"""
HAZARD = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k+0x40 and Read access at k+0x80 [32 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts a stand-in on the path that says the given text after the child has run."""
    find_sanitizer.cache_clear()

    def put(said: str) -> None:
        (tmp_path / "said").write_text(said)
        program = tmp_path / "bin" / "compute-sanitizer"
        program.parent.mkdir(exist_ok=True)
        program.write_text(TOOL.format(said=tmp_path / "said"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    yield put
    find_sanitizer.cache_clear()


def test_a_clean_kernel_is_called_on_every_chosen_input(fake_driver: FakeNvml, tool, tmp_path: Path) -> None:
    tool(CLEAN)
    binary, launch = fake_binary("good", tmp_path)
    found = sanitize(binary, launch, HALF, tools=("memcheck", "synccheck"), seed=5)
    assert found == Clean(f"memcheck: clean; synccheck: clean ({len(chosen_trials(trials_for(HALF, 5).trials))} inputs)", True)


def test_what_the_tool_finds_fails_the_kernel(fake_driver: FakeNvml, tool, tmp_path: Path) -> None:
    tool(OUTSIDE)
    binary, launch = fake_binary("good", tmp_path)
    found = sanitize(binary, launch, HALF, tools=("memcheck",), seed=5)
    assert isinstance(found, Failed) and found.reason == "out_of_bounds"
    assert found.witness.check == "compute-sanitizer memcheck"
    assert found.witness.message.startswith(
        "memcheck: Invalid __global__ write of size 2 bytes at attention_kernel(Params)+0x1230"
    )


def test_a_kernel_that_does_not_come_back_was_not_looked_at(fake_driver: FakeNvml, tool, tmp_path: Path) -> None:
    tool(CLEAN)
    binary, launch = fake_binary("endless", tmp_path)
    found = sanitize(binary, launch, HALF, tools=("memcheck",), seed=5, wall_s=2.0)
    assert isinstance(found, Clean) and not found.ran and "not finished in 2 s" in found.words


def test_words_of_the_tools() -> None:
    found = outcome_of("racecheck", HAZARD, "", "3")
    assert isinstance(found, Failed) and found.reason == "nondeterministic" and "Race reported between" in found.witness.message
    assert outcome_of("memcheck", CLEAN, "", "3") == Clean("clean", True)
    assert outcome_of("memcheck", CLEAN, "ImportError: pycuda", "") == Clean("could not look: ImportError: pycuda", False)
    refused = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n"
    assert outcome_of("memcheck", refused, "", "") == Clean(
        "could not look: Error: Device not supported. Please refer to the documentation", False
    )


def test_small_inputs_of_every_layout_are_chosen() -> None:
    trials = trials_for(HALF, 5).trials
    chosen = chosen_trials(trials)
    layouts = {t.case.layout for t in trials} - {"far"}
    assert 1 <= len(chosen) <= cuda_sanitize.MAX_INPUTS and {t.case.layout for t in chosen} == layouts
    assert all(0 not in t.case.shape for t in chosen)


def test_where_there_is_none_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(cuda_sanitize, "_PLACES", ())
    find_sanitizer.cache_clear()
    with pytest.raises(NoSanitizer, match="compute-sanitizer was not found: install the CUDA toolkit"):
        find_sanitizer()
    find_sanitizer.cache_clear()
