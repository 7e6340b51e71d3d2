"""Takes whatever memory holds for the answer: outputs are poisoned, and the reference was never in the process."""


def test_an_answer_left_in_the_output_is_not_there(refused):
    refused("stale_answer", "unwritten_output", "written")


def test_scratch_that_nobody_cleared_is_dirty(refused):
    refused("uninitialised", "wrong_value", "")  # what memory holds decides which check sees it
