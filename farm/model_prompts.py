"""The prompts of a sweep's problem: of TL, of device code, or of a translation, by the plan's settings. Asks nobody."""

from __future__ import annotations

from dataclasses import replace

from farm.model_settings import ModelSettings
from generator.authors.direct_prompts import DirectPrompts, direct_prompts, translation_system
from generator.authors.prompting import TaskPrompts, task_prompts
from generator.spec import AttentionSpec
from generator.targets import Target, find_target
from generator.translate.direct import language_of
from verifier.compile import ISA_FLAGS
from verifier.compile_cuda import NVRTC_FLAGS
from verifier.environment import cpu_flags
from verifier.source_rules import ALLOWED_HEADERS

#: Flags that change what a kernel may be written like; the compiler gets more.
_CPP_FLAGS = ("-O2", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-ffp-contract=off")


def prompts_of(spec: AttentionSpec, target_name: str, settings: ModelSettings) -> TaskPrompts:
    """What the model is asked for a problem. Raises PromptTooLong, SpecError."""
    target = _target(target_name)
    if settings.style == "direct":
        return _direct(spec, target, settings)
    text = f"{target.isa}: {', '.join(target.instructions)}"
    if target.shared_bytes:
        text += f"; {target.shared_bytes // 1024} KiB of shared memory a block, {target.registers} registers a thread"
    return task_prompts(spec, target.hardware[0], text + ".", settings.token_limit - settings.max_tokens)


def translation_of(spec: AttentionSpec, target_name: str, settings: ModelSettings) -> DirectPrompts | None:
    """What the model is asked for stage 2; None where our translator does it. Raises PromptTooLong, SpecError."""
    if settings.style == "direct" or settings.translator == "ours":
        return None
    prompts = _direct(spec, _target(target_name), settings)
    return replace(prompts, system=translation_system(prompts))


def _direct(spec: AttentionSpec, target: Target, settings: ModelSettings) -> DirectPrompts:
    flags = (*_CPP_FLAGS, *ISA_FLAGS[target.isa]) if target.family == "cpu" else NVRTC_FLAGS
    headers = tuple(ALLOWED_HEADERS["c++" if language_of(target) == "c++" else "cuda"])
    return direct_prompts(spec, target, headers, flags, settings.token_limit - settings.max_tokens)


def _target(name: str) -> Target:
    return find_target(name, cpu_flags() if name.startswith("cpu") else ())
