"""Breaks the clocks of its process: time is taken by the supervisor, and the two clocks are compared."""

import math

from verifier.records import Measurement


def test_a_process_whose_clocks_stand_still_is_timed_all_the_same(timed):
    result = timed("slow_and_patched_clock")
    assert isinstance(result, Measurement), result
    assert result.ours.p20_s > 0.005, "the kernel spins for sixty million cycles"
    ratio = result.wall_vs_device  # its clock gives what the stack had: no time at all, or days
    assert ratio > 2 or ratio < 0.5 or math.isinf(ratio), "its own clock was stopped"
