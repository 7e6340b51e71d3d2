"""Tells repetitions by their buffers: warm-up, timed and checked calls look alike, and a skipped one leaves the poison."""


def test_buffers_that_were_seen_before(refused):
    refused("new_buffers_only", "unwritten_output", "written")


def test_buffers_that_were_seen_before_while_timed(refused_in_a_timed_call):
    refused_in_a_timed_call("new_buffers_only", "unwritten_output", "written")
