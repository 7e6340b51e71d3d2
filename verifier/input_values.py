"""The numbers of an input: Q, K and V of each kind, and what rules capture. Chooses no shape and no layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from generator.binding import captured_shape, rule_tensors
from generator.spec import AttentionSpec
from verifier.dtypes import DTYPES, torch_dtype
from verifier.inputs import Case, Values, generator_of


def make_values(case: Case) -> dict[str, Tensor]:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) in the spec's dtype, and what the rules capture, by name."""
    spec = case.spec
    drawn = {seed: _drawn(seed, spec) for seed in {case.seed_of(part) for part in "qkv"}}
    q, k, v = (drawn[case.seed_of(part)][i] for i, part in enumerate("qkv"))
    q, k = _MAKERS[case.values](spec, q, k)
    dtype = torch_dtype(spec)
    tensors = {name: tensor.to(dtype) for name, tensor in (("q", q), ("k", k), ("v", v))}
    tensors |= captured_values(case)
    if case.layout == "expanded":
        for name in ("k", "v"):
            tensors[name] = tensors[name][:1, :1].expand(tensors[name].shape)
    if case.values == "nan_beyond_length":
        for batch, length in enumerate(tensors["KvLen"].tolist()):
            for name, rubbish in (("k", torch.nan), ("v", torch.inf)):
                tensors[name][batch, :, length:] = rubbish
    return tensors


def _drawn(seed: int, spec: AttentionSpec) -> list[Tensor]:
    """Normal q, k and v of a seed."""
    generator = generator_of(seed, 1)
    return [torch.randn(shape, generator=generator) for shape in _shapes(spec)]


def _shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    q = (spec.batch, spec.num_heads, spec.seqlen_q, spec.head_dim)
    k = (spec.batch, spec.num_kv_heads, spec.seqlen_k, spec.head_dim)
    return q, k, (*k[:3], spec.head_dim_v)


Maker = Callable[[AttentionSpec, Tensor, Tensor], tuple[Tensor, Tensor]]


def _random(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _large(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of about +-100: a softmax of raw exponentials overflows."""
    return q * (100 / _spread(spec)), k


def _negative(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Every score near -1e5 (scale positive), below the finite numbers that some take for minus infinity."""
    size = math.sqrt(1e5 / (abs(spec.scale) or 1) / spec.head_dim)
    return size + q * 0.01 * size, -(size + k * 0.01 * size)


def _dominant(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """One key, not the first, takes nearly all the weight of every row that sees it."""
    direction = torch.ones(spec.head_dim) / math.sqrt(spec.head_dim)
    k = k * 0.1
    k[:, :, spec.seqlen_k // 3] = direction * (30 / (abs(spec.scale) or 1))
    return direction + q * 0.02, k


def _equal(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k[:, :, :1].expand(k.shape).clone()


def _ramp(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The running maximum grows all along."""
    return q, k * torch.linspace(0.1, 30 / _spread(spec), spec.seqlen_k)[:, None]


def _nan_beyond_length(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _spread(spec: AttentionSpec) -> float:
    """The standard deviation of a score of two random vectors."""
    return (abs(spec.scale) or 1) * math.sqrt(spec.head_dim)


_MAKERS: dict[Values, Maker] = {
    "random": _random,
    "large": _large,
    "negative": _negative,
    "dominant": _dominant,
    "equal": _equal,
    "ramp": _ramp,
    "nan_beyond_length": _nan_beyond_length,
}
assert set(_MAKERS) == set(get_args(Values))


CapturedMaker = Callable[[AttentionSpec, tuple[int, ...], torch.Generator], Tensor]


def _document_bounds(spec: AttentionSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Documents of random length, cut on the key axis; a query belongs to the one that its own position lies in."""
    start, end = (torch.zeros(spec.batch, spec.seqlen_q, dtype=torch.int32) for _ in range(2))
    for batch in range(spec.batch):
        num_cuts = int(torch.randint(0, 4, (), generator=generator))
        cuts = torch.randint(0, spec.seqlen_k + 1, (num_cuts,), generator=generator)
        edges = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([spec.seqlen_k])])
        position = torch.arange(spec.seqlen_q).clamp(max=max(0, spec.seqlen_k - 1))
        which = torch.searchsorted(edges, position, right=True).clamp(1, len(edges) - 1)
        start[batch], end[batch] = edges[which - 1].int(), edges[which].int()
    return start, end


def _doc_start(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _document_bounds(spec, generator)[0]


def _doc_end(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _document_bounds(spec, generator)[1]


def _kv_len(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any length from none to all; the last sequence of several is empty, and one of one is ragged."""
    lengths = torch.randint(0, spec.seqlen_k + 1, shape, generator=generator)
    if spec.batch == 1:
        return lengths.clamp(min=spec.seqlen_k // 2 + 1, max=max(1, spec.seqlen_k - 1)).int()
    lengths[0], lengths[-1] = max(1, spec.seqlen_k - 5), 0
    return lengths.int()


def _slopes(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 0.5 + 0.004


def _sink_logits(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 2


#: Tensors that rules capture, by name. DocStart and DocEnd are drawn from one stream, so that they belong together.
CAPTURED: dict[str, CapturedMaker] = {
    "DocStart": _doc_start,
    "DocEnd": _doc_end,
    "KvLen": _kv_len,
    "Slopes": _slopes,
    "SinkLogit": _sink_logits,
}


def register_captured(name: str, maker: CapturedMaker) -> None:
    """Values for a tensor that a user's rule captures. Without one, f32 tensors are normal and i32 ones lie in 0..seqlen_k."""
    CAPTURED[name] = maker


def captured_values(case: Case) -> dict[str, Tensor]:
    """Every tensor that the spec's rules capture, by name."""
    tensors = {}
    for name, captured in rule_tensors(case.spec).items():
        generator, shape = generator_of(case.seed_of("rules"), 3), captured_shape(captured, case.spec)
        maker = CAPTURED.get(name)
        if maker is not None:
            tensors[name] = maker(case.spec, shape, generator)
        elif captured.dtype == "i32":
            tensors[name] = torch.randint(0, case.spec.seqlen_k + 1, shape, generator=generator, dtype=torch.int32)
        else:
            tensors[name] = torch.randn(shape, generator=generator).to(DTYPES[captured.dtype])
    return tensors
