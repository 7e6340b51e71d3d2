"""torch's FlexAttention, compiled, as a rival: an attention's rules as the functions that it takes. Times nothing."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generator.spec import AttentionSpec, Rule
from verifier.oracle import option
from verifier.own_folder import OwnFolder
from verifier.records import Unsupported

#: (q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv)) -> O (B, H, Sq, Dv).
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
#: (batch, head, query, key) -> whether the pair counts; (score, batch, head, query, key) -> the new score. On index tensors.
MaskMod = Callable[[Any, Any, Any, Any], Any]
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]

FLEX = "flex attention"


#: What a process imports beforehand whose children compile FlexAttention: seconds for each of them otherwise.
COMPILER_MODULES = ("torch.nn.attention.flex_attention", "torch._dynamo", "torch._inductor.compile_fx")


def compiler_environment() -> dict[str, str]:
    """Environment variables of children in which FlexAttention is compiled: what the first one makes, this process's others find.

    It lies in a folder of this process's own, as long as that lives: nobody can have put anything there beforehand. Children
    write there before a candidate is in them; from then on their fences allow no file (`verifier.confine`).
    """
    return compiled_in(Path(_kept(os.getpid()).path))


def compiled_in(folder: Path) -> dict[str, str]:
    """Environment variables of a process that keeps what it compiles in a folder."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def _kept(process: int) -> OwnFolder:
    """process: of the caller; a child by fork has a folder of its own."""
    folder = OwnFolder("rivals")
    atexit.register(_remove, process, folder)
    return folder


def _remove(process: int, folder: OwnFolder) -> None:
    if os.getpid() == process:
        folder.close()


def flex(spec: AttentionSpec, captured: Mapping[str, Tensor], device: str) -> Call | Unsupported:
    """The call, with a block mask made beforehand on `device` ("cpu" or "cuda"). Compiling happens in the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks = [mask_mod(rule, spec, captured) for rule in spec.masks]
    scores = [score_mod(rule, spec, captured) for rule in spec.scores]
    for made in (*masks, *scores):
        if isinstance(made, Unsupported):
            return made
    block_mask = None
    if masks:
        shape = (spec.seqlen_q, spec.seqlen_k)
        per_batch = any(rule.name in ("document", "padding") for rule in spec.masks)
        block_mask = create_block_mask(_all_of(masks), spec.batch if per_batch else None, None, *shape, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    change, grouped, scale = (_in_turn(scores) if scores else None), spec.group > 1, spec.scale

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, score_mod=change, block_mask=block_mask, scale=scale, enable_gqa=grouped)
        return out

    return run


def _all_of(mods: list[Any]) -> MaskMod:
    def holds(b: Any, h: Any, i: Any, j: Any) -> Any:
        out = mods[0](b, h, i, j)
        for mod in mods[1:]:
            out = out & mod(b, h, i, j)
        return out

    return holds


def _in_turn(mods: list[Any]) -> ScoreMod:
    def changed(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for mod in mods:
            x = mod(x, b, h, i, j)
        return x

    return changed


def _shift(rule: Rule, spec: AttentionSpec) -> int:
    """What is added to a query's number to get its position on the key axis."""
    return 0 if option(rule, "align", "bottom_right") == "top_left" else spec.seqlen_k - spec.seqlen_q


def mask_mod(rule: Rule, spec: AttentionSpec, captured: Mapping[str, Tensor]) -> MaskMod | Unsupported:
    """A mask rule as FlexAttention takes it."""
    shift = _shift(rule, spec)
    left, right = option(rule, "left", -1), option(rule, "right", 0)

    def in_window(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j == j
        seen = seen & (i + shift - j <= left) if left != -1 else seen
        return seen & (j - i - shift <= right) if right != -1 else seen

    match rule.name:
        case "causal":
            return lambda b, h, i, j: j <= i + shift
        case "window":
            return in_window
        case "sink_window":
            sink = rule["sink"]
            return lambda b, h, i, j: in_window(b, h, i, j) | ((j < sink) & ((right == -1) | (j <= i + shift + right)))
        case "prefix":
            length = rule["length"]
            return lambda b, h, i, j: (j < length) | (j <= i + shift)
        case "document":
            start, end = captured["DocStart"], captured["DocEnd"]
            return lambda b, h, i, j: (j >= start[b, i]) & (j < end[b, i])
        case "padding":
            lengths = captured["KvLen"]
            return lambda b, h, i, j: j < lengths[b]
    return Unsupported(f"nobody has written the mask {rule.name} for it")


def score_mod(rule: Rule, spec: AttentionSpec, captured: Mapping[str, Tensor]) -> ScoreMod | Unsupported:
    """A score rule as FlexAttention takes it."""
    shift = _shift(rule, spec)
    match rule.name:
        case "softcap":
            cap = rule["cap"]
            return lambda x, b, h, i, j: cap * torch.tanh(x / cap)
        case "alibi":
            slopes = captured["Slopes"]
            return lambda x, b, h, i, j: x - slopes[h] * torch.abs(i + shift - j)
    return Unsupported(f"has no {rule.name}")
