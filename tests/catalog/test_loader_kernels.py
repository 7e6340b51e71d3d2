"""Kernels answer with the right values: families, lengths, dtypes, strides, outputs and LSE, against float64."""

import re

import pytest
import torch
from attention_reference import bottom_right, reference, top_left, window
from kernel_factory import CAUSAL, CAUSAL_BR, Shelf, spec

import catalog
from generator.spec import Rule

pytestmark = pytest.mark.usefixtures("fresh_loader")

#: Buckets that the lengths below fall into.
BUCKETS = [(q, k) for q in (1, 4, 8, 16) for k in (4, 8, 16)]
LENGTHS = [(1, 7), (5, 5), (3, 8), (8, 3), (13, 11)]
TOLERANCE = {"fp32": {"rtol": 1e-4, "atol": 1e-5}, "bf16": {"rtol": 2e-2, "atol": 2e-2}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def serve(*specs, **more):
    shelf = Shelf()
    for s in specs:
        shelf.add(s.with_shape(batch=2), buckets=BUCKETS, **more)
    catalog.configure(catalog=shelf.source(), probe="off", allow_unmeasured=True)
    return shelf


def shapes(seqlen_q, seqlen_k, dtype="fp32", heads=4, kv_heads=2, dim=16, dim_v=16, batch=2):
    kind = DTYPES[dtype]
    q, k = rand(batch, heads, seqlen_q, dim, dtype=kind), rand(batch, kv_heads, seqlen_k, dim, seed=1, dtype=kind)
    return q, k, rand(batch, kv_heads, seqlen_k, dim_v, seed=2, dtype=kind)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sdpa(seqlen_q, seqlen_k, causal, dtype):
    serve(spec(heads=4, kv_heads=2, dtype=dtype), spec(heads=4, kv_heads=2, dtype=dtype, masks=CAUSAL))
    q, k, v = shapes(seqlen_q, seqlen_k, dtype)
    out = catalog.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=0.3)
    assert catalog.last_decision().kernel_id, str(catalog.last_decision())
    expected, _ = reference(q, k, v, scale=0.3, visible=top_left if causal else None)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])


WRONG = [
    {"scale": "x"},
    {"scale": [1.0]},
    {"is_causal": "x"},
    {"is_causal": None},
    {"enable_gqa": None},
    {"enable_gqa": "x"},
    {"dropout_p": "x"},
]  # noqa: E501


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_options_of_another_type_are_refused_in_torchs_words_though_a_kernel_is_there(wrong):
    serve(spec(heads=4, kv_heads=2), spec(heads=4, kv_heads=2, masks=CAUSAL))
    q, k, v = shapes(5, 5)
    options = {"is_causal": True, "enable_gqa": True} | wrong
    with pytest.raises(TypeError) as theirs:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    with pytest.raises(TypeError) as ours:
        catalog.scaled_dot_product_attention(q, k, v, **options)
    assert re.sub(r" \(position \d\)", "", str(ours.value)) == str(theirs.value)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("bounds", [(None, None, False), (-1, -1, True), (2, 1, False), (3, -1, True), (0, 0, False)])
def test_flash_with_lse(seqlen_q, seqlen_k, bounds):
    left, right, causal = bounds
    sizes = {"heads": 4, "kv_heads": 2, "dim_v": 8}
    windowed = (Rule.make("window", left=4, right=0),)
    serve(*(spec(masks=masks, **sizes) for masks in ((), CAUSAL_BR, windowed)), lse=True)
    q, k, v = (x.transpose(1, 2) for x in shapes(seqlen_q, seqlen_k, dim_v=8))
    out, lse = catalog.flash_attn_func(q, k, v, causal=causal, window_size=(left, right), return_lse=True)
    assert catalog.last_decision().kernel_id, str(catalog.last_decision())
    visible = window(seqlen_q, seqlen_k, left, 0 if causal else right)
    expected, expected_lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), visible=visible)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **TOLERANCE["fp32"])
    torch.testing.assert_close(lse.double(), expected_lse, **TOLERANCE["fp32"])
    assert out.is_contiguous() and out.shape == (2, seqlen_q, 4, 8)


def test_softcap_and_alibi():
    rules = (Rule.make("softcap", cap=9.0), Rule.make("alibi"))
    serve(spec(heads=4, kv_heads=2, masks=CAUSAL_BR, scores=rules))
    q, k, v = (x.transpose(1, 2) for x in shapes(5, 8))
    slopes = torch.tensor([0.5, 9.0, 0.25, 9.0, 0.1, 9.0, 0.0, 9.0])[::2]
    out = catalog.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes)
    assert catalog.last_decision().kernel_id, str(catalog.last_decision())
    bias = -slopes[:, None, None] * (torch.arange(5)[:, None] + 3 - torch.arange(8)[None, :]).abs()
    expected, _ = reference(*(x.transpose(1, 2) for x in (q, k, v)), visible=bottom_right(5, 8), softcap=2.0, bias=bias)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **TOLERANCE["fp32"])


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sink_logits(served, dtype):
    if served:
        serve(spec(heads=4, kv_heads=2, masks=(Rule.make("window", left=2),), scores=(Rule.make("sink_logit"),)), lse=True)
    q, k, v = (x.transpose(1, 2) for x in shapes(8, 5))
    sinks = torch.tensor([1.0, -2.0, 0.5, 30.0], dtype=dtype)
    out, lse = catalog.flash_attn_func(q, k, v, causal=True, window_size=(2, 0), learnable_sink=sinks, return_lse=True)
    assert bool(catalog.last_decision().kernel_id) == served, str(catalog.last_decision())
    visible = window(8, 5, 2, 0)
    expected, expected_lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), visible=visible, sinks=sinks)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **TOLERANCE["fp32"])
    torch.testing.assert_close(lse.double(), expected_lse, **TOLERANCE["fp32"])


def test_causal_of_the_other_alignment_serves_only_where_it_means_the_same():
    serve(spec(masks=CAUSAL_BR))
    square, more_keys = shapes(8, 8, kv_heads=4), shapes(5, 8, kv_heads=4)
    assert catalog.explain("scaled_dot_product_attention", *square, is_causal=True).kernel_id
    assert catalog.explain("scaled_dot_product_attention", *more_keys, is_causal=True).reasons[0].code == "no_kernel"
    assert catalog.explain("flash_attn_func", *(x.transpose(1, 2) for x in more_keys), causal=True).kernel_id


def views(name):
    """q, k, v of (2, 4, 13, 16), in memory as `name` says; K and V with different strides where that is possible."""
    q, k, v = rand(2, 4, 13, 16), rand(2, 4, 13, 16, seed=5), rand(2, 4, 13, 16, seed=6)

    def laid(x, *order):
        return x.permute(order).contiguous().permute([order.index(n) for n in range(4)])

    match name:
        case "contiguous":
            return q, k, v
        case "transposed":
            return laid(q, 0, 2, 1, 3), laid(k, 0, 2, 1, 3), laid(v, 0, 2, 1, 3)
        case "different":
            return laid(q, 2, 1, 0, 3), laid(k, 1, 0, 2, 3), v
        case "sliced":
            wide = torch.full((2, 4, 26, 16), float("nan"))
            wide[:, :, ::2] = k
            return q, wide[:, :, ::2], v
        case "expanded":
            return q[:1].expand(2, 4, 13, 16), k[:, :1].expand(2, 4, 13, 16), v[:, :, :1].expand(2, 4, 13, 16)
        case "split_qkv":
            return torch.stack([laid(x, 0, 2, 1, 3).transpose(1, 2) for x in (q, k, v)], 2).unbind(2)[0].transpose(1, 2), k, v
        case "offset":
            held = torch.cat([torch.full((3,), float("nan")), k.flatten()])
            return q, held[3:].view(2, 4, 13, 16), v
        case "padded_rows":
            wide = torch.full((2, 4, 13, 19), float("nan"))
            wide[..., 2:18] = v
            return q, k, wide[..., 2:18]
    raise ValueError(name)


LAYOUTS = ["contiguous", "transposed", "different", "sliced", "expanded", "split_qkv", "offset", "padded_rows"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_with_a_unit_last_one(layout):
    serve(spec(), spec(masks=CAUSAL))
    q, k, v = views(layout)
    for causal in (False, True):
        out = catalog.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert catalog.last_decision().kernel_id
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(out, theirs, **TOLERANCE["fp32"])
        assert out.stride() == theirs.stride()


@pytest.mark.parametrize("dim_v", [16, 8])
def test_output_strides_are_torchs(dim_v):
    serve(spec(dim_v=dim_v))
    q, k, v = (rand(2, 9, 4, d).transpose(1, 2) for d in (16, 16, dim_v))
    out = catalog.scaled_dot_product_attention(q, k, v)
    assert catalog.last_decision().kernel_id
    assert out.stride() == torch.nn.functional.scaled_dot_product_attention(q, k, v).stride()


def test_three_dimensions():
    serve(spec())
    q, k, v = (x[0].transpose(0, 1).contiguous().transpose(0, 1) for x in views("contiguous"))
    out = catalog.scaled_dot_product_attention(q, k, v)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert catalog.last_decision().kernel_id and out.stride() == theirs.stride()
    torch.testing.assert_close(out, theirs, **TOLERANCE["fp32"])


def test_strides_of_dimensions_of_size_one_say_nothing():
    serve(spec(heads=1, kv_heads=1, dim=1))
    q, k, v = (torch.as_strided(rand(400, seed=s), (1, 1, 7, 1), (977, 31, 3, 17)) for s in range(3))
    out = catalog.scaled_dot_product_attention(q, k, v)
    assert catalog.last_decision().kernel_id
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), **TOLERANCE["fp32"])


def test_a_last_dimension_that_is_not_contiguous_is_refused_with_the_cure():
    serve(spec())
    q, k, v = views("contiguous")
    spread = torch.stack([k, torch.full_like(k, 99.0)], -1).flatten(-2)[..., ::2]
    told = catalog.explain("scaled_dot_product_attention", q, spread, v)
    assert str(told.reasons[0]) == "layout: key has stride 2 in its last dimension; kernels need 1: make it contiguous"
    out = catalog.scaled_dot_product_attention(q, spread, v)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), **TOLERANCE["fp32"])


def test_addresses_between_elements_are_refused():
    serve(spec())
    q, k, v = views("contiguous")
    raw = torch.zeros(k.numel() * 4 + 4, dtype=torch.uint8)
    raw[1:-3] = k.flatten().view(torch.uint8)
    shifted = torch.frombuffer(raw.numpy(), dtype=torch.float32, count=k.numel(), offset=1).view_as(k)
    assert shifted.data_ptr() % 4 == 1
    catalog.scaled_dot_product_attention(q, shifted, v)
    assert catalog.last_decision().reasons[0].code == "alignment"
    catalog.scaled_dot_product_attention(q, k, v)
    assert catalog.last_decision().kernel_id
    catalog.scaled_dot_product_attention(q, shifted, v)
    assert catalog.last_decision().reasons[0].code == "alignment"


def test_out_is_written_whatever_its_strides():
    serve(spec(heads=4, kv_heads=2))
    q, k, v = (x.transpose(1, 2) for x in shapes(5, 8))
    wide = torch.full((2, 5, 4, 20), -7.0)
    out = wide[..., 2:18]
    assert catalog.flash_attn_func(q, k, v, out=out) is out and catalog.last_decision().kernel_id
    torch.testing.assert_close(out, catalog.flash_attn_func(q, k, v), rtol=0, atol=0)
    assert (wide[..., :2] == -7).all() and (wide[..., 18:] == -7).all()
    for wrong, message in ((out[:1], "shape"), (out.bfloat16(), "dtype"), (torch.empty(2, 5, 4, 32)[..., ::2], "stride 1")):
        with pytest.raises(ValueError, match=f"out: expected .*{message}"):
            catalog.flash_attn_func(q, k, v, out=wrong)


def test_no_grad_and_inference_mode_use_kernels():
    serve(spec())
    q, k, v = views("contiguous")
    q.requires_grad_()
    with torch.no_grad():
        assert not catalog.scaled_dot_product_attention(q, k, v).requires_grad and catalog.last_decision().kernel_id
    with torch.inference_mode():
        catalog.scaled_dot_product_attention(torch.nn.Parameter(k), k, v)
        assert catalog.last_decision().kernel_id
    assert catalog.scaled_dot_product_attention(q, k, v).grad_fn is not None


DOCUMENT, PADDING = Rule.make("document"), Rule.make("padding")


@pytest.mark.parametrize("causal", [False, True])
def test_packed_self_attention_by_the_document_rule(causal):
    serve(spec(heads=4, kv_heads=2, masks=(DOCUMENT, *(CAUSAL_BR if causal else ()))), lse=True)
    bounds = torch.tensor([0, 3, 3, 8, 13]).int()
    q, k, v = rand(13, 4, 16), rand(13, 2, 16, seed=1), rand(13, 2, 16, seed=2)
    arguments = (q, k, v, bounds, bounds.clone(), 5, 5)
    told = catalog.explain(catalog.flash_attn_varlen_func, *arguments, causal=causal, return_attn_probs=True)
    out, lse, _ = catalog.flash_attn_varlen_func(*arguments, causal=causal, return_attn_probs=True)
    assert told.kernel_id and catalog.last_decision() == told, str(told)
    with catalog.attention_kernel("sdpa"):
        expected, expected_lse, _ = catalog.flash_attn_varlen_func(*arguments, causal=causal, return_attn_probs=True)
    torch.testing.assert_close(out, expected, **TOLERANCE["fp32"])
    torch.testing.assert_close(lse, expected_lse, **TOLERANCE["fp32"])
    given = torch.empty(13, 4, 16)
    assert catalog.flash_attn_varlen_func(*arguments, causal=causal, out=given) is given
    torch.testing.assert_close(given, expected, **TOLERANCE["fp32"])


def test_one_packed_sequence_needs_no_rule():
    serve(spec(heads=4, kv_heads=2, masks=CAUSAL_BR))
    q, k = rand(7, 4, 16), rand(7, 2, 16)
    bounds = torch.tensor([0, 7]).int()
    out = catalog.flash_attn_varlen_func(q, k, k, bounds, bounds, 7, 7, causal=True)
    assert catalog.last_decision().kernel_id
    torch.testing.assert_close(out, catalog.flash_attn_func(q[None], k[None], k[None], causal=True)[0])


def test_packed_calls_that_no_rule_says_go_to_torch_with_a_reason():
    serve(spec(heads=4, kv_heads=2, masks=(DOCUMENT,)))
    q, k = rand(7, 4, 16), rand(9, 2, 16)
    starts_q, starts_k = torch.tensor([0, 3, 7]).int(), torch.tensor([0, 5, 9]).int()
    catalog.flash_attn_varlen_func(q, k, k, starts_q, starts_k, 4, 5)
    assert catalog.last_decision().reasons[0].code == "argument"


@pytest.mark.parametrize("ends", [[5, 8], [8]])
def test_rows_behind_the_last_packed_sequence(ends):
    """Room that a caller keeps for more sequences: such keys are seen by nobody, and such queries see nothing."""
    serve(spec(heads=4, kv_heads=2, masks=(DOCUMENT,)), spec(heads=4, kv_heads=2))
    q, k, bounds = rand(12, 4, 16), rand(13, 2, 16), torch.tensor([0, *ends]).int()
    out, lse, _ = catalog.flash_attn_varlen_func(q, k, k, bounds, bounds, 8, 8, return_attn_probs=True)
    whole, whole_lse, _ = catalog.flash_attn_varlen_func(q[:8], k[:8], k[:8], bounds, bounds, 8, 8, return_attn_probs=True)
    torch.testing.assert_close((out[:8], lse[:, :8]), (whole, whole_lse), **TOLERANCE["fp32"])
    assert out.shape == (12, 4, 16) and not out[8:].any() and torch.isneginf(lse[:, 8:]).all()


def test_decode_on_a_ragged_cache_by_the_padding_rule():
    serve(spec(heads=4, kv_heads=2, masks=(PADDING,), seqlen_q=1), lse=True)
    cache_k, cache_v, k, v = (rand(2, n, 2, 16, seed=s) for s, n in enumerate((13, 13, 1, 1)))
    cache_k[:, 12:], cache_v[:, 12:] = torch.nan, torch.inf  # nothing may read what is not filled
    q, held = rand(2, 1, 4, 16), torch.tensor([11, 4]).int()
    arguments = {"k": k, "v": v, "cache_seqlens": held, "causal": True, "return_softmax_lse": True}
    with catalog.attention_kernel("sdpa"):
        expected, expected_lse = catalog.flash_attn_with_kvcache(q, cache_k.clone(), cache_v.clone(), **arguments)
    told = catalog.explain(catalog.flash_attn_with_kvcache, q, cache_k, cache_v, **arguments)
    assert told.kernel_id and cache_k[0, 11, 0, 0] != k[0, 0, 0, 0]
    out, lse = catalog.flash_attn_with_kvcache(q, cache_k, cache_v, **arguments)
    assert catalog.last_decision() == told
    torch.testing.assert_close(out, expected, **TOLERANCE["fp32"])
    torch.testing.assert_close(lse, expected_lse, **TOLERANCE["fp32"])
    assert torch.equal(cache_k[0, 11], k[0, 0]) and torch.equal(cache_v[1, 4], v[1, 0])


def test_a_cache_of_one_length_is_a_plain_call():
    serve(spec(heads=4, kv_heads=2, masks=CAUSAL_BR))
    cache, q = rand(2, 16, 2, 16), rand(2, 4, 4, 16)
    for held in (13, torch.tensor([13, 13]).int()):
        out = catalog.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=held, causal=True)
        assert catalog.last_decision().kernel_id
        torch.testing.assert_close(out, catalog.flash_attn_func(q, cache[:, :13], cache[:, :13], causal=True))
    catalog.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([13, 9]).int(), causal=True)
    assert catalog.last_decision().reasons[0].code == "argument"
