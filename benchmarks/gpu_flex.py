"""torch's FlexAttention as a rival of the GPU benchmarks: as it compiles, and from an A100's instructions. Times nothing.

On a card with wgmma its compiler (Triton) uses that. Told not to (`DISABLE_MMA_V3`), it falls back to mma.sync m16n8k16, the
instructions of sm_80 kernels; torch's own tile sizes at d128 are the same for both cards (128 x 64, three stages, eight warps).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from generator.canonical import digest
from generator.spec import AttentionSpec, Rule

Call = Callable[[], Any]


_KEPT: list[Path] = []


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Inside, children of this process that need one spec's kernel on mma.sync find what the first of them compiled."""
    with tempfile.TemporaryDirectory(prefix="flex-mma-") as folder:
        _KEPT.append(Path(folder))
        try:
            yield
        finally:
            _KEPT.pop()


def as_compiled(torch: Any, s: AttentionSpec, q: Any, k: Any, v: Any, captured: Mapping[str, Any]) -> Call:
    """A call of the compiled function; the first one compiles."""
    from torch.nn.attention.flex_attention import flex_attention

    return _call(torch, torch.compile(flex_attention), s, q, k, v, captured)


def on_mma_sync(torch: Any, s: AttentionSpec, q: Any, k: Any, v: Any, captured: Mapping[str, Any]) -> Call:
    """The same from mma.sync, in the same process: compiled here. Raises ValueError where the compiler used something else."""
    from torch.nn.attention.flex_attention import flex_attention

    # A function of its own: what torch has compiled it finds again by the function's code, whatever the environment.
    def from_mma_sync(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    with contextlib.ExitStack() as held:
        folder = (_KEPT[-1] / digest(s)) if _KEPT else Path(held.enter_context(tempfile.TemporaryDirectory(prefix="flex-mma-")))
        held.enter_context(_without_wgmma(folder))
        call = _call(torch, torch.compile(from_mma_sync), s, q, k, v, captured)
        call()
        torch.cuda.synchronize()
        found = _products(folder)
    if not found["mma.sync"] or found["wgmma"]:
        raise ValueError(f"expected a kernel on mma.sync, found {found}")
    return call


def _products(folder: Path) -> dict[str, int]:
    """Instructions of matrix products in everything that was compiled into a folder."""
    texts = [p.read_text() for p in folder.rglob("*.ptx")]
    patterns = {"mma.sync": r"\bmma\.sync\.aligned\.m16n8k16", "wgmma": r"\bwgmma\.mma_async"}
    return {name: sum(len(re.findall(pattern, text)) for text in texts) for name, pattern in patterns.items()}


@contextlib.contextmanager
def _without_wgmma(folder: Path) -> Iterator[None]:
    """Compilations in this process know no wgmma and find nothing that was compiled before."""
    import torch._inductor.config as config
    from torch._inductor.async_compile import CompiledTritonKernels

    changed = {
        "DISABLE_MMA_V3": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    CompiledTritonKernels.cache_clear()
    try:
        with config.patch(compile_threads=1, fx_graph_cache=False):
            yield
    finally:
        CompiledTritonKernels.cache_clear()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _call(torch: Any, compiled: Any, s: AttentionSpec, q: Any, k: Any, v: Any, captured: Mapping[str, Any]) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    tests, mods = _tests(s, captured), _mods(torch, s, captured)
    mask = create_block_mask(tests[0], None, None, s.seqlen_q, s.seqlen_k, device="cuda") if len(tests) == 1 else None
    return lambda: compiled(q, k, v, score_mod=mods[0] if mods else None, block_mask=mask, enable_gqa=s.group > 1)


# Values are closed over: torch cannot find a compiled function again whose rules have them as defaults of parameters.


def _tests(s: AttentionSpec, captured: Mapping[str, Any]) -> list[Callable[..., Any]]:
    return [_test(rule, captured) for rule in s.masks]


def _test(rule: Rule, captured: Mapping[str, Any]) -> Callable[..., Any]:
    options = dict(rule.parameters)
    match rule.name:
        case "causal":
            return lambda b, h, i, j: i >= j
        case "window":
            left = int(options["left"])
            return lambda b, h, i, j: (i >= j) & (i - j <= left)
        case "prefix":
            length = int(options["length"])
            return lambda b, h, i, j: (i >= j) | (j < length)
        case "document":
            start, end = captured["DocStart"], captured["DocEnd"]
            return lambda b, h, i, j: (j >= start[b, i]) & (j < end[b, i])
    raise ValueError(f"no flex mask for {rule.name}")


def _mods(torch: Any, s: AttentionSpec, captured: Mapping[str, Any]) -> list[Callable[..., Any]]:
    return [_mod(torch, rule, captured) for rule in s.scores]


def _mod(torch: Any, rule: Rule, captured: Mapping[str, Any]) -> Callable[..., Any]:
    match rule.name:
        case "softcap":
            cap = float(dict(rule.parameters)["cap"])
            return lambda x, b, h, i, j: cap * torch.tanh(x / cap)
        case "alibi":
            slopes = captured["Slopes"]
            return lambda x, b, h, i, j: x + slopes[h] * (j - i)
    raise ValueError(f"no flex score for {rule.name}")
