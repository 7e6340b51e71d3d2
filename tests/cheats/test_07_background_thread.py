"""Leaves the work to a thread that nobody waits for: no thread can be started."""


def test_no_thread_can_be_started(refused):
    assert "thread" in refused("background_thread", "crash", "system call").message
