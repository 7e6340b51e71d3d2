"""NaN, infinities and rows that see nothing: only the very pattern of the reference will do (CASES 30)."""


def test_nan_never_equals_nan(refused):
    refused("nan_filled", "wrong_value", "finite")


def test_a_row_that_sees_nothing_is_no_division_of_zero_by_zero(refused):
    assert refused("masked_rows_nan", "wrong_value", "finite").input_name == "more queries than keys"


def test_a_finite_stand_in_for_minus_infinity_in_lse(refused):
    assert refused("masked_rows_mean", "wrong_value", "lse pattern").expected == "-inf"


def test_scores_below_a_finite_stand_in(refused):
    assert refused("finite_minus_infinity", "wrong_value", "max_abs").input_name == "very negative logits"


def test_raw_exponentials(refused):
    assert refused("no_running_max", "wrong_value", "max_abs").input_name == "large logits"
