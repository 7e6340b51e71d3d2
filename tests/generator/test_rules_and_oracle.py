"""Every mask and score rule has two definitions that share no code: the generator's TL text and the verifier's dense function."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_attention import random_call

from generator.binding import rule_uses
from generator.masks import MASKS, MaskRule
from generator.scores import SCORES, ScoreRule
from generator.spec import AttentionSpec, Rule
from generator.tl.evaluate import Matrix, Scope
from generator.tl.expressions import expression
from generator.tl.numerics import Numerics
from verifier.oracle import DENSE_LOGITS, DENSE_MASKS, DENSE_SCORES, Block

ALIGNED = ("bottom_right", "top_left")
MASK_USES = [
    *(Rule.make("causal", align=a) for a in ALIGNED),
    Rule.make("causal"),
    *(Rule.make("window", left=x, right=y, align=a) for x, y in ((-1, -1), (0, 0), (3, -1), (-1, 2), (4, 1)) for a in ALIGNED),
    Rule.make("window", left=3),
    *(Rule.make("sink_window", sink=s, left=3, right=r, align=a) for s in (0, 1, 5, 99) for r in (-1, 0, 2) for a in ALIGNED),
    Rule.make("sink_window", sink=2, left=0),
    *(Rule.make("prefix", length=n, align=a) for n in (0, 1, 6, 99) for a in ALIGNED),
    Rule.make("document"),
    Rule.make("padding"),
]
SCORE_USES = [
    Rule.make("softcap", cap=0.75),
    *(Rule.make("alibi", align=a) for a in ALIGNED),
    Rule.make("alibi"),
    Rule.make("sink_logit"),
]
SHAPES = [(7, 11), (11, 7), (1, 5), (5, 1), (6, 6)]


def test_every_rule_has_a_case_here_and_a_dense_definition() -> None:
    assert {r.name for r in MASK_USES} == set(MASKS) == set(DENSE_MASKS) & set(MASKS)
    assert {r.name for r in SCORE_USES} == set(SCORES) == (set(DENSE_SCORES) | set(DENSE_LOGITS)) & set(SCORES)


def spec_of(shape: tuple[int, int], **rules: tuple[Rule, ...]) -> AttentionSpec:
    sizes = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 2, "head_dim_v": 2, "batch": 2}
    return AttentionSpec(**sizes, seqlen_q=shape[0], seqlen_k=shape[1], **rules)


def both_sides(spec: AttentionSpec, batch: int, head: int, x: np.ndarray) -> tuple[Scope, Block]:
    """The same (batch, head) for a rule's text and for its dense function."""
    call = random_call(spec, seed=spec.seqlen_q)
    (_, rule, parameters), *_ = rule_uses(spec)
    row, kv = np.arange(spec.seqlen_q)[:, None], np.arange(spec.seqlen_k)[None, :]
    shift = 0 if parameters.get("align") == "top_left" else spec.seqlen_k - spec.seqlen_q
    scalars = {
        "row": row,
        "kv": kv,
        "q": row + shift,
        "b": batch,
        "h": head,
        "x": x,
        "SeqK": spec.seqlen_k,
        "SeqQ": spec.seqlen_q,
    }
    numerics = Numerics("exact")
    for s in rule.scalars:
        value = s.value(parameters)
        scalars[s.name] = value if s.dtype == "i32" else np.float64(value)
    matrices = {}
    for c in rule.captured:
        memory = np.asarray(call[c.name])[(batch,) * len(c.offset)]
        matrices[c.name] = Matrix(memory, memory.shape)
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in call.items()}
    block = Block(spec, batch, head, torch.from_numpy(row)[None], torch.from_numpy(kv)[None], tensors)
    return Scope(numerics, scalars, matrices), block


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("use", MASK_USES, ids=str)
def test_masks_agree(use: Rule, shape: tuple[int, int]) -> None:
    spec = spec_of(shape, masks=(use,))
    rule = MASKS[use.name]
    assert isinstance(rule, MaskRule)
    for batch in range(spec.batch):
        scope, block = both_sides(spec, batch, 0, np.zeros(shape))
        text = np.broadcast_to(scope.value(expression(rule.visible), shape), shape)
        np.testing.assert_array_equal(text, torch.broadcast_to(DENSE_MASKS[use.name](use, block), (1, *shape))[0].numpy())
        if rule.hides_future:
            assert not text[np.broadcast_to(scope.scalars["kv"] > scope.scalars["q"], shape)].any()
        if rule.key_extent:
            assert not text[:, scope.whole((expression(rule.key_extent),))[0] :].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("use", SCORE_USES, ids=str)
def test_scores_agree(use: Rule, shape: tuple[int, int]) -> None:
    spec = spec_of(shape, scores=(use,))
    rule = SCORES[use.name]
    assert isinstance(rule, ScoreRule)
    x = np.random.default_rng(0).standard_normal(shape)
    for head in range(spec.num_heads):
        scope, block = both_sides(spec, 1, head, x)
        if rule.extra_logit:
            logit = torch.broadcast_to(DENSE_LOGITS[use.name](use, block), (1, shape[0], 1))[0].numpy()
            np.testing.assert_array_equal(np.broadcast_to(scope.value(expression(rule.extra_logit)), logit.shape), logit)
            continue
        dense = DENSE_SCORES[use.name](use, block, torch.from_numpy(x)[None])[0].numpy()
        np.testing.assert_allclose(scope.value(expression(rule.value), shape), dense, atol=1e-14)
        if rule.value_causal:
            past = np.broadcast_to(scope.scalars["kv"] <= scope.scalars["q"], shape)
            np.testing.assert_allclose(scope.value(expression(rule.value_causal), shape)[past], dense[past], atol=1e-14)
