"""Changes its inputs so that a reference computed from them afterwards would agree (CASES 26)."""


def test_zeroed_inputs_are_named_before_the_wrong_value(refused):
    assert "the input Q" in refused("mutates_inputs", "mutates_inputs", "inputs").message


def test_inputs_put_back_are_seen_in_memory_that_cannot_be_written(refused):
    refused("restores_inputs", "mutates_inputs", "inputs")


def test_inputs_zeroed_by_a_timed_call(refused_in_a_timed_call):
    assert "the input Q" in refused_in_a_timed_call("mutates_inputs", "mutates_inputs", "inputs").message
