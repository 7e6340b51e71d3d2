"""Public faults of attention kernels as cases with values known by hand: the rule author's program, run by the interpreter.

Each test's docstring names the report that it comes from. "Q = 0" means that the weights are uniform over what a row may see.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from dense_attention import ROUND, Arrays

from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.scores import alibi_slopes
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill
from generator.tl.interpreter import run

CAUSAL, TOP_LEFT, PADDING = Rule.make("causal"), Rule.make("causal", align="top_left"), Rule.make("padding")
INF = math.inf


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *rules: Rule, dtype: str = "fp32", scale: float = 1.0, **captured: list
) -> Arrays:
    """O and LSE of (seqlen, dim) matrices or (batch, heads, seqlen, dim) tensors."""
    q, k, v = (np.asarray(x, float) for x in (q, k, v))
    q, k, v = (x[None, None] if x.ndim == 2 else x for x in (q, k, v))
    scores = ("softcap", "alibi", "sink_logit")
    spec = AttentionSpec(
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[3], head_dim_v=v.shape[3], batch=q.shape[0],
        seqlen_q=q.shape[2], seqlen_k=k.shape[2], dtype=dtype, softmax_scale=scale,
        masks=tuple(r for r in rules if r.name not in scores), scores=tuple(r for r in rules if r.name in scores),
    )  # fmt: skip
    code = RuleAuthor().code(spec)
    program = fill(code, {name: hole.choices[0] for name, hole in code.holes.items()})
    rounded = {name: ROUND[dtype](x) for name, x in {"Q": q, "K": k, "V": v}.items()}
    return run(program, rounded | captured, bind(program, spec).values)


def column(*values: float) -> np.ndarray:
    return np.array(values, float)[:, None]


def uniform(seqlen_q: int) -> np.ndarray:
    return np.zeros((seqlen_q, 1))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("rule", "seqlen_q", "v", "out", "lse"),
    [
        (CAUSAL, 2, [1, 2, 3, 4, 5], [2.5, 3.0], [math.log(4), math.log(5)]),
        (TOP_LEFT, 2, [1, 2, 3, 4, 5], [1.0, 1.5], [0, math.log(2)]),
        (CAUSAL, 5, [1, 3], [0, 0, 0, 1, 2], [-INF, -INF, -INF, 0, 0.6931]),
        (TOP_LEFT, 5, [1, 3], [1, 2, 2, 2, 2], [0, *[math.log(2)] * 4]),
    ],
)
def test_causal_with_unequal_lengths(rule: Rule, seqlen_q: int, v: list, out: list, lse: list, dtype: str) -> None:
    """Dao-AILab/flash-attention#1778, NVIDIA/cutlass#2336: kernel and checker shared one wrong mask."""
    got = attend(uniform(seqlen_q), uniform(len(v)), column(*v), rule, dtype=dtype)
    np.testing.assert_allclose(got["O"][0, 0, :, 0], out, rtol=1e-6)
    np.testing.assert_allclose(got["LSE"][0, 0], lse, atol=1e-4)


def test_a_row_that_sees_nothing_gives_zero() -> None:
    """pytorch/pytorch#109517: NaN, or the mean of hidden values."""
    got = attend(column(1), column(2, -1), column(10, 20), PADDING, KvLen=[0])
    assert got["O"].item() == 0 and got["LSE"].item() == -INF


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scores_far_below_any_finite_minus_infinity(dtype: str) -> None:
    """flashinfer-ai/flashinfer#4267, #4450: a running maximum that starts at -5e4 makes every weight vanish."""
    got = attend(np.full((1, 128), 64), np.full((2, 128), -64), np.ones((2, 128)), dtype=dtype, scale=128**-0.5)
    np.testing.assert_array_equal(got["O"], np.ones((1, 1, 1, 128)))
    assert got["LSE"].item() == pytest.approx(-46340.257, abs=0.01)


@pytest.mark.parametrize("logit", [1e15, -1e15, 3e30, -3e30])
def test_huge_scores_stay_exact(logit: float) -> None:
    """Subtracting before scaling: `S * c - max * c` is off by 2^-24 of the score's size, which overflows exp2."""
    got = attend(column(1), column(*[logit] * 3), column(1, 2, 6))
    assert got["O"].item() == 3 and got["LSE"].item() == pytest.approx(logit, rel=1e-6)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_rubbish_beyond_a_sequence(rubbish: float) -> None:
    """Dao-AILab/flash-attention#2374, flashinfer-ai/flashinfer#941: weight 0 times NaN is NaN."""
    k, v = np.zeros((16, 1)), column(*range(1, 17))
    clean = attend(column(0), k, np.where(v <= 13, v, 0), PADDING, KvLen=[13])
    k[13:] = v[13:] = rubbish
    got = attend(column(0), k, v, PADDING, KvLen=[13])
    assert got["O"].item() == pytest.approx(7, rel=1e-6) and got["LSE"].item() == pytest.approx(2.5649, abs=1e-4)
    assert got["O"].tobytes() == clean["O"].tobytes() and got["LSE"].tobytes() == clean["LSE"].tobytes()


def test_sequences_of_length_zero() -> None:
    """Dao-AILab/flash-attention#1537: q lengths [0, 1, 0, 1, 1] and kv lengths [2, 3, 0, 5, 0] packed, grouped heads."""
    heads, kv_heads, dim = 9, 3, 64
    q = np.zeros((1, heads, 3, dim))
    v = np.broadcast_to(np.arange(10.0)[:, None], (1, kv_heads, 10, dim))
    starts, ends = [[2, 5, 10]], [[5, 10, 10]]
    got = attend(q, np.zeros((1, kv_heads, 10, dim)), v, Rule.make("document"), DocStart=starts, DocEnd=ends)
    for row, (value, lse) in enumerate([(3.0, 1.0986), (7.0, 1.6094), (0.0, -INF)]):
        np.testing.assert_allclose(got["O"][0, :, row], value, rtol=1e-6)
        np.testing.assert_allclose(got["LSE"][0, :, row], lse, atol=1e-4)


@pytest.mark.parametrize("rule", [None, CAUSAL, PADDING])
@pytest.mark.parametrize("seqlen_k", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_the_tile(seqlen_k: int, rule: Rule | None) -> None:
    """pytorch/pytorch#159247: keys that are no multiple of the block."""
    for seqlen_q in (1, 33, 65):
        lengths = {"KvLen": [seqlen_k]} if rule is PADDING else {}
        got = attend(uniform(seqlen_q), uniform(seqlen_k), column(*range(seqlen_k)), *filter(None, [rule]), **lengths)
        seen = np.arange(seqlen_q) + seqlen_k - seqlen_q + 1 if rule is CAUSAL else np.full(seqlen_q, seqlen_k)
        np.testing.assert_allclose(got["O"][0, 0, :, 0], np.where(seen > 0, (seen - 1) / 2, 0), rtol=1e-6)


def test_softcap_comes_before_the_mask() -> None:
    """onnx/onnx#7865: a capped -inf leaks; (a) the wrong order gives 12.92."""
    got = attend(column(1), column(0, 3), column(1, 101), Rule.make("softcap", cap=2.0), PADDING, KvLen=[1])
    assert got["O"].item() == 1.0


def test_softcap_of_large_scores() -> None:
    """vllm-project/vllm#56578: tanh as a ratio of exponentials overflows."""
    cap = Rule.make("softcap", cap=50.0)
    both = attend(column(1), column(5000, 4990), column(1, 3), cap)
    assert both["O"].item() == pytest.approx(2.0, abs=1e-6) and both["LSE"].item() == pytest.approx(50.6931, abs=1e-4)
    low = attend(column(1), column(-5000, 0), column(1, 3), cap)
    assert low["O"].item() == pytest.approx(3.0) and low["LSE"].item() == pytest.approx(0.0, abs=1e-6)


def test_slopes_for_any_number_of_heads() -> None:
    """ml-explore/mlx#343: a plain geometric series for head counts that are no power of two."""
    assert alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert alibi_slopes(3) == (0.0625, 0.00390625, 0.25)
    assert alibi_slopes(12)[8:] == tuple(2 ** (-i / 2) for i in (1, 3, 5, 7))
    q, k = np.zeros((1, 6, 1, 1)), np.zeros((1, 6, 2, 1))
    v = np.broadcast_to(column(0, 1), (1, 6, 2, 1))
    out = attend(q, k, v, Rule.make("alibi"), CAUSAL, Slopes=list(alibi_slopes(6)))["O"].ravel()
    np.testing.assert_allclose(out[[0, 4, 5]], [0.56218, 0.62246, 0.53121], atol=1e-5)


def test_one_key_dominates() -> None:
    """sgl-project/sglang#6101: tame inputs hide a wrong weight."""
    k, v = np.zeros((4096, 1)), np.zeros((4096, 1))
    k[7], v[7] = 30, 5
    assert attend(column(1), k, v)["O"].item() == pytest.approx(5 / (1 + 4095 * math.exp(-30)), rel=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_sink_logit_takes_weight_and_enters_the_lse(dtype: str) -> None:
    """A row without keys keeps the sink alone: output 0, LSE the sink."""
    got = attend(
        np.zeros((3, 1)), column(0, 0), column(3, 3), Rule.make("sink_logit"), CAUSAL, dtype=dtype, SinkLogit=[math.log(2)]
    )
    np.testing.assert_allclose(got["O"][0, 0, :, 0], [0, 1, 1.5], rtol=1e-2)
    np.testing.assert_allclose(got["LSE"][0, 0], np.log([2, 3, 4]), atol=1e-6)
