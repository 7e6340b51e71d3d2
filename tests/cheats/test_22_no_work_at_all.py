"""An empty kernel is as fast as can be: it leaves the poison, and no time below physics is believed."""

from verifier import benchmark
from verifier.records import Failed


def test_an_empty_kernel_is_not_timed(refused_in_a_timed_call):
    refused_in_a_timed_call("no_op", "unwritten_output", "written")


def test_a_time_below_physics_is_refused_whatever_the_output(timed, monkeypatch):
    monkeypatch.setattr(benchmark, "floor_s", lambda spec, work, threads: 3600.0)
    result = timed("good")
    assert isinstance(result, Failed) and (result.reason, result.witness.check) == ("implausible_time", "time floor")
    assert "take at least 3.6e+03 s here" in result.witness.message
