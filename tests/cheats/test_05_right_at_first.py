"""Right for the first calls, wrong later: answers are checked after many calls, and after the last timed one."""


def test_a_dozen_right_calls_are_not_enough(refused):
    refused("right_a_dozen_times", "wrong_value", "max_abs")


def test_nor_are_they_while_timed(refused_in_a_timed_call):
    refused_in_a_timed_call("right_a_dozen_times", "wrong_value", "max_abs")
