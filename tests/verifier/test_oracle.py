"""The float64 reference gives the values of public reports, known by hand, and does not depend on how it is cut into blocks."""

import math

import pytest
import torch

from generator.spec import AttentionSpec, Rule, SpecError
from verifier import oracle
from verifier.input_values import make_values
from verifier.inputs import Case
from verifier.plain import plain_attention

INF = math.inf
BR, TL = Rule.make("causal"), Rule.make("causal", align="top_left")
LN2 = math.log(2)


def attend(q, k, v, masks=(), scores=(), scale=1.0, **captured):
    """One batch entry; q (H, Sq, D), k and v (Hkv, Sk, D), or one head's matrix, or a column."""
    q, k, v = (torch.as_tensor(x, dtype=torch.float64) for x in (q, k, v))
    q, k, v = (x[:, None] if x.ndim == 1 else x for x in (q, k, v))
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    spec = AttentionSpec(
        len(q), len(k), q.shape[2], v.shape[2], 1, q.shape[1], k.shape[1], masks=masks, scores=scores, softmax_scale=scale
    )
    captured = {name: torch.as_tensor(x) for name, x in captured.items()}
    return oracle.attention(spec, {"q": q[None], "k": k[None], "v": v[None], **captured})


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "v", "out", "lse"),
    [
        (BR, 2, [1, 2, 3, 4, 5], [2.5, 3.0], [math.log(4), math.log(5)]),
        (TL, 2, [1, 2, 3, 4, 5], [1.0, 1.5], [0, LN2]),
        (BR, 5, [1, 3], [0, 0, 0, 1, 2], [-INF, -INF, -INF, 0, LN2]),
        (TL, 5, [1, 3], [1, 2, 2, 2, 2], [0, LN2, LN2, LN2, LN2]),
    ],
)
def test_causal_with_unequal_lengths(mask, seqlen_q, v, out, lse):
    """Dao-AILab/flash-attention#1778; NVIDIA/cutlass#2336."""
    got = attend([0.0] * seqlen_q, [0.0] * len(v), v, (mask,))
    assert got.out.flatten().tolist() == pytest.approx(out) and got.lse.flatten().tolist() == pytest.approx(lse)


def test_a_row_that_sees_nothing():
    """pytorch/pytorch#109517."""
    got = attend([1.0], [2.0, -1.0], [10.0, 20.0], (Rule.make("padding"),), KvLen=[0])
    assert got.out.item() == 0 and got.lse.item() == -INF and got.magnitude.item() == 0


def test_scores_below_a_finite_minus_infinity():
    """flashinfer-ai/flashinfer#4267, #4450."""
    got = attend(torch.full((1, 128), 64.0), torch.full((2, 128), -64.0), [1.0, 1.0], scale=128**-0.5)
    assert got.out.item() == 1 and got.lse.item() == pytest.approx(-46340.257, abs=2e-3)


@pytest.mark.parametrize("rubbish", [math.nan, INF])
def test_rubbish_beyond_a_length_is_never_read(rubbish):
    """Dao-AILab/flash-attention#2374."""
    v = [*range(1, 14), rubbish, rubbish, rubbish]
    got = attend([0.0], [0.0] * 13 + [rubbish] * 3, v, (Rule.make("padding"),), KvLen=[13])
    assert got.out.item() == 7 and got.lse.item() == pytest.approx(2.5649, abs=1e-4)


@pytest.mark.parametrize("seqlen_k", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_uniform_weights(seqlen_k):
    """pytorch/pytorch#159247."""
    assert attend([0.0], [0.0] * seqlen_k, list(range(seqlen_k))).out.item() == pytest.approx((seqlen_k - 1) / 2)


def test_softcap_stands_before_the_mask():
    """onnx/onnx#7865; vllm-project/vllm#56578."""
    cap2, cap50 = (Rule.make("softcap", cap=float(cap)) for cap in (2, 50))
    assert attend([1.0, 1.0], [0.0, 3.0], [1.0, 101.0], (TL,), (cap2,)).out[0, 0, 0, 0] == 1.0
    got = attend([1.0], [5000.0, 4990.0], [1.0, 3.0], (), (cap50,))
    assert got.out.item() == pytest.approx(2.0) and got.lse.item() == pytest.approx(50.6931, abs=1e-4)
    got = attend([1.0], [-5000.0, 0.0], [1.0, 3.0], (), (cap50,))
    assert got.out.item() == pytest.approx(3.0) and got.lse.item() == pytest.approx(0.0, abs=1e-12)


def test_alibi_by_the_head():
    """ml-explore/mlx#343."""
    slopes = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    got = attend(torch.zeros(6, 1, 1), [[0.0], [0.0]], [[0.0], [1.0]], (BR,), (Rule.make("alibi"),), Slopes=slopes)
    assert got.out.flatten()[[0, 4, 5]].tolist() == pytest.approx([0.56218, 0.62246, 0.53121], abs=1e-5)


def test_one_dominant_key():
    """ScalingIntelligence/KernelBench#165; sgl-project/sglang#6101."""
    keys, values = torch.zeros(4096), torch.zeros(4096)
    keys[7], values[7] = 30.0, 5.0
    assert attend([1.0], keys, values).out.item() == pytest.approx(5.0, abs=1e-6)


def test_a_sink_logit_takes_weight_and_enters_the_lse():
    got = attend([0.0], [0.0], [8.0], (), (Rule.make("sink_logit"),), SinkLogit=[math.log(3)])
    assert got.out.item() == pytest.approx(2.0) and got.lse.item() == pytest.approx(math.log(4))


def test_windows_are_inclusive_and_unbounded_at_minus_one():
    v = [float(i) for i in range(6)]
    for rule, first, last in (
        (Rule.make("window", left=2, right=0), 2, 4),
        (Rule.make("window", left=0, right=1), 4, 5),
        (Rule.make("window", left=-1, right=0), 0, 4),
        (Rule.make("window", left=1, right=-1), 3, 5),
    ):
        got = attend([0.0] * 6, [0.0] * 6, v, (rule,))
        assert got.out[0, 0, 4, 0].item() == pytest.approx((first + last) / 2), rule


def test_masks_are_a_conjunction():
    got = attend(
        [0.0] * 4, [0.0] * 4, [0.0, 1.0, 2.0, 3.0], (Rule.make("document"), BR), DocStart=[[0, 0, 2, 2]], DocEnd=[[2, 2, 4, 4]]
    )
    assert got.out.flatten().tolist() == pytest.approx([0, 0.5, 2, 2.5])


@pytest.mark.parametrize("scores", [(), (Rule.make("alibi"), Rule.make("softcap", cap=3.0)), (Rule.make("sink_logit"),)])
def test_blocks_and_chosen_rows_do_not_change_the_answer(monkeypatch, scores):
    from verifier.input_values import make_values
    from verifier.inputs import Case

    spec = AttentionSpec(6, 2, 16, 8, 2, 23, 31, masks=(Rule.make("window", left=9), Rule.make("padding")), scores=scores)
    values = make_values(Case("blocks", spec, seed=1))
    whole = oracle.attention(spec, values)
    monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", 200)
    cut = oracle.attention(spec, values)
    rows = torch.tensor([0, 5, 22])
    some = oracle.attention(spec, values, rows)
    for field in ("out", "lse", "magnitude"):
        torch.testing.assert_close(getattr(cut, field), getattr(whole, field), rtol=1e-12, atol=0)
        torch.testing.assert_close(getattr(some, field), getattr(whole, field)[:, :, rows], rtol=1e-12, atol=0)


def test_some_heads_are_what_they_are_in_the_whole_call():
    """Of pairs of sequence and key head, rules that capture tensors included; the plain implementation gives the same heads."""
    rules = {"masks": (Rule.make("document"),), "scores": (Rule.make("alibi"),)}
    spec = AttentionSpec(6, 3, 16, 16, 2, 21, 40, "bf16", **rules)
    values, rows, pairs = make_values(Case("pairs", spec, seed=5)), torch.tensor([0, 7, 20]), ((0, 2), (1, 0), (1, 1))
    whole, some = oracle.attention(spec, values, rows), oracle.attention(spec, values, rows, pairs)
    heads = [(0, slice(4, 6)), (1, slice(0, 2)), (1, slice(2, 4))]
    assert torch.equal(some.out, torch.stack([whole.out[at] for at in heads])) and some.lse.shape == (3, 2, 3)
    assert torch.equal(some.lse, torch.stack([whole.lse[at] for at in heads]))
    plain, lse = plain_attention(spec, values, rows, 1), plain_attention(spec, values, rows, 1, pairs)
    torch.testing.assert_close(lse[0].float(), torch.stack([plain[0][at] for at in heads]).float(), rtol=0.02, atol=0.02)


def test_visible_pairs_count_what_the_masks_leave():
    spec = AttentionSpec(4, 2, 8, 8, 3, 10, 10, masks=(Rule.make("causal"),))
    assert oracle.visible_pairs(spec, {}) == 3 * 4 * 55
    padded = AttentionSpec(4, 2, 8, 8, 2, 10, 10, masks=(Rule.make("padding"),))
    assert oracle.visible_pairs(padded, {"KvLen": torch.tensor([0, 7])}) == 4 * 10 * 7


def test_no_keys_at_all():
    spec = AttentionSpec(2, 1, 8, 8, 1, 3, 0)
    got = oracle.attention(spec, {"q": torch.zeros(1, 2, 3, 8), "k": torch.zeros(1, 1, 0, 8), "v": torch.zeros(1, 1, 0, 8)})
    assert bool((got.out == 0).all()) and bool((got.lse == -INF).all())


def test_a_rule_without_a_reference_is_named_and_a_users_own_can_be_given():
    spec = AttentionSpec(1, 1, 4, 4, 1, 2, 4, masks=(Rule.make("even_keys"),))
    tensors = {
        "q": torch.zeros(1, 1, 2, 4),
        "k": torch.zeros(1, 1, 4, 4),
        "v": torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 4),
    }
    with pytest.raises(SpecError, match="masks.even_keys: no dense reference is registered; known are causal"):
        oracle.attention(spec, tensors)
    even = lambda rule, block: block.keys % 2 == 0  # noqa: E731
    try:
        oracle.register_mask("even_keys", even)
        assert bool((oracle.attention(spec, tensors).out == 1).all())
        oracle.register_mask("even_keys", even)
        with pytest.raises(SpecError, match="masks.causal: another rule has this name"):
            oracle.register_mask("causal", even)
    finally:
        oracle.DENSE_MASKS.pop("even_keys", None)


def test_an_unknown_alignment_is_refused():
    with pytest.raises(SpecError, match="causal.align: expected bottom_right or top_left, found 'middle'"):
        attend([0.0], [0.0], [1.0], (Rule.make("causal", align="middle"),))
