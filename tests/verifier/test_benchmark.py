"""Timing beside rivals: cheats on the clock and between calls are refused, and the figures add up."""

import os
import random
import time

import pytest
import torch

from generator.spec import AttentionSpec, Rule
from verifier import benchmark, figures, idleness, patience, physics
from verifier.benchmark import measure
from verifier.compile import compile_translated
from verifier.figures import quantile, ratio_interval
from verifier.patience import Patience
from verifier.records import Binary, Failed, Measurement, Timing, Witness
from verifier.sandbox import Ran
from verifier.traps import kernel

SPEC = AttentionSpec(4, 2, 64, 64, 1, 96, 96, masks=(Rule.make("causal"),))
SHORT = Patience(min_rounds=5, max_rounds=8, budget_s=1.0)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    cache = tmp_path_factory.mktemp("binaries")

    def run(name, spec=SPEC, **options):
        translated = kernel(spec, name)
        binary = compile_translated(translated, cache)
        assert isinstance(binary, Binary), binary
        return measure(binary, translated.launch, spec, num_threads=2, patience=SHORT, **options)

    return run


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch):
    """Tests share their machine: a rival may be slow for no fault of anybody's."""
    monkeypatch.setattr(figures, "DISTURBED", 1e9)


def test_a_right_kernel_is_timed_beside_torch(timed):
    phases = []
    result = timed("good", progress=phases.append)
    assert isinstance(result, Measurement), result
    names = {t.name for t in result.rivals}
    assert {"torch sdpa", "torch sdpa with a mask", "torch eager"} <= names, result.unsupported
    for timing in (result.ours, *result.rivals):
        assert len(timing.samples_s) >= 3 and 0 < timing.p20_s <= timing.p50_s <= timing.p80_s
    assert result.best_rival == min(result.rivals, key=lambda t: t.p50_s).name
    assert 0 < result.ratio_low <= result.ratio_p50 <= result.ratio_high
    assert 0 < result.floor_s < result.ours.p50_s
    assert result.num_threads == 2 and result.environment["fences"]["few_system_calls"] in (True, False)
    assert phases[0] == "rivals alone"


@pytest.mark.parametrize(("name", "check"), [("writes_past_end", "crash"), ("exits", "crash")])
def test_crashes_between_calls_are_verdicts(timed, name, check):
    result = timed(name)
    assert isinstance(result, Failed) and (result.reason, result.witness.check) == ("crash", check), result
    assert result.witness.input_name == "timed call"


def test_rows_that_were_not_sampled_are_compared_with_a_rival(timed, monkeypatch):
    monkeypatch.setattr("verifier.timing.Workload.check_answer", lambda self: None)
    result = timed("swapped_rows")
    assert isinstance(result, Failed) and (result.reason, result.witness.check) == ("wrong_value", "rival"), result
    assert "rows are far from the answer of torch" in result.witness.message


def test_a_result_above_the_machines_own_rate_is_measured_again(timed, monkeypatch):
    monkeypatch.setattr("verifier.timing.Workload.start_rivals", _with_a_slow_matmul(benchmark.Workload.start_rivals))
    phases = []
    result = timed("good", progress=phases.append)
    assert isinstance(result, Measurement) and result.environment["above_matmul_rate"]
    assert phases.count("rivals alone") == 2 and "measured again" in " ".join(phases)


def _with_a_slow_matmul(start):
    def slowed(self, *how):
        names, unsupported, _ = start(self, *how)
        return names, unsupported, 1.0

    return slowed


def test_rivals_that_are_slowed_down_make_the_sample_transient(monkeypatch):
    monkeypatch.setattr(figures, "DISTURBED", 2.0)
    beside = {name: Timing(name, (t,), t, t, t) for name, t in (("ours", 9.0), ("fast", 2.5), ("slow", 50.0))}
    assert figures.disturbed(beside, {"fast": 1.3, "slow": 2.0}) is None, "only the fastest rival counts"
    disturbed = figures.disturbed(beside, {"fast": 1.0, "slow": 2.0})
    assert disturbed is not None and disturbed.reason == "throttled" and "fast took 2.5 s" in disturbed.witness.message


def test_the_floor_counts_the_pairs_that_the_mask_leaves():
    full = AttentionSpec(2, 1, 64, 32, 1, 100, 100)
    causal = AttentionSpec(2, 1, 64, 32, 1, 100, 100, masks=(Rule.make("causal"),))
    assert physics.work_of(full, {}).flops == 2 * 2 * 100 * 100 * 96
    assert physics.work_of(causal, {}).flops == 2 * 2 * (100 * 101 // 2) * 96
    assert physics.work_of(full, {}).num_bytes == 4 * (2 * 100 * 96 + 100 * 96)
    assert physics.floor_s(full, physics.work_of(full, {}), 1) == 2 * physics.floor_s(full, physics.work_of(full, {}), 2) > 0


def test_memory_counts_for_what_no_cache_holds():
    decode = AttentionSpec(8, 8, 128, 128, 4096, 1, 4096, phase="decode")
    work = physics.Work(1.0, 1 << 40)
    assert physics.floor_s(decode, work, 1) == (1 << 40) / physics.HIGHEST_BANDWIDTH


def test_quantiles_and_intervals():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([1.0, 2.0], 0.8) == pytest.approx(1.8)
    low, middle, high = ratio_interval([2.0] * 20, [1.0] * 20)
    assert low == middle == high == 2.0
    noisy = [1.0 + 0.01 * i for i in range(21)]
    low, middle, high = ratio_interval(noisy, [1.0] * 21)
    assert noisy[0] < low < middle < high < noisy[-1]


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 32, 32, 2, 50, 60, masks=(Rule.make("window", left=9),)),
        AttentionSpec(4, 4, 32, 32, 1, 40, 40, masks=(Rule.make("causal"),), scores=(Rule.make("softcap", cap=5.0),)),
        AttentionSpec(4, 4, 32, 32, 1, 40, 40, masks=(Rule.make("causal"),), scores=(Rule.make("alibi"),)),
        AttentionSpec(4, 2, 32, 32, 2, 40, 40, masks=(Rule.make("causal"),), scores=(Rule.make("sink_logit"),)),
        AttentionSpec(4, 1, 32, 32, 3, 40, 40, masks=(Rule.make("padding"),)),
        AttentionSpec(4, 4, 24, 16, 1, 64, 64, masks=(Rule.make("document"), Rule.make("causal"))),
    ],
    ids=str,
)
def test_rivals_compute_what_the_oracle_computes(spec):
    from verifier import oracle
    from verifier.input_values import make_values
    from verifier.inputs import Case
    from verifier.rivals import Unsupported, prepare
    from verifier.timing import workload_captured

    case = Case("rivals", spec, seed=3)
    values = {**make_values(case), **workload_captured(case)}
    reference = oracle.attention(spec, values).out.float()
    rivals = {name: call for name, call in prepare(spec, values).items() if not isinstance(call, Unsupported)}
    assert "torch eager" in rivals
    for name, call in rivals.items():
        torch.testing.assert_close(call(values["q"], values["k"], values["v"]), reference, rtol=1e-4, atol=1e-4, msg=name)


def disturbed_once_then(result):
    outcomes = [Failed("throttled", Witness("rivals alone", "slow")), result]
    return lambda: outcomes.pop(0)


def test_a_disturbed_measurement_waits_says_so_and_is_made_again():
    waits, said = [], []
    good = Measurement(
        "m", Timing("ours", (1.0,), 1.0, 1.0, 1.0), (), {}, "", 0.0, 0.0, 0.0, 0.0, 1.0, 1, {"above_matmul_rate": False}
    )
    assert (
        patience.settled(disturbed_once_then(good), said.append, lambda: waits.append(1) or time.sleep(0.02)) is good
        and good.environment["disturbed_before"] == 1
    )
    assert good.environment["again_s"] >= 0.02, "what was not believed, and the waiting, is told apart"
    assert waits == [1] and "disturbed (slow): measured again" in said[0]
    failed = Failed("throttled", Witness("rivals alone", "slow"))
    tries = []
    assert patience.settled(lambda: tries.append(1) or failed, said.append, lambda: None) == failed
    assert len(tries) == patience.DISTURBED_TRIES, "a kernel that slows its rivals down is never given a time"


def test_quiet_is_waited_for_and_not_for_ever(monkeypatch):
    seen = iter([2.0, 1.5, 0.1])
    monkeypatch.setattr(idleness, "busy_cores", lambda: next(seen))
    monkeypatch.setattr(idleness.time, "sleep", lambda seconds: None)
    assert idleness.wait_for_quiet(60.0) == 0.1
    monkeypatch.setattr(idleness, "busy_cores", lambda: 2.0)
    assert idleness.wait_for_quiet(0.01) == 2.0


def test_how_long_quiet_is_waited_for_can_be_set(monkeypatch):
    monkeypatch.setenv("FARM_QUIET_WAIT_S", "3")
    assert patience.quiet_wait_s() == 3.0
    monkeypatch.delenv("FARM_QUIET_WAIT_S")
    assert patience.quiet_wait_s() == patience.QUIET_WAIT_S
    monkeypatch.setenv("FARM_QUIET_WAIT_S", "soon")
    with pytest.raises(ValueError, match="FARM_QUIET_WAIT_S: expected seconds from 0 to 3600, found 'soon'"):
        patience.quiet_wait_s()


def test_cores_at_work_are_told():
    assert 0 <= idleness.busy_cores(0.05) <= (os.cpu_count() or 1) + 0.5


def test_a_kernel_may_be_timed_alone(timed):
    result = timed("good", rivals=())
    assert isinstance(result, Measurement) and result.rivals == () and result.unsupported == {} and result.best_rival == ""


def test_a_rival_that_cannot_win_is_left_out_at_first_look(timed, monkeypatch):
    start = benchmark.Workload.start_rivals
    monkeypatch.setattr("verifier.timing.Workload.start_rivals", lambda self, groups, near: start(self, groups, 1e-9))
    result = timed("good", rivals=("torch-eager",))
    assert (
        isinstance(result, Measurement)
        and "times as slow as the fastest rival at first look" in result.unsupported["torch eager"]
    )


def test_short_kernels_are_timed_in_batches_without_the_way_to_the_child(monkeypatch):
    """Public fault 32: elsewhere a wait inside every iteration turned 4 us into 51."""
    monkeypatch.setattr(benchmark.Workload, "__init__", lambda self: None)
    workload = benchmark.Workload()
    workload._random, workload.sets, workload.batch, workload.handshake_s = random.Random(1), 16, 1, 47e-6
    monkeypatch.setattr(workload, "_go", lambda who, first, count: Ran("done", 47e-6 + count * 4e-6, {"clock_s": count * 4e-6}))
    workload._choose_batch(workload._first_look("torch sdpa"))
    assert workload.batch == 16 and workload.time_batch("torch sdpa").call_s == pytest.approx(4e-6)


def test_the_way_to_the_child_never_makes_a_time_too_short(monkeypatch):
    """A machine that was busy while the handshake was measured, and quiet while the kernel was, gave a call of no time."""
    monkeypatch.setattr(benchmark.Workload, "__init__", lambda self: None)
    workload = benchmark.Workload()
    workload._random, workload.sets, workload.batch, workload.handshake_s = random.Random(1), 16, 4, 300e-6
    monkeypatch.setattr(workload, "_go", lambda who, first, count: Ran("done", 80e-6, {"clock_s": 30e-6}))
    assert workload.time_batch("torch sdpa").call_s == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (AttentionSpec(8, 8, 128, 128, 1, 4_000_000, 4_000_000), "one call takes at least"),
        (AttentionSpec(8, 8, 128, 128, 1, 4_000_000, 4_000_000, masks=(Rule.make("causal"),)), "a call may take 10 s"),
        (AttentionSpec(64, 64, 128, 128, 1 << 15, 1, 1 << 10), "GiB; judging needs four times that"),
        (AttentionSpec(32, 8, 128, 128, 1, 16384, 16384, masks=(Rule.make("causal"),)), ""),
        (AttentionSpec(8, 8, 128, 128, 1, 200_000, 200_000, masks=(Rule.make("window", left=100),)), ""),
    ],
)
def test_what_no_kernel_can_do_here_in_time_is_said_before_it_is_tried(spec, words):
    why = physics.too_large(spec, 2, 10.0)
    assert (words in why) if words else why == "", why
