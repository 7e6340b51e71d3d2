"""Does the work of several calls in one and skips the others: each call has buffers of its own, and all are looked at."""


def test_every_second_call_skipped(refused_in_a_timed_call):
    refused_in_a_timed_call("every_second_call", "unwritten_output", "written")
