"""Writes the answer itself: to the channel, to a file, or by leaving with a good status."""

import json

from generator.spec import AttentionSpec
from verifier.sandbox import Sandbox
from verifier.traps import launch_of


def test_a_forged_message_says_nothing(refused):
    assert "exited with status 0" in refused("forged_answer", "crash", "crash").message


def test_a_good_exit_status_says_nothing(refused):
    refused("exits", "crash", "crash")


def test_no_file_can_be_written(refused):
    refused("writes_result_file", "unwritten_output", "written")


def test_packets_without_the_nonce_are_dropped():
    sandbox = Sandbox(b"", launch_of(AttentionSpec(1, 1, 8, 8, 1, 1, 1)), 1)
    try:
        for forged in (b"rubbish", b"[]", json.dumps({"nonce": "guess", "result": "done"}).encode()):
            sandbox._theirs.send(forged)
        sandbox._theirs.send(json.dumps({"nonce": "right", "result": "done"}).encode())
        assert sandbox._hear("right", 1.0) == {"nonce": "right", "result": "done"}
    finally:
        sandbox.close()
