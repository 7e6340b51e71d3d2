"""The suite has what it promises, for every kind of spec, and its numbers still mask something at small sizes."""

from typing import get_args

import pytest
import torch

from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from verifier import input_values, inputs
from verifier.arena import POISON, Arena, Memory
from verifier.input_layout import fill, slots_of
from verifier.input_values import make_values
from verifier.inputs import Case, bucket, bucket_corners, suite
from verifier.traps import launch_of

R = Rule.make
SPECS = [
    AttentionSpec(32, 8, 128, 128, 1, 2048, 2048, masks=(R("causal"),)),
    AttentionSpec(32, 8, 128, 128, 1, 8192, 8192, dtype="bf16", masks=(R("window", left=4095),)),
    AttentionSpec(16, 8, 256, 256, 1, 4096, 4096, dtype="fp16", masks=(R("causal"),), scores=(R("softcap", cap=50.0),)),
    AttentionSpec(32, 32, 128, 128, 2, 1024, 1024, masks=(R("causal"),), scores=(R("alibi"),)),
    AttentionSpec(16, 16, 192, 128, 1, 1024, 1024, masks=(R("causal"),)),
    AttentionSpec(64, 8, 64, 64, 1, 1024, 1024, masks=(R("window", left=127),), scores=(R("sink_logit"),)),
    AttentionSpec(12, 12, 64, 64, 8, 512, 512, masks=(R("padding"),)),
    AttentionSpec(71, 1, 64, 64, 1, 777, 777, masks=(R("causal"),)),
    AttentionSpec(32, 8, 128, 128, 8, 1, 4096, phase="decode"),
    AttentionSpec(8, 8, 64, 64, 1, 2048, 2048, masks=(R("document"), R("causal"))),
]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, (0, 0)), (1, (1, 1)), (2, (2, 2)), (3, (3, 4)), (64, (33, 64)), (65, (65, 128))]
)
def test_buckets_are_powers_of_two(length, expected):
    assert bucket(length) == expected


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_corners_and_one_ragged_point(spec):
    corners = bucket_corners(spec, 7)
    for which, length in ((0, spec.seqlen_q), (1, spec.seqlen_k)):
        low, high = bucket(length)
        assert {low, high} <= {c[which] for c in corners} and all(low <= c[which] <= high for c in corners)
    assert bucket_corners(spec, 7) == corners


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kind_of_input_is_there(spec):
    cases = suite(spec, 1)
    wider = {"sliced_8"} if spec.dtype == "fp32" else {"sliced_4", "sliced_8"}
    assert {c.layout for c in cases} == {"plain", "bshd", "sliced", "expanded", "far"} | wider
    wanted = {"random", "large", "negative", "dominant", "equal", "ramp"}
    assert wanted <= {c.values for c in cases}
    assert {c.place for c in cases} == {"start", "end"}
    shapes = {c.shape for c in cases}
    assert any(k == 1 for _, _, k in shapes) and any(k % 2 for _, _, k in shapes)
    if spec.phase != "decode":
        assert any(q > k for _, q, k in shapes) and any(q < k for _, q, k in shapes)
    assert set(bucket_corners(spec, 1)) <= {(q, k) for _, q, k in shapes}
    assert len({c.seed for c in cases}) == len(cases)
    assert all(c.spec.family == spec.family for c in cases), "one kernel serves them all"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sizes_stay_within_seconds(spec):
    for case in suite(spec, 1):
        s = case.spec
        compared = (case.rows or s.seqlen_q) * s.num_heads * s.batch * s.seqlen_k
        assert compared <= 1 << 22, case
        assert 2 * s.batch * s.num_heads * s.seqlen_q * s.seqlen_k * (s.head_dim + s.head_dim_v) <= 3e11, case


def test_compared_rows_lie_at_both_ends_at_tile_edges_and_between():
    spec = AttentionSpec(2, 2, 8, 8, 1, 1000, 64)
    rows = Case("rows", spec, rows=40, seed=1).row_indices().tolist()
    assert len(rows) == len(set(rows)) == 40 and rows == sorted(rows) and rows[0] == 0 and rows[-1] == 999
    assert sum(r % 16 == 0 and r - 1 in rows for r in rows) >= 10
    assert rows != Case("rows", spec, rows=40, seed=2).row_indices().tolist()
    assert Case("rows", spec, rows=1000).row_indices().tolist() == list(range(1000))
    assert Case("rows", spec.with_shape(seqlen_q=5), rows=4).row_indices().tolist()[0] == 0


def test_numbers_shrink_with_the_length():
    spec = AttentionSpec(
        2, 2, 8, 8, 1, 8192, 8192, masks=(R("sink_window", sink=64, left=4095, right=-1), R("prefix", length=3000))
    )
    for case in suite(spec, 1):
        window, prefix = case.spec.masks
        if case.spec.seqlen_k < 8192:
            assert window["left"] <= max(1, case.spec.seqlen_k // 3) and window["right"] == -1
            assert prefix["length"] <= max(1, case.spec.seqlen_k // 3)
        else:
            assert window["left"] == 4095


def test_rows_with_nothing_to_see_are_in_the_suite():
    from verifier import oracle

    for masks in ((R("causal"),), (R("padding"),), (R("window", left=3),)):
        spec = AttentionSpec(2, 2, 8, 8, 2, 64, 64, masks=masks)
        blind = [c.name for c in suite(spec, 1) if bool((oracle.attention(c.spec, make_values(c)).lse == -torch.inf).any())]
        assert blind, masks


def test_padding_has_an_empty_a_full_and_a_ragged_sequence_and_rubbish():
    spec = AttentionSpec(2, 2, 8, 8, 3, 64, 64, masks=(R("padding"),))
    lengths = input_values.captured_values(Case("padding", spec, seed=1))["KvLen"]
    assert lengths[-1] == 0 and 0 < lengths[0] < 64
    rubbish = next(c for c in suite(spec, 1) if c.values == "nan_beyond_length")
    values = make_values(rubbish)
    assert bool(values["k"].isnan().any()) and bool(values["v"].isinf().any())


def test_documents_cover_every_query_and_belong_together():
    spec = AttentionSpec(2, 2, 8, 8, 2, 40, 40, masks=(R("document"),))
    for seed in range(5):
        tensors = input_values.captured_values(Case("documents", spec, seed=seed))
        start, end = tensors["DocStart"], tensors["DocEnd"]
        position = torch.arange(40, dtype=torch.int32)
        assert bool(((start <= position) & (position < end)).all())


@pytest.mark.parametrize("layout", get_args(inputs.Layout))
def test_layouts_hold_the_values_and_touch_nothing_else(layout):
    spec = AttentionSpec(4, 2, 16, 8, 1 if layout == "far" else 2, 3, 3)
    case = Case("layout", spec, layout=layout, seed=2)
    binding = bind(launch_of(spec), spec)
    slots = slots_of(case, binding)
    memory = Memory()
    try:
        arena = Arena(memory, slots)
        arena.poison()
        values = make_values(case)
        fill(arena.views, binding, values)
        for name in "QKV":
            assert torch.equal(arena.views[name], values[name.lower()])
        arena.seal()
        assert arena.mutated() is None and arena.overrun() is None
        assert bool(arena.unwritten("O").all()) and bool(arena.unwritten("LSE").all())
        arena.views["O"].fill_(1.0)
        assert arena.overrun() is None and not bool(arena.unwritten("O").any())
        arena.bytes[arena._extents["O"][1] - 10] ^= 1
        over = arena.overrun()
        assert over is not None and over.tensor == "O" and over.num_bytes >= 1
        arena.views["K"][0, 0, 1, 2] += 1
        changed = arena.mutated()
        assert changed is not None and changed.tensor == "K"
    finally:
        memory.close()


def test_strides_are_odd_where_they_may_be():
    spec = AttentionSpec(2, 1, 16, 16, 1, 5, 7, dtype="bf16")
    slots = {s.name: s for s in slots_of(Case("odd", spec, layout="sliced"), bind(launch_of(spec), spec))}
    assert slots["Q"].offset == 1 and slots["Q"].strides[2] == 19 and slots["Q"].strides[0] > 1 << 28
    assert slots["LSE"].strides[-1] == 2


@pytest.mark.parametrize(("layout", "wide"), [("sliced", 2), ("sliced_4", 4), ("sliced_8", 8)])
def test_rows_begin_at_multiples_of_so_many_bytes_and_no_more(layout, wide):
    for dim in (8, 40, 64, 128):
        spec = AttentionSpec(2, 2, dim, dim, 2, 5, 7, dtype="bf16")
        for slot in slots_of(Case("wide", spec, layout=layout), bind(launch_of(spec), spec)):
            if slot.name in "QKVO":
                assert slot.offset * 2 % (2 * wide) == slot.strides[2] * 2 % (2 * wide) == wide
                assert all(s * 2 % wide == 0 for s in slot.strides[:3])


def test_poison_is_not_a_number_in_every_dtype():
    pattern = torch.tensor([POISON, POISON], dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert bool(pattern.view(dtype).isnan().all())


def test_a_users_captured_tensor_has_the_values_it_asks_for(monkeypatch):
    monkeypatch.setattr(input_values, "CAPTURED", dict(input_values.CAPTURED))
    input_values.register_captured("Slopes", lambda spec, shape, generator: torch.full(shape, 0.25))
    spec = AttentionSpec(3, 3, 8, 8, 1, 4, 4, scores=(R("alibi"),))
    assert input_values.captured_values(Case("own", spec))["Slopes"].tolist() == [0.25] * 3
