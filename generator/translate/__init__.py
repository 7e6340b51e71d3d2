"""Translators from core TL to source text, one folder a target family."""

from __future__ import annotations

from generator.targets import Target
from generator.tl.expand import expand
from generator.tl.ir import Program
from generator.translate.records import Translated, Untranslatable


def translate(program: Program, target: Target) -> Translated | Untranslatable:
    """Source text for a filled program, or the reason why there is none. Sees the program and the target, nothing else.

    `program` may be core code already. Raises TLError for a sketch and for code with holes.
    """
    core = expand(program)
    match target.family:
        case "cpu":
            from generator.translate.cpu import translate_cpu

            return translate_cpu(core, target)
        case "cuda":
            try:
                from generator.translate.cuda import translate_cuda
            except ImportError:
                return Untranslatable("translate_failed", f"{target.name}: this build has no translator for CUDA targets")
            return translate_cuda(core, target)
