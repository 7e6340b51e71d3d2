"""Touches memory that is not its own: behind a tensor, between rows, or by multiplying rubbish with zero."""


def test_writing_behind_the_output(refused):
    assert "after its end" in refused("writes_past_end", "out_of_bounds", "guard bands").message


def test_writing_between_rows(refused):
    assert "between its rows" in refused("writes_in_gaps", "out_of_bounds", "guard bands").message


def test_reading_behind_an_input(refused):
    assert "reads memory outside" in refused("reads_past_end", "out_of_bounds", "guard bands").message


def test_rubbish_times_zero(refused):
    refused("reads_beyond_as_zero", "wrong_value", "finite")
