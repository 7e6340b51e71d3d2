"""Remembers answers by address: the same memory gets new values."""


def test_new_values_in_the_same_memory(refused):
    assert refused("cached_by_pointer", "wrong_value", "max_abs").input_name == "new values in the same memory"
