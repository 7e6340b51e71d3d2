"""Right for the first calls, wrong later. A kernel that holds on for longer is for the timed iterations to find."""


def test_ten_right_calls_are_not_enough(refused):
    refused("right_ten_times", "wrong_value", "max_abs")
