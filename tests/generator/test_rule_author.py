"""The rule author's programs: their meaning against dense float64, containment of the sketch, stability of the form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dense_attention import Arrays, attention, random_call
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.authors.reasoning import erase
from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.spec import AttentionSpec, Rule, SpecError
from generator.tl.checker import check
from generator.tl.fill import fill
from generator.tl.interpreter import run
from generator.tl.ir import Constant, Hint, Program
from generator.tl.parser import parse
from generator.tl.printer import print_program

AUTHOR = RuleAuthor()
CAUSAL = Rule.make("causal")
TOP_LEFT = Rule.make("causal", align="top_left")
WINDOW = Rule.make("window", left=9)
MASKS: dict[str, tuple[Rule, ...]] = {
    "full": (),
    "causal": (CAUSAL,),
    "causal_top_left": (TOP_LEFT,),
    "window": (WINDOW,),
    "window_both_sides": (Rule.make("window", left=5, right=3, align="top_left"),),
    "window_unbounded": (Rule.make("window", left=-1, right=-1),),
    "sink_window": (Rule.make("sink_window", sink=3, left=6),),
    "prefix": (Rule.make("prefix", length=11),),
    "document": (Rule.make("document"),),
    "document_causal": (Rule.make("document"), CAUSAL),
    "padding": (Rule.make("padding"),),
    "padding_causal": (Rule.make("padding"), CAUSAL),
    "window_document_padding": (WINDOW, Rule.make("document"), Rule.make("padding")),
    "two_alignments": (CAUSAL, Rule.make("window", left=4, right=9, align="top_left")),
}
SOFTCAP, ALIBI, SINK = Rule.make("softcap", cap=1.5), Rule.make("alibi"), Rule.make("sink_logit")
SCORES: dict[str, tuple[Rule, ...]] = {
    "scale": (),
    "softcap": (SOFTCAP,),
    "alibi": (ALIBI,),
    "sink_logit": (SINK,),
    "softcap_alibi": (SOFTCAP, ALIBI),
    "alibi_softcap_sink": (ALIBI, SOFTCAP, SINK),
}
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
#: What Gemms and roundings of a dtype may cost, per unit of the largest value.
TOLERANCE = {"fp32": 4e-6, "fp16": 2**-9, "bf16": 2**-6}


def make_spec(**changes: object) -> AttentionSpec:
    base = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "batch": 2, "seqlen_q": 19, "seqlen_k": 27}
    return AttentionSpec(**(base | changes))


def filled(spec: AttentionSpec, rows: int = 8, keys: int = 8) -> Program:
    """The author's program with tile sizes far below its own choices, so that small cases have many tiles."""
    code = AUTHOR.code(spec)
    sizes = {"BM": rows, "BN": keys}
    body = tuple(replace(s, choices=(sizes[s.name],)) if isinstance(s, Constant) and s.name in sizes else s for s in code.body)
    return replace(code, body=body)


def interpret(
    spec: AttentionSpec, call: Arrays, precision: str = "exact", program: Program | None = None
) -> tuple[np.ndarray, np.ndarray]:
    program = program or filled(spec)
    binding = bind(program, spec)
    tensors = {t.name: call[t.name].reshape(t.parameter_shape(spec)) for t in binding.tensors if not t.written}
    out = run(program, tensors, binding.values, precision=precision)
    return tuple(out[t.name].reshape(t.shape) for t in binding.tensors if t.written)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("masks", MASKS)
def test_every_mask_and_score_means_what_it_says(masks: str, scores: str) -> None:
    for heads, (sq, sk) in zip(HEADS.values(), [(19, 27), (27, 19), (1, 5)], strict=True):
        spec = make_spec(
            num_heads=heads[0], num_kv_heads=heads[1], seqlen_q=sq, seqlen_k=sk, masks=MASKS[masks], scores=SCORES[scores]
        )
        call = random_call(spec, seed=sq, spread=3.0)
        o, lse = interpret(spec, call)
        expected_o, expected_lse = attention(spec, call)
        np.testing.assert_allclose(o, expected_o, atol=1e-12)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-12)


@settings(max_examples=60)
@given(
    masks=st.sampled_from(sorted(MASKS)),
    scores=st.sampled_from(sorted(SCORES)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    lengths=st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 40)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tiles=st.tuples(st.sampled_from([1, 8, 16]), st.sampled_from([1, 8, 32])),
    scale=st.sampled_from([None, -1.0, 3.0]),
)
def test_any_lengths_dims_and_tiles(masks, scores, heads, lengths, dims, tiles, scale) -> None:
    spec = make_spec(
        num_heads=heads[0], num_kv_heads=heads[1], batch=lengths[0], seqlen_q=lengths[1], seqlen_k=lengths[2],
        head_dim=dims[0], head_dim_v=dims[1], masks=MASKS[masks], scores=SCORES[scores], softmax_scale=scale,
    )  # fmt: skip
    call = random_call(spec)
    for found, expected in zip(interpret(spec, call, program=filled(spec, *tiles)), attention(spec, call), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masks", ["full", "causal", "sink_window", "prefix", "document_causal", "padding"])
@pytest.mark.parametrize("scores", SCORES)
def test_stated_precision(masks: str, scores: str, dtype: str) -> None:
    spec = make_spec(num_heads=4, dtype=dtype, head_dim_v=5, masks=MASKS[masks], scores=SCORES[scores])
    call = random_call(spec)
    o, lse = interpret(spec, call, "stated")
    expected_o, expected_lse = attention(spec, call)
    np.testing.assert_allclose(o, expected_o, atol=TOLERANCE[dtype] * np.abs(call["V"]).max())
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("masks", MASKS)
def test_decode_reads_a_group_of_heads_as_rows(masks: str, scores: str) -> None:
    spec = make_spec(num_heads=6, num_kv_heads=2, seqlen_q=1, phase="decode", masks=MASKS[masks], scores=SCORES[scores])
    call = random_call(spec)
    program = filled(spec, rows=2)
    assert {t.name: t.view for t in bind(program, spec).tensors if t.view != "standard"} == dict.fromkeys(
        ["Q", "O", "LSE"], "grouped"
    )
    for found, expected in zip(interpret(spec, call, program=program), attention(spec, call), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_what_lies_behind_a_sequence_is_never_read(rubbish: float, phase: str) -> None:
    spec = make_spec(masks=(Rule.make("padding"),), seqlen_q=1, phase=phase)
    call = random_call(spec)
    clean = interpret(spec, call, "stated")
    for batch, length in enumerate(call["KvLen"]):
        call["K"][batch, :, length:] = call["V"][batch, :, length:] = rubbish
    for dirty, expected in zip(interpret(spec, call, "stated"), clean, strict=True):
        np.testing.assert_array_equal(dirty, expected)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 5.0])
def test_any_scale(scale: float) -> None:
    for scores in ((), (SOFTCAP,), (ALIBI, SINK)):
        spec = make_spec(softmax_scale=scale, masks=(CAUSAL,), scores=scores)
        call = random_call(spec)
        for found, expected in zip(interpret(spec, call, "stated"), attention(spec, call), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
    assert AUTHOR.code(spec).arguments["scale"].positive == (scale > 0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("masks", MASKS)
def test_code_checks_and_contains_its_sketch(masks: str, scores: str, phase: str) -> None:
    spec = make_spec(seqlen_q=1, phase=phase, masks=MASKS[masks], scores=SCORES[scores], dtype="bf16")
    sketch, code = AUTHOR.sketch(spec, "sm_90a"), AUTHOR.code(spec, "sm_90a")
    assert sketch.stage == "sketch" and erase(code) == sketch
    for program in (sketch, code):
        assert check(program) == ()
        parsed = parse(print_program(program))
        assert not parsed.diagnostics and parsed.program == program


@pytest.mark.parametrize(
    ("target", "changes", "exponent"),
    [
        ("sm_80", {"dtype": "bf16"}, "S * c - base * c"),
        ("sm_90a", {"dtype": "fp16"}, "S * c - base * c"),
        ("sm_90a", {"dtype": "fp32"}, "(S - base) * c"),
        ("cpu", {"dtype": "bf16"}, "(S - base) * c"),
        ("sm_90a", {"dtype": "bf16", "softmax_scale": -1.0}, "S - base"),
        ("sm_90a", {"dtype": "bf16", "scores": (SOFTCAP,)}, "S - base"),
    ],
)
def test_exponents_are_fused_where_their_rounding_does_not_show(target: str, changes: dict[str, object], exponent: str) -> None:
    spec = make_spec(**changes)
    assert f"Compute P = exp2({exponent})" in print_program(AUTHOR.sketch(spec, target))
    assert AUTHOR.sketch(spec, target) == erase(AUTHOR.code(spec, target))


def test_fused_exponents_hold_at_large_logits() -> None:
    """O and LSE in the stated precision at logits of about 1e4, by the tolerance of fp16 weights."""
    spec = make_spec(dtype="fp16", masks=(CAUSAL,))
    code = fill(AUTHOR.code(spec, "sm_90a"), {"BM": 64, "BN": 96})
    call = random_call(spec)
    call["Q"] *= 1e4 / np.abs(np.einsum("bhqd,bhkd->bhqk", call["Q"], call["K"]) * spec.scale).max()
    call["Q"] = call["Q"].astype(np.float16).astype(call["Q"].dtype)
    expected_o, expected_lse = attention(spec, call)
    o, lse = interpret(spec, call, "stated", code)
    seen = np.isfinite(expected_lse)
    np.testing.assert_allclose(o, expected_o, atol=TOLERANCE["fp16"] * np.abs(expected_o).max())
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=1e4 * 2**-22)


def test_code_depends_on_the_family_only() -> None:
    spec = make_spec(masks=(WINDOW,), scores=(SOFTCAP,))
    other = make_spec(
        masks=(Rule.make("window", left=100),), scores=(Rule.make("softcap", cap=30.0),), num_heads=8, batch=1, seqlen_q=500
    )
    assert spec.family_hash == other.family_hash and AUTHOR.code(spec) == AUTHOR.code(other)


def test_dropping_every_hint_leaves_the_values() -> None:
    spec = make_spec(seqlen_q=1, num_heads=6, phase="decode", masks=(CAUSAL,))
    program, call = filled(spec), random_call(spec)
    assert program.hints
    bare = replace(program, body=tuple(s for s in program.body if not isinstance(s, Hint)))
    arrays = {"Q": call["Q"].reshape(2, 2, 3, 8), "K": call["K"], "V": call["V"]}
    values = bind(program, spec).values
    for with_hints, without in zip(run(program, arrays, values).values(), run(bare, arrays, values).values(), strict=True):
        np.testing.assert_array_equal(with_hints, without)


def test_every_choice_of_the_holes_gives_the_same_values() -> None:
    spec = make_spec(seqlen_q=70, seqlen_k=131, masks=(CAUSAL,), batch=1)
    call, code = random_call(spec), AUTHOR.code(spec, "sm_80")
    expected = attention(spec, call)[0]
    for rows in code.holes["BM"].choices:
        for keys in code.holes["BN"].choices:
            o, _ = interpret(spec, call, program=fill(code, {"BM": rows, "BN": keys}))
            np.testing.assert_allclose(o, expected, atol=1e-12)


def test_decode_of_more_than_one_token_is_refused() -> None:
    with pytest.raises(SpecError, match="seqlen_q: a decode program holds one query token, found 3"):
        AUTHOR.code(make_spec(seqlen_q=3, phase="decode"))


@pytest.mark.parametrize("rule", [Rule.make("causl"), Rule.make("window", left=-7)])
def test_unknown_rules_are_refused(rule: Rule) -> None:
    with pytest.raises(SpecError):
        AUTHOR.sketch(make_spec(masks=(rule,)))
