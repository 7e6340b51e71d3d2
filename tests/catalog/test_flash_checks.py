"""Wrong arguments of FlashAttention's functions: one sentence that names the argument, and nothing is computed or written."""

import numpy as np
import pytest
import torch

import catalog

pytestmark = pytest.mark.usefixtures("fresh_loader")

Q, K = torch.ones(2, 5, 4, 8), torch.ones(2, 7, 2, 8)
PACKED_Q, PACKED_K = torch.ones(10, 4, 8), torch.ones(10, 2, 8)
PAGED = dict.fromkeys(("k", "v"), torch.ones(3, 4, 2, 8))


def bounds(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": 1}, "q: expected a tensor, found int"),
        ({"q": Q[0]}, r"q: expected \(batch, seqlen, heads, head_dim\), found 3 dimensions"),
        ({"k": K[..., :4]}, "q, k, v: sizes do not fit"),
        ({"v": K[:, :3]}, "q, k, v: sizes do not fit"),
        ({"q": Q[:, :, :3]}, "k: expected a number of heads that divides q's 3, found 2"),
        ({"window_size": 3}, r"window_size: expected \(left, right\) of whole numbers, -1 or None for unbounded, found 3"),
        ({"window_size": (1, 2, 3)}, r"window_size: .* found \(1, 2, 3\)"),
        ({"window_size": ("a", 1)}, r"window_size: .* found \('a', 1\)"),
        ({"softcap": -1.0}, "softcap: expected a number above 0, or 0 for none, found -1.0"),
        ({"softcap": "x"}, "softcap: expected a finite number, found 'x'"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite number, found nan"),
        ({"dropout_p": 1.5}, "dropout_p: expected a number from 0 to 1, found 1.5"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: expected \(4,\) or \(2, 4\), found \(3,\)"),
        ({"alibi_slopes": [1, 2, 3, 4]}, "alibi_slopes: expected a tensor, found list"),
        ({"learnable_sink": [1.0, 2.0, 3.0, 4.0]}, "learnable_sink: expected a tensor, found list"),
        (
            {"learnable_sink": torch.ones(4, device="meta")},
            "learnable_sink: expected a tensor on cpu, where q is, found one on meta",
        ),
        ({"alibi_slopes": torch.ones(4, device="meta")}, "alibi_slopes: expected a tensor on cpu, where q is, found one on meta"),
        ({"k": K.double()}, "q, k, v: expected one floating-point dtype, found torch.float32, torch.float64 and torch.float32"),
        (dict.fromkeys("qkv", Q.int()), "q, k, v: expected one floating-point dtype, found torch.int32"),
        ({"q": Q[..., :0], "k": K[..., :0]}, "q: expected a head dimension of at least 1, or softmax_scale with it, found 0"),
        ({"softcap": "1"}, "softcap: expected a finite number, found '1'"),
        ({"softcap": torch.ones(2)}, "softcap: expected a finite number, found tensor"),
        ({"softmax_scale": 10**400}, "softmax_scale: expected a finite number, found 1000"),
        ({"dropout_p": None}, "dropout_p: expected a finite number, found None"),
        ({"dropout_p": []}, r"dropout_p: expected a finite number, found \[\]"),
        ({"causal": "x"}, "causal: expected True or False, found 'x'"),
        ({"causal": torch.ones(2)}, "causal: expected True or False, found tensor"),
        ({"return_lse": "x"}, "return_lse: expected True or False, found 'x'"),
        ({"return_attn_probs": []}, r"return_attn_probs: expected True or False, found \[\]"),
        ({"out": [1]}, "out: expected a tensor, found list"),
        ({"out": torch.zeros(2, 5, 4, 8).to_sparse()}, "out: expected a strided tensor, found one of layout torch.sparse_coo"),
        ({"out": torch.zeros(2, 5, 4, 9)}, r"out: expected shape \(2, 5, 4, 8\), found \(2, 5, 4, 9\)"),
        ({"learnable_sink": torch.ones(5)}, r"learnable_sink: expected \(4,\), found \(5,\)"),
    ],
)
def test_dense(changes, message):
    with pytest.raises(ValueError, match=message):
        catalog.flash_attn_func(**{"q": Q, "k": K, "v": K} | changes)


@pytest.mark.parametrize("changes", [{"softmax_scale": 0.25 + 0j}, {"window_size": (3.0, 0)}, {"softcap": 2 + 0j}])
def test_a_number_of_a_refused_type_is_refused_after_its_equal(changes):
    """Calls like the last one are found by their arguments' values: 3.0 == 3 and 2 + 0j == 2.0."""
    usual = {"softmax_scale": 0.25, "window_size": (3, 0), "softcap": 2.0, "q": Q, "k": K, "v": K}
    for _ in range(2):
        catalog.flash_attn_func(**usual)
    with pytest.raises(ValueError, match=next(iter(changes))):
        catalog.flash_attn_func(**usual | changes)


def test_whole_numbers_of_any_type_bound_a_window():
    expected = catalog.flash_attn_func(Q, K, K, window_size=(3, 0))
    for window in ([3, 0], (np.int64(3), np.int32(0)), torch.tensor([3, 0])):
        assert torch.equal(catalog.flash_attn_func(Q, K, K, window_size=window), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q}, r"q: expected \(total_q, heads, head_dim\), found 4 dimensions"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q: expected a tensor, found NoneType"),
        ({"cu_seqlens_k": torch.tensor([0.0, 4.0, 10.0])}, r"cu_seqlens_k: expected \(batch \+ 1\) numbers of int32, found"),
        ({"cu_seqlens_q": bounds(0, 4, 99)}, "cu_seqlens_q: expected at most the 10 rows that are given, found 99"),
        ({"cu_seqlens_q": bounds(0, 12, 10)}, r"cu_seqlens_q: expected numbers that grow from 0, found \[0, 12, 10\]"),
        ({"cu_seqlens_k": bounds(-3, 4, 10)}, r"cu_seqlens_k: expected numbers that grow from 0, found \[-3, 4, 10\]"),
        ({"cu_seqlens_k": bounds(0, 10)}, "cu_seqlens_k: expected 3 numbers, as cu_seqlens_q has, found 2"),
        ({"block_table": bounds(0, 1).view(2, 1)}, "k: expected .*, since block_table is given, found 3 dimensions"),
        ({**PAGED, "block_table": bounds(0, 1).view(2, 1)}, "at most the 4 rows that a sequence's pages hold, found 6"),
        ({**PAGED, "block_table": bounds(0, -1, 1, 3).view(2, 2)}, r"block_table: expected pages from 0 to 2, found \[1, 3\]"),
        ({**PAGED, "block_table": bounds(0, 1).view(1, 2)}, "block_table: expected a row for each of 2 sequences, found 1"),
        ({**PAGED, "block_table": [[0, 1]]}, "block_table: expected a tensor, found list"),
    ],
)
def test_packed(changes, message):
    given = {"cu_seqlens_q": bounds(0, 4, 10), "cu_seqlens_k": bounds(0, 4, 10), "max_seqlen_q": 6, "max_seqlen_k": 6}
    with pytest.raises(ValueError, match=message):
        catalog.flash_attn_varlen_func(**{"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K} | given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, "q: expected .* found 3 dimensions"),
        ({"cache_seqlens": bounds(1, 2, 3)}, r"cache_seqlens: expected \(2,\) numbers of int32, found \(3,\)"),
        ({"cache_seqlens": torch.ones(2)}, r"cache_seqlens: expected \(2,\) numbers of int32, found \(2,\) of torch.float32"),
        ({"cache_seqlens": "x"}, r"cache_seqlens: expected a number or a tensor of \(2,\), found 'x'"),
        ({"cache_seqlens": 8}, "8 held and 0 new tokens do not fit the cache of 7"),
        ({"softcap": -1.0, "cache_seqlens": 3}, "softcap: expected a number above 0"),
    ],
)
def test_cached(changes, message):
    cache = K.clone()
    with pytest.raises(ValueError, match=message):
        catalog.flash_attn_with_kvcache(**{"q": Q, "k_cache": cache, "v_cache": cache} | changes)
    assert torch.equal(cache, K)


NEW = torch.full((2, 2, 2, 8), 2.0)
PAGES = {"k_cache": torch.ones(4, 4, 2, 8), "v_cache": torch.ones(4, 4, 2, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.ones(2, 3, 2, 8)}, r"v: expected \(2, 2, 2, 8\), found \(2, 3, 2, 8\)"),
        ({"v": torch.ones(2, 2, 1, 8)}, r"v: expected \(2, 2, 2, 8\), found \(2, 2, 1, 8\)"),
        ({"k": torch.ones(3, 2, 2, 8)}, r"k: expected \(2, 2, 2, 8\), found \(3, 2, 2, 8\)"),
        ({"k": NEW[0]}, "k: expected .* found 3 dimensions"),
        ({"k": [1], "v": [1]}, "k: expected a tensor, found list"),
        ({"v": NEW.double()}, "v: expected torch.float32 on cpu, as v_cache, found torch.float64 on cpu"),
        ({"v_cache": torch.ones(2, 5, 2, 8)}, "k_cache, v_cache: sizes do not fit"),
        ({"cache_batch_idx": bounds(0, 5)}, r"cache_batch_idx: expected rows from 0 to 1, found \[0, 5\]"),
        ({"cache_batch_idx": bounds(0, -1)}, r"cache_batch_idx: expected rows from 0 to 1, found \[0, -1\]"),
        ({"cache_batch_idx": bounds(0)}, r"cache_batch_idx: expected \(2,\) numbers of int32, found \(1,\)"),
        ({"cache_leftpad": bounds(0, 9)}, r"cache_leftpad\[1\]: expected a number from 0 to the 3 tokens held, found 9"),
        ({"cache_leftpad": bounds(0)}, r"cache_leftpad: expected \(2,\) numbers"),
        ({"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)}, "rotary_cos: expected a row for each of 5 positions"),
        ({"rotary_cos": torch.ones(9, 9), "rotary_sin": torch.ones(9, 9)}, "rotary_cos: expected at most 4 columns"),
        ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 3)}, r"rotary_sin: expected \(9, 4\), as rotary_cos"),
        ({"block_table": bounds(0, 1, 2, 9).view(2, 2), **PAGES}, r"block_table: expected pages from 0 to 3, found \[2, 9\]"),
        ({"block_table": bounds(0, 1).view(1, 2), **PAGES}, "block_table: expected a row for each of 2 sequences, found 1"),
    ],
)
def test_a_cache_is_written_whole_or_not(changes, message):
    given = {"k_cache": K.clone(), "v_cache": K.clone(), "k": NEW, "v": NEW, "cache_seqlens": 3} | changes
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=message):
        catalog.flash_attn_with_kvcache(Q, **given)
    assert torch.equal(given["k_cache"], before) and torch.equal(given["v_cache"], torch.ones_like(given["v_cache"]))


def test_an_empty_sequence_among_packed_ones():
    """Dao-AILab/flash-attention#2842: kv lengths [5, 0, 2], one query each, Q = 0: every row is its own mean."""
    v = torch.arange(1.0, 8.0).view(7, 1, 1).expand(7, 1, 16)
    out, lse, _ = catalog.flash_attn_varlen_func(
        torch.zeros(3, 1, 16), torch.zeros(7, 1, 16), v, bounds(0, 1, 2, 3), bounds(0, 5, 5, 7), 1, 5, return_attn_probs=True
    )
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([3.0, 0.0, 6.5]))
    torch.testing.assert_close(lse[0], torch.tensor([1.609438, -torch.inf, 0.693147]))
