"""Stops the clocks of its process: time is taken by the supervisor, and the two clocks are compared."""

import math

from verifier.records import Measurement


def test_a_process_whose_clocks_stand_still_is_timed_all_the_same(timed):
    result = timed("slow_and_patched_clock")
    assert isinstance(result, Measurement), result
    assert result.ours.p20_s > 0.005, "the kernel spins for sixty million cycles"
    assert result.wall_vs_device > 2 or math.isinf(result.wall_vs_device), "its own clock was stopped"
