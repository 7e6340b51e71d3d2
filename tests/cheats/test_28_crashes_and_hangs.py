"""Crashes, hangs, leaves processes behind, or calls home: each ends within the limit, and the next is judged as ever."""

import time

import psutil
import pytest

from verifier.records import Passed


def candidates_alive() -> list[psutil.Process]:
    """Whatever lives below the processes that start children: those themselves stay."""
    return [process for nursery in psutil.Process().children() for process in nursery.children(recursive=True)]


@pytest.mark.parametrize(("name", "words"), [("null_pointer", "SIGSEGV"), ("aborts", "SIGABRT")])
def test_crashes(refused, name, words):
    assert words in refused(name, "crash", "crash").message


def test_an_endless_loop_is_killed_within_its_limit(refused, verdict_on):
    started = time.monotonic()
    refused("endless", "timeout", "time limit")
    assert time.monotonic() - started < 2.0 + 20.0
    assert not candidates_alive()
    assert isinstance(verdict_on("good"), Passed)


def test_no_process_is_left_behind(refused):
    refused("grandchild", "crash", "system call")
    assert not candidates_alive()


def test_no_network(refused):
    assert "network" in refused("network", "crash", "system call").message
