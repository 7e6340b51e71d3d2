"""Right only with the threads of the test, or keeps threads: run with one thread too, and the pool is counted."""


def test_half_of_the_work_with_one_thread(refused):
    assert refused("two_threads_only", "wrong_value", "max_abs").message.startswith("called with one thread, ")


def test_a_thread_of_the_pool_that_stays_at_work(refused):
    assert "1 of 2 threads" in refused("left_at_work", "crash", "threads").message


def test_a_thread_that_stays_at_work_while_timed(timed):
    """Refused for the thread, or, where it was stopped in time, for the rows that it had not written."""
    result = timed("left_at_work")
    assert (result.reason, result.witness.check) in (("crash", "threads"), ("unwritten_output", "written")), result
