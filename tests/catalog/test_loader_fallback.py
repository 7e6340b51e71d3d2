"""Without a catalog: every function answers through torch with the right semantics, says why once, and counts."""

import warnings

import pytest
import torch
from attention_reference import bottom_right, reference, top_left, window

import catalog
from catalog.counting import FallbackWarning
from catalog.plain_attention import PlainRules, plain_attention

CLOSE = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("fresh_loader")


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 7), (5, 5), (3, 8), (8, 3), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_semantics(seqlen_q, seqlen_k, causal):
    q, k, v = rand(2, 4, seqlen_q, 8), rand(2, 4, seqlen_k, 8, seed=1), rand(2, 4, seqlen_k, 8, seed=2)
    expected, _ = reference(q, k, v, visible=top_left if causal else None)
    found = catalog.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(found.double(), expected, **CLOSE)


def test_sdpa_masks_are_torchs():
    q, k, v = rand(2, 2, 3, 8), rand(2, 2, 5, 8), rand(2, 2, 5, 8, seed=3)
    mask = torch.tensor([[True] * 5, [False] * 5, [True, False, True, False, False]])
    expected, _ = reference(q, k, v, visible=lambda i, j: bool(mask[i, j]))
    torch.testing.assert_close(catalog.scaled_dot_product_attention(q, k, v, mask).double(), expected, **CLOSE)
    bias = rand(2, 1, 3, 5)
    expected, _ = reference(q, k, v, bias=bias)
    torch.testing.assert_close(catalog.scaled_dot_product_attention(q, k, v, attn_mask=bias).double(), expected, **CLOSE)
    assert catalog.stats()["outcomes"] == {"miss:mask_tensor": 2}


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 7), (5, 5), (3, 8), (8, 3), (2, 5), (3, 0)])
@pytest.mark.parametrize(
    "bounds", [(None, None, False), (None, None, True), (2, 0, False), (1, 2, False), (2, -1, True), (-1, 1, False)]
)
def test_flash_semantics(seqlen_q, seqlen_k, bounds):
    left, right, causal = bounds
    q, k, v = rand(2, seqlen_q, 4, 8), rand(2, seqlen_k, 2, 8, seed=1), rand(2, seqlen_k, 2, 6, seed=2)
    visible = window(seqlen_q, seqlen_k, left, 0 if causal else right)
    expected, expected_lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), visible=visible, softcap=3.0, scale=0.7)
    out, lse, probs = catalog.flash_attn_func(
        q, k, v, softmax_scale=0.7, causal=causal, window_size=(left, right), softcap=3.0, return_attn_probs=True
    )
    assert out.shape == (2, seqlen_q, 4, 6) and out.is_contiguous() and lse.dtype == torch.float32 and probs is None
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


def test_the_two_families_align_causal_differently():
    """Case 1 (a) of the public faults: Q = 0, so that the output is the mean of the visible values."""
    q, k, v = torch.zeros(1, 2, 1, 1), torch.zeros(1, 5, 1, 1), torch.arange(1.0, 6.0).view(1, 5, 1, 1)
    assert catalog.flash_attn_func(q, k, v, causal=True).flatten().tolist() == [2.5, 3.0]
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    assert catalog.scaled_dot_product_attention(*swapped, is_causal=True).flatten().tolist() == [1.0, 1.5]


def test_rows_that_see_nothing():
    """Case 1 (b): more queries than keys, bottom-right."""
    q, k, v = torch.zeros(1, 5, 1, 1), torch.zeros(1, 2, 1, 1), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    out, lse = catalog.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.flatten().tolist() == [0, 0, 0, 1, 2]
    assert lse.flatten()[:4].tolist() == [-torch.inf] * 3 + [0.0] and lse.flatten()[4].item() == pytest.approx(0.693147)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 7), (5, 5), (3, 8), (8, 3), (3, 0)])
@pytest.mark.parametrize("bounds", [(-1, -1), (-1, 0), (2, 0), (1, 2), (-1, 1), (0, -1)])
def test_flash_through_torchs_own_function(seqlen_q, seqlen_k, bounds, monkeypatch):
    """Without LSE, softcap or slopes; in blocks of sixteen rows."""
    monkeypatch.setattr("catalog.plain_attention.BLOCK_ELEMENTS", 1)
    q, k, v = rand(2, seqlen_q * 4, 4, 8), rand(2, seqlen_k * 4, 2, 8, seed=1), rand(2, seqlen_k * 4, 2, 8, seed=2)
    expected, _ = reference(*(x.transpose(1, 2) for x in (q, k, v)), visible=window(4 * seqlen_q, 4 * seqlen_k, *bounds))
    out = catalog.flash_attn_func(q, k, v, window_size=bounds)
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **CLOSE)


def test_alibi_and_softcap_order():
    q, k, v = rand(2, 3, 4, 8), rand(2, 5, 4, 8, seed=1), rand(2, 5, 4, 8, seed=2)
    slopes = torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 2.0, 0.3, 0.7]])
    distance = (torch.arange(3)[:, None] + 2 - torch.arange(5)[None, :]).abs()
    expected, _ = reference(
        *(x.transpose(1, 2) for x in (q, k, v)),
        visible=bottom_right(3, 5),
        softcap=2.0,
        bias=-slopes[:, :, None, None] * distance,
    )
    out = catalog.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **CLOSE)


def test_plain_attention_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("catalog.plain_attention.BLOCK_ELEMENTS", 1)
    q, k, v = rand(1, 2, 50, 8), rand(1, 1, 41, 8, seed=1), rand(1, 1, 41, 8, seed=2)
    for left, right in ((None, None), (7, 0), (3, 5), (None, 0)):
        expected, expected_lse = reference(q, k, v, visible=window(50, 41, left, right))
        out, lse = plain_attention(q, k, v, PlainRules(8**-0.5, -9, left, right))
        torch.testing.assert_close(out.double(), expected, **CLOSE)
        torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


def test_plain_attention_keeps_gradients():
    q, k, v = (rand(1, 2, 6, 4, seed=s).double().requires_grad_() for s in range(3))
    rules = PlainRules(0.5, -2, 3, 0, softcap=5.0, slopes=torch.tensor([0.1, 0.2]))
    assert torch.autograd.gradcheck(lambda a, b, c: plain_attention(a, b[:, :, :4], c[:, :, :4], rules)[0], (q, k, v))


def test_bias_that_swallows_the_score():
    """The finite minimum is no mask, and a half-precision bias is added in fp32 (pytorch#109517, transformers#17306)."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([2.0, -1.0]).view(1, 1, 2, 1), torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    finite = torch.full((1, 2), torch.finfo(torch.float32).min)
    assert catalog.scaled_dot_product_attention(q, k, v, finite, scale=1.0).item() == 15.0
    for mask in (torch.zeros(1, 2, dtype=torch.bool), torch.full((1, 2), -torch.inf)):
        assert catalog.scaled_dot_product_attention(q, k, v, mask, scale=1.0).item() == 0.0
    k = torch.tensor([-20.0, -17.0]).view(1, 1, 2, 1)
    least = torch.full((1, 2), -65504.0)  # the sum with a score is -inf in half precision
    found = catalog.scaled_dot_product_attention(*(x.half() for x in (q, k, v, least)), scale=1.0)
    assert found.item() == pytest.approx(19.5257, abs=2**-6)


def test_varlen_with_empty_sequences():
    """Case 11."""
    q, k = torch.zeros(3, 9, 64), torch.zeros(10, 3, 64)
    v = torch.arange(10.0).view(10, 1, 1).expand(10, 3, 64)
    starts_q, starts_k = torch.tensor([0, 0, 1, 1, 2, 3]).int(), torch.tensor([0, 2, 5, 5, 10, 10]).int()
    out, lse, _ = catalog.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 1, 5, return_attn_probs=True)
    assert out.shape == (3, 9, 64) and lse.shape == (9, 3)
    for row, (value, log) in enumerate([(3.0, 1.098612), (7.0, 1.609438), (0.0, -torch.inf)]):
        torch.testing.assert_close(out[row], torch.full((9, 64), value))
        torch.testing.assert_close(lse[:, row], torch.full((9,), log))


def test_paged_cache_equals_a_dense_one():
    generator = torch.Generator().manual_seed(5)
    q, lengths = torch.randn(2, 2, 4, 16, generator=generator), [9, 5]
    pages = torch.randn(2, 7, 4, 2, 16, generator=generator)
    table = torch.tensor([[6, 0, 3], [2, 5, 0]]).int()
    out, lse = catalog.flash_attn_with_kvcache(
        q, pages[0], pages[1], cache_seqlens=torch.tensor(lengths).int(), block_table=table, causal=True, return_softmax_lse=True
    )
    for b, n in enumerate(lengths):
        keys, values = (x[table[b].long()].flatten(0, 1)[:n].transpose(0, 1)[None] for x in pages)
        expected, expected_lse = reference(q[b : b + 1].transpose(1, 2), keys, values, visible=bottom_right(2, n))
        torch.testing.assert_close(out[b : b + 1].transpose(1, 2).double(), expected, **CLOSE)
        torch.testing.assert_close(lse[b : b + 1].double(), expected_lse, **CLOSE)


@pytest.mark.parametrize("interleaved", [False, True])
def test_kvcache_appends_and_rotates(interleaved):
    q, k_cache, v_cache = rand(2, 2, 4, 8), rand(3, 10, 2, 8, seed=1), rand(3, 10, 2, 8, seed=2)
    k, v, rows, held = rand(2, 2, 2, 8, seed=3), rand(2, 2, 2, 8, seed=4), torch.tensor([2, 0]), torch.tensor([3, 6]).int()
    angle = torch.arange(10.0)[:, None] * torch.tensor([0.3, 0.7])[None]
    keys, values = k_cache.clone(), v_cache.clone()
    out = catalog.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        angle.cos(),
        angle.sin(),
        held,
        cache_batch_idx=rows,
        causal=True,
        rotary_interleaved=interleaved,
    )

    def turn(x, position):  # (H, D): two pairs of dimensions are turned, the last four stay
        x = x.clone()
        pairs = ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3))
        for n, (a, b) in enumerate(pairs):
            c, s = angle[position, n].cos(), angle[position, n].sin()
            x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
        return x

    for b in range(2):
        row, n = int(rows[b]), int(held[b])
        turned_q = torch.stack([turn(q[b, i], n + i) for i in range(2)])
        for i in range(2):
            keys[row, n + i], values[row, n + i] = turn(k[b, i], n + i), v[b, i]
        expected, _ = reference(
            turned_q.transpose(0, 1)[None],
            keys[row, : n + 2].transpose(0, 1)[None],
            values[row, : n + 2].transpose(0, 1)[None],
            visible=bottom_right(2, n + 2),
        )
        torch.testing.assert_close(out[b].transpose(0, 1)[None].double(), expected, **CLOSE)
    torch.testing.assert_close(k_cache, keys)
    assert torch.equal(v_cache, values)


def test_kvcache_is_read_only_without_new_keys_and_refuses_contradictions():
    q, cache = rand(1, 1, 2, 8), rand(1, 6, 2, 8, seed=1)
    before = cache.clone()
    catalog.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4)
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="k, v: expected both"):
        catalog.flash_attn_with_kvcache(q, cache, cache, k=q)
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\]: 6 held and 1 new tokens do not fit the cache of 6"):
        catalog.flash_attn_with_kvcache(q, cache, cache, k=q, v=q, cache_seqlens=6)
    with pytest.raises(ValueError, match="two names of one argument"):
        catalog.flash_attn_with_kvcache(q, cache, cache, block_table=torch.zeros(1, 1).int(), page_table=torch.zeros(1, 1).int())


def test_one_warning_for_each_reason():
    q = rand(1, 2, 3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (3, 4, 5):
            catalog.scaled_dot_product_attention(q[:, :, :n], q[:, :, :n], q)
        catalog.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        catalog.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    texts = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(texts) == 2 and "no_catalog" in texts[0] and "dropout" in texts[1]
    told = catalog.stats()
    assert (told["calls"], told["outcomes"]) == (5, {"miss:dropout": 2, "miss:no_catalog": 3}) and not told["errors"]


def test_explain_says_what_last_decision_then_shows():
    q = rand(1, 2, 3, 8)
    told = catalog.explain(catalog.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert catalog.stats()["calls"] == 0 and [r.code for r in told.reasons] == ["no_catalog"]
    catalog.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert catalog.last_decision() == told
    with pytest.raises(ValueError, match="function: expected one of scaled_dot_product_attention"):
        catalog.explain(print, q)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "mask_tensor"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"scale": float("inf")}, "scale"),
        ({"query": rand(4, 16)}, "rank"),
        ({"query": rand(2, 2, 4, 16).double()}, "dtype"),
        ({"query": rand(2, 2, 4, 32)[..., ::2]}, "layout"),
        ({"query": rand(2, 2, 4, 16).to("meta")}, "device"),
        ({"query": rand(1, 2, 4, 16)}, "broadcast"),
        ({"key": rand(2, 1, 4, 16), "value": rand(2, 1, 4, 16)}, "broadcast"),
        ({"query": rand(2, 3, 4, 16), "enable_gqa": True}, "gqa"),
        ({"query": rand(2, 2, 0, 16)}, "empty"),
        ({"query": rand(2, 2, 4, 16).requires_grad_()}, "requires_grad"),
        ({"query": torch.view_as_complex(rand(2, 2, 4, 16, 2)).conj().imag}, "tensor_view"),
        ({"query": rand(2, 2, 4, 16).to_sparse()}, "tensor_layout"),
    ],
)
def test_every_reason_of_a_call_is_told(change, code):
    x = rand(2, 2, 4, 16)
    arguments = {"query": x, "key": x, "value": x, **change}
    assert code in [r.code for r in catalog.explain("scaled_dot_product_attention", **arguments).reasons]


def test_every_new_miss_is_told_to_the_program():
    told = []
    catalog.configure(on_miss=told.append)
    q = rand(1, 2, 3, 8)
    for _ in range(3):
        catalog.scaled_dot_product_attention(q, q, q)
    catalog.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert [d.reasons[0].code for d in told] == ["no_catalog", "dropout"]


@pytest.mark.parametrize("position", range(3))
def test_tensors_without_strides_are_left_to_torch(position):
    def both(strange):
        arguments = [rand(1, 2, 3, 8) for _ in range(3)]
        arguments[position] = strange(arguments[position])
        results = []
        for function in (catalog.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
            try:
                results.append(function(*arguments).shape)
            except (RuntimeError, NotImplementedError) as error:
                results.append(str(error))
        return results

    for strange in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn, lambda x: torch.nested.nested_tensor([x[0], x[0]])):
        ours, theirs = both(strange)
        assert ours == theirs
        assert catalog.last_decision().reasons[0].code == "tensor_layout"


def test_gradients_survive():
    q, k, v = (rand(1, 2, 3, 8, seed=s).requires_grad_() for s in range(3))
    out = catalog.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.grad_fn is not None
    flash = catalog.flash_attn_func(q, k, v, causal=True)
    assert torch.autograd.grad(flash.sum(), q)[0].abs().sum() > 0
    assert catalog.stats()["outcomes"] == {"miss:requires_grad": 2}


def test_contexts_that_transform_calls():
    q = rand(3, 2, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert catalog.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
    mapped = torch.vmap(lambda x: catalog.scaled_dot_product_attention(x[None], x[None], x[None])[0])(q)
    torch.testing.assert_close(mapped, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert catalog.scaled_dot_product_attention(fake, fake, fake).shape == q.shape
    assert set(catalog.stats()["outcomes"]) == {"miss:autocast", "miss:functorch", "miss:tensor_subclass"}


def test_torchs_errors_stay_torchs():
    q = rand(1, 2, 3, 8)
    for arguments in ((q, q[..., :4], q), (q, q, q, torch.ones(7, 3, dtype=torch.bool))):
        with pytest.raises(RuntimeError) as ours:
            catalog.scaled_dot_product_attention(*arguments)
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.functional.scaled_dot_product_attention(*arguments)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(TypeError, match="'query' .*must be Tensor, not int"):
        catalog.scaled_dot_product_attention(1, 2, 3)
    with pytest.raises(ValueError, match="sizes do not fit"):
        catalog.flash_attn_func(q, q[..., :4], q)
    with pytest.raises(ValueError, match="expected one device, found cpu, meta and cpu"):
        catalog.flash_attn_func(q, q.to("meta"), q)
