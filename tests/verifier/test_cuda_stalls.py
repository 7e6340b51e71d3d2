"""The profiler's table is read; without a profiler, or with one that may not look, nothing is claimed."""

import os
from pathlib import Path

import pytest

from generator.spec import AttentionSpec
from verifier import cuda_stalls
from verifier.cuda_stalls import Stalls, read_profile, stalls_of

#: The form of `ncu --csv --page raw`: names, units, one line a call.
TABLE = """==PROF== Connected to process 1
==PROF== Profiling "attention" - 0: 0%....50%....100% - 8 passes
==PROF== Disconnected from process 1
"ID","Process ID","Kernel Name","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed","gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
"","","","inst","inst","inst","%","%"
"0","1","attention","1.0","3.0","1.0","62.5","1,0.5"
"""


def test_waits_are_shares_with_the_largest_first():
    found = read_profile(TABLE.replace("1,0.5", "10.5"))
    assert found.waiting == (("long_scoreboard", 0.6), ("barrier", 0.2)) and found.why == ""
    assert dict(found.busy) == {"multiprocessors": 0.625, "memory": 0.105}


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "it counted nothing"),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            "ERR_NVGPUCTRPERM - The user does not have permission",
        ),
        (TABLE.splitlines()[3], "it counted nothing"),
    ],
)
def test_a_profiler_that_may_not_look_says_why(output, why):
    assert read_profile(output) == Stalls(why=why)


def test_without_a_profiler_there_is_nothing(monkeypatch):
    monkeypatch.setattr(cuda_stalls, "find_profiler", lambda: None)
    assert stalls_of(None, None, AttentionSpec(1, 1, 8, 8, 1, 4, 4), "cuda:0") is None


def test_a_profiler_on_the_path_is_found(tmp_path, monkeypatch):
    cuda_stalls.find_profiler.cache_clear()
    tool = Path(tmp_path / "ncu")
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cuda_stalls.find_profiler() == str(tool)
    cuda_stalls.find_profiler.cache_clear()
