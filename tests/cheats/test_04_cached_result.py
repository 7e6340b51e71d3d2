"""Remembers answers by address: the same memory gets new values, when judged and between timed calls."""


def test_new_values_in_the_same_memory(refused):
    assert refused("cached_by_pointer", "wrong_value", "max_abs").input_name == "other queries, all else the same"


def test_new_values_between_timed_calls(refused_in_a_timed_call):
    refused_in_a_timed_call("cached_by_pointer", "wrong_value", "max_abs")
