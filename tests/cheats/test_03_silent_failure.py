"""A launch that fails without a word leaves the poison, whole or in part."""


def test_nothing_written(refused):
    assert "128 of 128 elements" in refused("no_op", "unwritten_output", "written").message


def test_one_row_not_written(refused):
    refused("partial", "unwritten_output", "written")


def test_a_failure_that_is_reported_is_a_crash_with_its_words(refused):
    assert "no memory for scratch" in refused("out_of_memory", "crash", "return code").message
