"""Programs of the rule author, built for the GPU that is here: of its own target, and of older cards' to be checked on it."""

from __future__ import annotations

from pathlib import Path

import torch

from farm.devices import arch_for
from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.tl.fill import fill, hole_choices
from generator.translate import translate
from generator.translate.records import Launch, Translated
from verifier.compile import compile_translated
from verifier.judge import read_binary, sandbox_on, set_up
from verifier.records import Binary
from verifier.sandbox import Ran, SandboxLimits
from verifier.trial import trials_for

CAUSAL = (Rule.make("causal"),)


def spec(dtype: str = "fp16", dim: int = 64, seqlen: int = 200, heads: int = 4, kv_heads: int = 2, **more) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, dim, 1, seqlen, seqlen, dtype, **{"masks": CAUSAL, **more})


def run_once(binary: Binary, launch: Launch, of: AttentionSpec, device: str) -> dict[str, torch.Tensor]:
    """The outputs of one call on the judge's largest input, always the same one."""
    trial = trials_for(of, seed=11).trials[-1]
    with sandbox_on(device, read_binary(binary), launch, 1, SandboxLimits()) as sandbox:
        setting = set_up(sandbox, launch, trial)
        sandbox.lay_out(setting.arena)
        outcome = sandbox.run(setting.arena, setting.tensors, setting.scalars)
        assert isinstance(outcome, Ran) and outcome.result == "done", outcome
        return {t.name: setting.arena.views[t.name].clone() for t in setting.binding.tensors if t.written}


def build(of: AttentionSpec, target: str, cache: Path) -> tuple[Binary, Launch]:
    """The author's first choice of tiles, compiled for this GPU."""
    code = RuleAuthor().code(of, target)
    translated = translate(fill(code, next(hole_choices(code))), find_target(target))
    assert isinstance(translated, Translated), translated
    binary = compile_translated(translated, cache, arch=arch_for(target))
    assert isinstance(binary, Binary), binary
    return binary, translated.launch
