"""What a comparison accepts and what it says: non-finite patterns, tolerances that know the output's size, words of a witness."""

import math
from dataclasses import replace

import pytest
import torch

from generator.spec import AttentionSpec, Rule
from verifier.checks import Outputs, case_error, check_outputs
from verifier.input_values import make_values
from verifier.inputs import Case
from verifier.plain import CUT_ORDER, cut_off, plain_attention
from verifier.tolerance import errors
from verifier.trial import expectation, make_trial

SPEC = AttentionSpec(4, 2, 32, 32, 2, 9, 33, masks=(Rule.make("causal"),))


def trial(dtype="fp32", **changes):
    return make_trial(Case("checks", replace(SPEC, dtype=dtype, **changes), seed=3))


def plain(t, order=0):
    return plain_attention(t.case.spec, t.values, t.expected.rows, order)


def finding(t, out, lse):
    return check_outputs(Outputs(out, lse, {}), t.expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_another_plain_implementation_passes(dtype):
    t = trial(dtype)
    for order in range(50, 60):
        assert finding(t, *plain(t, order)) is None
    error = case_error(Outputs(*plain(t), {}), t.expected)
    assert error.rms <= error.limit_rms and error.lse_max <= error.limit_lse_max and error.input_name == "checks"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_weight_near_one_may_be_rounded(dtype):
    """Rows of one dominant key: a kernel whose reference is not the maximum to the last bit rounds that key's weight."""
    spec = replace(SPEC, batch=1, seqlen_q=40, seqlen_k=70, dtype=dtype)
    for seed in range(6):
        t = make_trial(Case("negative", spec, values="negative", seed=seed))
        for order in (0, 1, 60, 61):
            assert finding(t, *plain(t, order)) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [1.02, 0.98, -1.0])
def test_two_percent_off_fails(dtype, factor):
    t = trial(dtype)
    out, lse = plain(t)
    assert finding(t, (out * factor).to(out.dtype), lse).reason == "wrong_value"


def test_one_small_row_among_large_ones_shows():
    """Its error is far below the largest error that rounding makes elsewhere."""
    spec = AttentionSpec(1, 1, 16, 16, 1, 64, 512, dtype="bf16")
    values = make_values(Case("rows", spec, seed=1))
    values["v"] *= 0.01
    values["v"][:, :, 0] = 300.0
    values["q"][:, :, :], values["k"][:, :, 0] = 0.5, 40.0
    values["q"][:, :, 63] = -0.5
    expected = expectation("rows", spec, values, torch.arange(64))
    out, lse = plain_attention(spec, values, expected.rows)
    assert check_outputs(Outputs(out, lse, {}), expected) is None
    out[0, 0, 63] = 0
    found = check_outputs(Outputs(out, lse, {}), expected)
    assert found is not None and found.witness.check == "row" and "query 63" in found.witness.message


@pytest.mark.parametrize(
    ("lse", "accepted"), [([-math.inf, 1.0], True), ([-1e30, 1.0], False), ([math.inf, 1.0], False), ([math.nan, 1.0], False)]
)
def test_only_the_very_pattern_of_infinities_will_do(lse, accepted):
    """flashinfer-ai/flashinfer-bench#429."""
    spec = AttentionSpec(1, 1, 4, 4, 1, 2, 1, masks=(Rule.make("causal"),), softmax_scale=1.0)
    values = {"q": torch.full((1, 1, 2, 4), 0.5), "k": torch.full((1, 1, 1, 4), 0.5), "v": torch.ones(1, 1, 1, 4)}
    expected = expectation("pattern", spec, values, torch.arange(2))
    assert expected.reference.lse.flatten().tolist() == [-math.inf, 1.0]
    out = torch.tensor([[0.0] * 4, [1.0] * 4]).view(1, 1, 2, 4)
    found = check_outputs(Outputs(out, torch.tensor(lse).view(1, 1, 2), {}), expected)
    assert (found is None) == accepted
    if found is not None:
        assert found.witness.check == "lse pattern" and found.witness.expected == "-inf"


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_a_single_value_that_is_not_finite_fails_wherever_it_stands(rubbish):
    t = trial(seqlen_q=40, seqlen_k=8)
    out, lse = plain(t)
    out[1, 2, 3, 4] = rubbish  # a row that sees nothing
    found = finding(t, out, lse)
    assert found.witness.check == "finite" and "batch 1, head 2, query 3, dim 4" in found.witness.message


def test_a_row_that_sees_nothing_is_exactly_zero():
    t = trial(seqlen_q=40, seqlen_k=8)
    out, lse = plain(t)
    out[0, 0, 0, 0] = 1e-30
    assert finding(t, out, lse).witness.check == "masked rows"


def test_unwritten_elements_come_first():
    t = trial()
    out, lse = plain(t)
    missing = torch.zeros_like(out, dtype=torch.bool)
    missing[1, 0, 2, 5] = True
    found = check_outputs(Outputs(out * math.nan, lse, {"O": missing}), t.expected)
    assert found.reason == "unwritten_output" and "1 of 2304 elements of O" in found.witness.message


def test_zeros_fail_where_the_right_answer_is_tiny():
    """ScalingIntelligence/KernelBench#165: right is 0.001 everywhere, so an absolute tolerance of 0.01 accepts zeros."""
    spec = AttentionSpec(1, 1, 8, 8, 1, 4, 4096)
    sign = torch.tensor([1.0, -1.0]).repeat(2048).view(1, 1, 4096, 1)
    v = (0.001 + 0.01 * sign).expand(1, 1, 4096, 8).contiguous()
    values = {"q": torch.zeros(1, 1, 4, 8), "k": torch.zeros_like(v), "v": v}
    expected = expectation("tiny", spec, values, torch.arange(4))
    out, lse = plain_attention(spec, values, expected.rows)
    assert check_outputs(Outputs(out, lse, {}), expected) is None
    assert check_outputs(Outputs(torch.zeros_like(out), lse, {}), expected).reason == "wrong_value"


def test_a_reference_that_is_not_finite_judges_nothing():
    from verifier.trial import WeakSuite

    values = make_values(Case("nan", SPEC, seed=1))
    values["v"][0, 0, 0, 0] = math.nan
    with pytest.raises(WeakSuite, match="its right answer is not finite"):
        expectation("nan", SPEC, values, torch.arange(9))


def test_a_sum_that_is_cut_off_lies_nearer_to_zero_than_the_exact_one():
    """Exact where float32 holds every partial sum; else off one way only, by more than rounding to the nearest is."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(-8, 8, (1, 4, 64), generator=generator).float()
    assert torch.equal(cut_off(whole, whole.mT), whole @ whole[0].T)
    q = 94 + torch.randn(1, 32, 128, generator=generator).half().float()
    exact, cut = q.double() @ q[0].T.double(), cut_off(q, q.mT)
    assert bool((cut.double() <= exact).all())
    assert float((exact - cut).mean()) > 4 * abs(float((exact - q @ q[0].T).mean()))


def test_kernels_on_tensor_units_may_cut_off_sums_at_large_scores():
    """fp16 scores near -1e5 need more bits than float32 has: what every such kernel does to them is no fault of it."""
    spec = AttentionSpec(2, 2, 128, 128, 1, 40, 60, "fp16")
    trial = make_trial(Case("very negative", spec, values="negative", seed=4))
    cut = errors(*plain_attention(spec, trial.values, trial.expected.rows, CUT_ORDER), trial.expected.reference)
    nearest = errors(*plain_attention(spec, trial.values, trial.expected.rows, 0), trial.expected.reference)
    assert nearest.lse_rms < cut.lse_rms < trial.expected.limits.lse_rms < 4 * cut.lse_rms
    assert trial.expected.limits.row < 0.1  # a wrong key's weight would be off by its whole row
