"""Timing a cubin beside rivals, on stand-ins for the driver and for torch's GPU part; and what needs no device at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import HALF, FakeNvml, fake_binary

from generator.gpus import GPUS, card_named
from generator.spec import AttentionSpec, Rule
from verifier import cuda_benchmark, figures
from verifier.cuda_benchmark import measure_cuda, rivals_for
from verifier.cuda_timing import CudaTimingSandbox
from verifier.flex_rival import mask_mod, score_mod
from verifier.input_values import captured_values
from verifier.inputs import Case
from verifier.oracle import Block, apply_scores, visible
from verifier.patience import Patience
from verifier.physics import gpu_floor_s, sampled_work, work_of
from verifier.records import Failed, Measurement
from verifier.trial import one_thread

QUICK = Patience(min_rounds=4, max_rounds=4, budget_s=0.1)
RIVALS = ("torch flash-attention-2", "torch eager", "torch cudnn")


@pytest.fixture
def fake_child(fake_driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(CudaTimingSandbox, "program", "fake_timing_child")
    monkeypatch.setattr(figures, "DISTURBED", 1e9)  # this machine's cores stand in for the device, and have other work
    monkeypatch.setattr(cuda_benchmark, "LONGEST_WALL", 1e9)
    fake_driver.nvmlDeviceGetCurrentClocksEventReasons = lambda h: 0x4
    return fake_driver


def measured(name: str, folder: Path) -> Measurement | Failed:
    binary, launch = fake_binary(name, folder)
    return measure_cuda(binary, launch, HALF, patience=QUICK, rivals=RIVALS, seed=3)


def test_a_good_kernel_is_timed_beside_those_that_can(fake_child: FakeNvml, tmp_path: Path) -> None:
    result = measured("good", tmp_path)
    assert isinstance(result, Measurement), result
    assert len(result.ours.samples_s) == 2 and result.ours.p50_s > 0
    assert {r.name for r in result.rivals} | set(result.unsupported) == set(RIVALS) and "torch eager" in {
        r.name for r in result.rivals
    }
    facts = result.environment
    assert facts["gpu"]["reasons"] == ["power cap"] and facts["gpu"]["before"]["sm_mhz"] == 1980
    assert facts["flops_per_s"] > 0 and facts["warm_s"]["ours"] > 0
    assert facts["empty_batch_s"] >= 0 and facts["calls_in_batch"] >= 1, "what timing itself costs is told (public fault 32)"
    assert facts["graphs"] is bool(facts["without_graph"]), "the stand-in has no graphs"


def test_what_is_known_of_rivals_is_not_found_again(
    fake_child: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are compared with float64 and rates measured once; who is too slow sits out, with the reason of the first time."""
    asked: list[dict[str, object]] = []
    must = CudaTimingSandbox.must
    monkeypatch.setattr(
        CudaTimingSandbox, "must", lambda self, question, limit: asked.append(question) or must(self, question, limit)
    )
    monkeypatch.setattr(cuda_benchmark, "_KNOWN", type(cuda_benchmark._KNOWN)())
    binary, launch = fake_binary("good", tmp_path)

    def once() -> tuple[Measurement, list[dict[str, object]]]:
        asked.clear()
        result = measure_cuda(binary, launch, HALF, patience=replace(QUICK, near=1.0), rivals=RIVALS, seed=3)
        assert isinstance(result, Measurement), result
        return result, [q for q in asked if q["do"] in ("rivals", "answer")]

    first, found = once()
    assert found[0]["rates"] and len(found) > 1 and len(first.rivals) == 1
    second, again = once()
    assert [(q["do"], q["names"], q["rates"]) for q in again] == [("rivals", [first.rivals[0].name], False)]
    assert [r.name for r in second.rivals] == [r.name for r in first.rivals] and second.unsupported == first.unsupported
    assert second.environment["matmul_flops"] == first.environment["matmul_flops"]
    phases = second.environment["phases_s"]
    assert list(phases) == ["child", "buffers", "rivals", "candidate", "rounds", "warm", "end"] and min(phases.values()) >= 0


@pytest.mark.parametrize(
    ("trap", "reason"), [("partial", "unwritten_output"), ("mutates_inputs", "mutates_inputs"), ("wrong_scale", "wrong_value")]
)
def test_a_fault_in_a_timed_call_is_found(fake_child: FakeNvml, tmp_path: Path, trap: str, reason: str) -> None:
    result = measured(trap, tmp_path)
    assert isinstance(result, Failed) and result.reason == reason, result


def test_a_device_that_slows_itself_down_gives_no_time(fake_child: FakeNvml, tmp_path: Path) -> None:
    fake_child.nvmlDeviceGetCurrentClocksEventReasons = lambda h: 0x44
    result = measured("good", tmp_path)
    assert isinstance(result, Failed) and result.reason == "throttled" and "hardware thermal" in result.witness.message


def rules(*masks: Rule, scores: tuple[Rule, ...] = (), seqlen_q: int = 13, seqlen_k: int = 17) -> AttentionSpec:
    return AttentionSpec(4, 2, 16, 16, 2, seqlen_q, seqlen_k, masks=masks, scores=scores)


@pytest.mark.parametrize(
    "rule",
    [
        Rule.make("causal"), Rule.make("causal", align="top_left"), Rule.make("window", left=5, right=2),
        Rule.make("window", left=-1, right=3), Rule.make("sink_window", left=4, sink=2), Rule.make("prefix", length=6),
        Rule.make("document"), Rule.make("padding"),
    ],
    ids=str,
)  # fmt: skip
def test_flex_masks_are_the_oracles(rule: Rule) -> None:
    spec = rules(rule)
    captured = captured_values(Case("flex", spec, seed=4))
    mod = mask_mod(rule, spec, captured)
    rows, keys = torch.arange(13).view(-1, 1), torch.arange(17).view(1, -1)
    for batch in range(2):
        seen = visible(Block(spec, batch, 0, rows.view(1, -1, 1), keys.view(1, 1, -1), captured))
        assert torch.equal(mod(batch, 0, rows, keys).expand(13, 17), seen.expand(1, 13, 17)[0])


@pytest.mark.parametrize("rule", [Rule.make("softcap", cap=3.0), Rule.make("alibi")], ids=str)
def test_flex_scores_are_the_oracles(rule: Rule) -> None:
    spec = rules(scores=(rule,))
    captured = captured_values(Case("flex", spec, seed=4))
    mod = score_mod(rule, spec, captured)
    scores = torch.randn(2, 13, 17, dtype=torch.float64)
    rows, keys = torch.arange(13).view(-1, 1), torch.arange(17).view(1, -1)
    expected, _ = apply_scores(Block(spec, 0, 1, rows.view(1, -1, 1), keys.view(1, 1, -1), captured), scores.clone())
    found = torch.stack([mod(scores[g], 0, 2 + g, rows, keys) for g in range(2)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("masks", [(), (Rule.make("causal"),), (Rule.make("window", left=40),), (Rule.make("padding"),)])
def test_sampled_work_is_the_counted_one(masks: tuple[Rule, ...]) -> None:
    spec = rules(*masks, seqlen_q=300, seqlen_k=300)
    captured = captured_values(Case("work", spec, seed=1))
    with one_thread():
        full, sampled = work_of(spec, captured), sampled_work(spec, captured, num_rows=100)
    assert sampled.num_bytes == full.num_bytes and abs(sampled.flops / full.flops - 1) < 0.02


def test_floors_follow_the_data_sheet() -> None:
    spec = AttentionSpec(32, 8, 128, 128, 4, 8192, 8192, "bf16")
    work = sampled_work(spec, {})
    floor = gpu_floor_s(spec, work, GPUS["H200"])
    assert 0.8 * work.flops / 989e12 < floor < work.flops / 989e12
    assert gpu_floor_s(spec, work, None) == 0.0


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Quadro RTX 8000", "RTX 8000"), ("Tesla T4", "T4"),
     ("NVIDIA T400 4GB", None), ("NVIDIA L4", None)],
)  # fmt: skip
def test_cards_are_known_by_their_names(name: str, card: str | None) -> None:
    assert card_named(name) is (GPUS[card] if card else None)


def test_hurried_measurements_leave_out_what_cannot_win() -> None:
    causal, window = rules(Rule.make("causal")), rules(Rule.make("window", left=3))
    assert "flex attention" not in rivals_for(causal, hurried=True) and "flex attention" in rivals_for(window, hurried=True)
    assert set(rivals_for(causal, hurried=False)) > {"torch cudnn", "torch flash-attention-2", "torch eager", "flex attention"}
