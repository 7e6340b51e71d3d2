"""Whether the arguments of FlashAttention's functions make a call; if not, one sentence names the argument. Chooses nothing.

Each function raises ValueError. What is asked here costs microseconds, so calls like the last one are not asked again.
"""

from __future__ import annotations

import itertools
import math
import operator
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from catalog.flash_fallback import FlashArguments, Window


def flash_arguments(
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Tensor | None,
    dropout_p: Any = 0.0,
    sinks: Tensor | None = None,
) -> FlashArguments:
    """What the functions share, in the one form that keys and rules know: Python's own numbers and flags, sinks in fp32.

    What is not of that form is read here, once: 3.0 == 3 to a key, though it bounds no window, and a tensor is compared by its
    identity. Raises ValueError that names an argument of another kind; sizes and ranges are for `check_dense`, `check_numbers`.
    """
    if softmax_scale is not None and softmax_scale.__class__ is not float:
        softmax_scale = _number("softmax_scale", softmax_scale)
    if causal.__class__ is not bool:
        causal = _flag("causal", causal)
    if softcap.__class__ is not float:
        softcap = 0.0 if softcap is None else _number("softcap", softcap)
    if dropout_p.__class__ is not float:
        dropout_p = _number("dropout_p", dropout_p)
    if sinks is not None:
        _check_tensor("learnable_sink", sinks)
        sinks = sinks if sinks.dtype == torch.float32 else sinks.float()
    return FlashArguments(softmax_scale, causal, _window(window_size), softcap, alibi_slopes, dropout_p, sinks)


def lse_wanted(return_attn_probs: Any, return_lse: Any, return_softmax_lse: Any) -> bool:
    """Whether any of the three names of one wish is true. Raises ValueError that names one that is no flag."""
    if return_attn_probs.__class__ is return_lse.__class__ is return_softmax_lse.__class__ is bool:
        return return_attn_probs or return_lse or return_softmax_lse
    attn_probs, lse = _flag("return_attn_probs", return_attn_probs), _flag("return_lse", return_lse)
    return _flag("return_softmax_lse", return_softmax_lse) or attn_probs or lse


def _number(name: str, value: Any) -> float:
    """As a C++ function reads a float from Python: whatever has a value as one, and no text."""
    if hasattr(type(value), "__float__") or hasattr(type(value), "__index__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors of many, huge integers
            pass
    raise ValueError(f"{name}: expected a finite number, found {reprlib.repr(value)}")


def _flag(name: str, value: Any) -> bool:
    """As a C++ function reads a flag from Python: None, or what says itself whether it is true, and no text or list."""
    if value is None:
        return False
    if hasattr(type(value), "__bool__"):
        try:
            return bool(value)
        except (TypeError, ValueError, RuntimeError):  # arrays and tensors of many
            pass
    raise ValueError(f"{name}: expected True or False, found {reprlib.repr(value)}")


def _window(window: Any) -> Window:
    if window is None:
        return None
    if window.__class__ is tuple and len(window) == 2 and window[0].__class__ is window[1].__class__ is int:
        return window
    try:
        left, right = (None if x is None else operator.index(x) for x in window)
    except (TypeError, ValueError):
        wanted = "(left, right) of whole numbers, -1 or None for unbounded"
        raise ValueError(f"window_size: expected {wanted}, found {reprlib.repr(window)}") from None
    return left, right


def check_dense(q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> None:
    """q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    check_ranks((("q", q), ("k", k), ("v", v)), 4, "(batch, seqlen, heads, head_dim)")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v: expected one device, found {q.device}, {k.device} and {v.device}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q, k, v: expected one floating-point dtype, found {q.dtype}, {k.dtype} and {v.dtype}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k, v: sizes do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: expected a number of heads that divides q's {q.shape[2]}, found {k.shape[2]}")
    if q.shape[3] == 0 and arguments.softmax_scale is None:
        raise ValueError("q: expected a head dimension of at least 1, or softmax_scale with it, found 0")
    check_numbers(arguments)
    batch, heads, slopes, sinks = q.shape[0], q.shape[2], arguments.alibi_slopes, arguments.sinks
    if slopes is not None:
        _check_tensor("alibi_slopes", slopes)
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(f"alibi_slopes: expected ({heads},) or ({batch}, {heads}), found {tuple(slopes.shape)}")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"learnable_sink: expected ({heads},), found {tuple(sinks.shape)}")
    for name, x in (("alibi_slopes", slopes), ("learnable_sink", sinks)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, found one on {x.device}")


def check_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, table: Tensor | None) -> None:
    """q (total_q, H, D), k and v (total_k, Hkv, D), or pages (blocks, page, Hkv, D) with a table (B, most blocks)."""
    check_ranks((("q", q),), 3, "(total_q, heads, head_dim)")
    if table is not None:
        check_ranks((("block_table", table),), 2, "(batch, most blocks)")
    form = "(total_k, heads, head_dim)" if table is None else "(blocks, page, heads, head_dim), since block_table is given"
    check_ranks((("k", k), ("v", v)), 3 if table is None else 4, form)
    sequences = _check_bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    rows = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    if (found := _check_bounds("cu_seqlens_k", cu_seqlens_k, rows, pages=table is not None)) != sequences:
        raise ValueError(f"cu_seqlens_k: expected {sequences + 1} numbers, as cu_seqlens_q has, found {found + 1}")
    if table is not None and table.shape[0] < sequences:
        raise ValueError(f"block_table: expected a row for each of {sequences} sequences, found {table.shape[0]}")


def check_ranks(tensors: Sequence[tuple[str, Tensor]], rank: int, form: str) -> None:
    for name, x in tensors:
        _check_tensor(name, x)
        if x.dim() != rank:
            raise ValueError(f"{name}: expected {form}, found {x.dim()} dimensions")


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, found {type(x).__name__}")


def check_numbers(arguments: FlashArguments) -> None:
    """Scale, softcap and dropout are what such numbers can be."""
    given = {"softmax_scale": arguments.softmax_scale, "softcap": arguments.softcap, "dropout_p": arguments.dropout_p}
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, found {value!r}")
    if arguments.softcap < 0:
        raise ValueError(f"softcap: expected a number above 0, or 0 for none, found {arguments.softcap!r}")
    if not 0 <= arguments.dropout_p <= 1:
        raise ValueError(f"dropout_p: expected a number from 0 to 1, found {arguments.dropout_p!r}")


def _check_bounds(name: str, bounds: Tensor, rows: int, pages: bool = False) -> int:
    """The number of sequences. Bounds stay within the rows; with pages, each sequence does."""
    _check_tensor(name, bounds)
    if bounds.dim() != 1 or not len(bounds) or bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected (batch + 1) numbers of int32, found {tuple(bounds.shape)} of {bounds.dtype}")
    numbers = bounds.tolist()
    lengths = [b - a for a, b in itertools.pairwise(numbers)]
    if numbers[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name}: expected numbers that grow from 0, found {numbers}")
    most, where = (max(lengths, default=0), "that a sequence's pages hold") if pages else (numbers[-1], "that are given")
    if most > rows:
        raise ValueError(f"{name}: expected at most the {rows} rows {where}, found {most}")
    return len(lengths)
