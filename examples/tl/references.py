"""Dense float64 references of the example programs that are no attention spec, and inputs that random numbers cannot
stand in for: functions of arrays and scalars by name.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

#: Keys of a page in paged.tl.
PAGE = 64

Arrays = Mapping[str, Any]
Scalars = Mapping[str, int | float]


def gemm(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    return {"C": tensors["A"] @ tensors["B"].T}


def _scores(tensors: Arrays, scalars: Scalars) -> tuple[np.ndarray, np.ndarray]:
    """(Batch, Heads, SeqQ, SeqK): scaled products, and V with its heads repeated."""
    group = int(scalars["Heads"]) // int(scalars["KvHeads"])
    k, v = (np.repeat(tensors[name], group, axis=1) for name in "KV")
    return scalars["scale"] * np.einsum("bhqd,bhkd->bhqk", tensors["Q"], k), v


def _distance(scalars: Scalars) -> np.ndarray:
    """How far each key lies back from each query; negative in the future. The last query stands at the last key."""
    sq, sk = int(scalars["SeqQ"]), int(scalars["SeqK"])
    return np.arange(sq)[:, None] + sk - sq - np.arange(sk)


def sigmoid_attention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    scores, v = _scores(tensors, scalars)
    weights = np.where(_distance(scalars) >= 0, 1 / (1 + np.exp(-(scores + scalars["bias"]))), 0)
    return {"O": weights @ v}


def retention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    scores, v = _scores(tensors, scalars)
    decay = 1 - 2.0 ** (-5 - np.arange(int(scalars["Heads"])))
    distance = _distance(scalars)
    weights = np.where(distance >= 0, decay[:, None, None] ** np.maximum(distance, 0), 0)
    return {"O": (scores * weights) @ v}


def block_sparse_attention(tensors: Arrays, scalars: Scalars, tile: int = 64) -> dict[str, np.ndarray]:
    scores, v = _scores(tensors, scalars)
    kept = np.repeat(np.repeat(np.asarray(tensors["Keep"]), tile, axis=1), tile, axis=2)
    seen = kept[:, None, : scores.shape[2], : scores.shape[3]] != 0
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return {"O": (weights @ v) / np.where(total > 0, total, 1)}


def _softmax(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE over the last axis of scores; a row of -inf alone gives 0 and -inf."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    base = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - base)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (base + np.log(total))[..., 0]
    return (weights @ v) / np.where(total > 0, total, 1), lse


def biased_attention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    scores, v = _scores(tensors, scalars)
    return dict(zip(("O", "LSE"), _softmax(scores + np.asarray(tensors["Bias"], float), v), strict=True))


def split_attention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    scores, v = _scores(tensors, scalars)
    length = int(scalars["SplitLen"])
    runs = [slice(s * length, (s + 1) * length) for s in range(int(scalars["Splits"]))]
    parts = [_softmax(scores[..., keys], v[..., keys, :]) for keys in runs]
    return {"PartO": np.stack([o for o, _ in parts], axis=2), "PartLSE": np.stack([lse for _, lse in parts], axis=2)}


def merged_attention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    """A softmax over the splits with their LSE as scores: (Batch, Heads, Splits * SeqQ, DV) is (..., SeqQ, DV)."""
    lse, part = np.asarray(tensors["PartLSE"], float), np.asarray(tensors["PartO"], float)
    splits, rows = int(scalars["Splits"]), int(scalars["SeqQ"])
    lse = lse.reshape(*lse.shape[:2], splits, rows).swapaxes(2, 3)
    part = part.reshape(*part.shape[:2], splits, rows, part.shape[-1]).swapaxes(2, 3)
    out, total = _softmax(lse[..., None, :], part)
    return {"O": out[..., 0, :], "LSE": total[..., 0]}


def pages(shapes: Mapping[str, tuple[int, ...]], scalars: Scalars, seed: int) -> dict[str, np.ndarray]:
    """Page tables without a page twice in a sequence, in no order, and lengths that end inside a page; one sequence is empty."""
    rng = np.random.default_rng(seed)
    batch, most = shapes["PageTable"]
    pool, page = shapes["K"][-2] // PAGE, PAGE
    table = np.stack([rng.permutation(pool)[:most] for _ in range(batch)]).astype(np.int32)
    lengths = rng.integers(1, most * page + 1, batch).astype(np.int32)
    lengths[-1] = 0
    return {"PageTable": table, "KvLen": lengths}


def paged_attention(tensors: Arrays, scalars: Scalars) -> dict[str, np.ndarray]:
    """Each sequence's pages put in a row, then attention as ever."""
    q, lengths, table = np.asarray(tensors["Q"], float), tensors["KvLen"], tensors["PageTable"]
    group, rows = q.shape[1] // np.shape(tensors["K"])[0], np.arange(q.shape[2])
    out, lse = np.zeros((*q.shape[:3], np.shape(tensors["V"])[-1])), np.full(q.shape[:3], -np.inf)
    for b, length in enumerate(np.asarray(lengths, int)):
        slots = (np.asarray(table[b], int)[:, None] * PAGE + np.arange(PAGE)).ravel()[:length]
        k, v = (np.repeat(np.asarray(tensors[name], float)[:, slots], group, axis=0) for name in "KV")
        scores = scalars["scale"] * np.einsum("hqd,hkd->hqk", q[b], k)
        seen = np.arange(length) <= rows[:, None] + length - q.shape[2]
        out[b], lse[b] = _softmax(np.where(seen, scores, -np.inf), v)
    return {"O": out, "LSE": lse}
