"""Attention in dense float64 NumPy, written from the conventions alone: what the tests of this folder compare with."""

from __future__ import annotations

import numpy as np

from generator.spec import AttentionSpec, Rule

Arrays = dict[str, np.ndarray]


def bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 by decimal arithmetic on the mantissa, ties to even (finite input)."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)


ROUND = {"fp32": lambda x: np.float64(np.float32(x)), "fp16": lambda x: np.float64(np.float16(x)), "bf16": bf16}


def random_call(spec: AttentionSpec, seed: int = 0, spread: float = 1.0) -> Arrays:
    """Q, K, V in the spec's dtype, and every captured tensor that some rule may want."""
    rng = np.random.default_rng(seed)
    b, h, hk, sq, sk = spec.batch, spec.num_heads, spec.num_kv_heads, spec.seqlen_q, spec.seqlen_k
    ends = np.sort(rng.integers(0, sk + 1, (b, 3)), axis=1)
    bounds = np.concatenate([np.zeros((b, 1), int), ends, np.full((b, 1), sk)], axis=1)
    document = np.sort(rng.integers(0, 4, (b, sq)), axis=1)
    rounded = ROUND[spec.dtype]
    return {
        "Q": rounded(spread * rng.standard_normal((b, h, sq, spec.head_dim))),
        "K": rounded(spread * rng.standard_normal((b, hk, sk, spec.head_dim))),
        "V": rounded(rng.standard_normal((b, hk, sk, spec.head_dim_v))),
        "DocStart": np.take_along_axis(bounds, document, 1).astype(np.int32),
        "DocEnd": np.take_along_axis(bounds, document + 1, 1).astype(np.int32),
        "KvLen": rng.integers(0, sk + 1, b).astype(np.int32),
        "Slopes": ROUND["fp32"](rng.uniform(0.01, 0.5, h)),
        "SinkLogit": ROUND["fp32"](rng.standard_normal(h)),
    }


def _query_positions(rule: Rule, spec: AttentionSpec) -> np.ndarray:
    shift = 0 if dict(rule.parameters).get("align") == "top_left" else spec.seqlen_k - spec.seqlen_q
    return (np.arange(spec.seqlen_q) + shift)[:, None]


def visible(rule: Rule, spec: AttentionSpec, call: Arrays) -> np.ndarray:
    """(batch, 1 or heads, seqlen_q, seqlen_k) of bool."""
    q, k = _query_positions(rule, spec), np.arange(spec.seqlen_k)[None, :]
    options = dict(rule.parameters)
    left, right = options.get("left", -1), options.get("right", 0)
    window = (left < 0) | (q - k <= left) if left >= 0 else np.ones((spec.seqlen_q, spec.seqlen_k), bool)
    before_end = (k - q <= right) if right >= 0 else np.ones((spec.seqlen_q, spec.seqlen_k), bool)
    match rule.name:
        case "causal":
            seen = k <= q
        case "window":
            seen = window & before_end
        case "sink_window":
            seen = (window | (k < options["sink"])) & before_end
        case "prefix":
            seen = (k < options["length"]) | (k <= q)
        case "document":
            return ((k >= call["DocStart"][..., None]) & (k < call["DocEnd"][..., None]))[:, None]
        case "padding":
            return (k < call["KvLen"][:, None, None])[:, None]
        case _:
            raise AssertionError(rule.name)
    return np.broadcast_to(seen, (spec.batch, 1, spec.seqlen_q, spec.seqlen_k))


def attention(spec: AttentionSpec, call: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """(output, lse) in float64."""
    q, k, v = (call[n].astype(np.float64) for n in "QKV")
    k, v = np.repeat(k, spec.group, axis=1), np.repeat(v, spec.group, axis=1)
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * spec.scale
    extra = np.full((spec.num_heads, 1), -np.inf)
    for rule in spec.scores:
        if rule.name == "softcap":
            s = rule["cap"] * np.tanh(s / rule["cap"])
        elif rule.name == "alibi":
            s = s - call["Slopes"][:, None, None] * np.abs(_query_positions(rule, spec) - np.arange(spec.seqlen_k))
        else:
            extra = call["SinkLogit"][:, None].astype(np.float64)
    seen = np.ones((spec.batch, 1, spec.seqlen_q, spec.seqlen_k), bool)
    for rule in spec.masks:
        seen = seen & visible(rule, spec, call)
    s = np.where(seen, s, -np.inf)
    top = np.maximum(s.max(axis=-1, initial=-np.inf), extra)
    base = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(s - base[..., None])
    total = weights.sum(axis=-1) + np.exp(extra - base)
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    return np.einsum("bhqk,bhkd->bhqd", weights, v) / np.where(total > 0, total, 1.0)[..., None], lse
