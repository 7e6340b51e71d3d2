"""Prompts that ask for device code itself: the whole kernel of a spec, or the translation of a checked program. Asks nobody.

Built from the tables that the reader of launch descriptions, the source rules' headers and the compilers use.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.authors.describe import task_in_words
from generator.authors.exchange import Message
from generator.authors.prompting import TaskPrompts, fill, fit_messages, language_page, load
from generator.binding import rule_scalars, rule_tensors
from generator.spec import AttentionSpec
from generator.targets import Target
from generator.translate.direct import CPU_FIELDS, CUDA_FIELDS, language_of
from generator.translate.direct.expressions import FUNCTIONS
from generator.translate.direct.headers import CPU_RUNTIME, CUDA_FAMILIES, CUDA_RUNTIME, cpu_files, cuda_files, functions_in
from generator.translate.direct.parameters import call_scalars, call_tensors

TITLES = {"c++": "C++17", "cuda": "CUDA C++"}
TAGS = {"c++": "cpp", "cuda": "cuda"}
_ELEMENTS = {"c++": {"f32": "float", "f16": "_Float16", "bf16": "uint16_t"}, "cuda": {"f32": "float"}}
_REFUSED = {
    "c++": "inline assembly, exceptions, new and delete, global objects that run code, calls but for memory and maths of C",
    "cuda": "printf, malloc, assert, host code, PTX that reaches beyond the grid",
}


@dataclass(frozen=True, slots=True)
class DirectPrompts(TaskPrompts):
    """Besides: `translation`, the question for the translation of one program, with `$PROGRAM` where the program stands."""

    translation: str = ""

    def translate(self, program: str) -> str:
        return self.translation.replace("$PROGRAM", program.rstrip("\n"))


def direct_prompts(
    spec: AttentionSpec, target: Target, headers: tuple[str, ...], compiler_flags: tuple[str, ...], token_limit: int
) -> DirectPrompts:
    """headers: what may be included; compiler_flags: as the compiler is called. Raises PromptTooLong, SpecError."""
    language = language_of(target)
    system = fill(
        "direct.md",
        language_title=TITLES[language],
        target_title=target.hardware[0],
        tag=TAGS[language],
        contract=_contract(target, compiler_flags),
        launch_fields="\n".join(f"- {name}: {about}" for name, about in _fields(target).items()),
        example=_example(spec, target),
        refused=_REFUSED[language],
        headers=", ".join(sorted(headers)),
    )
    task = task_in_words(spec)
    facts = f"{target.isa}: {', '.join(target.instructions)}."
    shared = {"task": task, "parameters": parameters(spec), "facts": facts}
    asked = {"language_title": TITLES[language], "tag": TAGS[language], "functions": _functions(target)}
    translation = fill("translate.md", **shared, **asked, program="$PROGRAM")
    prompts = DirectPrompts(system, fill("direct_task.md", **shared), "", "", TAGS[language], token_limit, translation)
    fit_messages((Message("system", system), Message("user", prompts.first)), token_limit)
    return prompts


def translation_system(prompts: DirectPrompts) -> str:
    """What a model is told that translates: how code is called, and the language that it reads."""
    return f"{prompts.system}\n\nThe language that you translate from:\n{language_page()}"


def parameters(spec: AttentionSpec) -> str:
    """Every tensor and scalar of a call with its dtype and meaning."""
    d, dv = spec.head_dim, spec.head_dim_v
    sizes = {"Q": f"Heads, SeqQ, {d}", "K": f"KvHeads, SeqK, {d}", "V": f"KvHeads, SeqK, {dv}", "O": f"Heads, SeqQ, {dv}"}
    sizes["LSE"] = "Heads, SeqQ"
    captured, rules = rule_tensors(spec), rule_scalars(spec)
    lines = []
    for name, t in call_tensors(spec).items():
        if name in captured:
            axes, about = ", ".join((*captured[name].offset, *captured[name].shape)), f": {captured[name].meaning}"
        else:
            axes, about = f"Batch, {sizes[name]}", " (written)" if t.written else ""
        lines.append(f"- tensor {name} ({axes}) {t.dtype}{about}")
    for name, s in call_scalars(spec).items():
        about = f": {rules[name][1].meaning}" if name in rules else ""
        lines.append(f"- scalar {name} {s.dtype}{about}")
    return "\n".join(lines)


def _fields(target: Target) -> dict[str, str]:
    return CPU_FIELDS if target.family == "cpu" else CUDA_FIELDS


def _contract(target: Target, compiler_flags: tuple[str, ...]) -> str:
    if target.family == "cpu":
        entry_point = cpu_files()["farm_call.h"].split("\n\n", 1)[1].strip()
        return fill("direct_cpu.md", entry_point=entry_point, compiler_flags=" ".join(compiler_flags))
    shared_kib = str(target.shared_bytes // 1024)
    words = " ".join(FUNCTIONS)
    return fill("direct_cuda.md", isa=target.isa, shared_kib=shared_kib, registers=str(target.registers), functions=words)


def _example(spec: AttentionSpec, target: Target) -> str:
    language = language_of(target)
    dtype = call_tensors(spec)["O"].dtype
    element = _ELEMENTS[language].get(dtype, "unsigned short")
    name = "direct_example_cpu.md" if language == "c++" else "direct_example_cuda.md"
    return fill(name, element=element, head_dim_v=str(spec.head_dim_v))


def _functions(target: Target) -> str:
    """Our device headers by name with the first lines of what they hold; those of the target's instructions only."""
    if target.family == "cpu":
        return _listed(cpu_files(), tuple(CPU_RUNTIME))
    files = cuda_files(standard_names=True)
    shared = tuple(name for name in CUDA_RUNTIME if not any(name in family for family in CUDA_FAMILIES.values()))
    parts = [_listed(files, shared)]
    for family, names in header_families(target).items():
        step = f", after `#define FARM_MMA_K {8 if target.isa == 'sm_75' else 16}`" if family == "mma.sync" else ""
        parts.append(f"For {family} (one family in a source, never two{step}):\n\n{_listed(files, names)}")
    return "\n\n".join(parts)


def header_families(target: Target) -> dict[str, tuple[str, ...]]:
    """The families of instructions that a CUDA target has, with their headers."""
    copies = "copy_staged.cuh" if target.isa == "sm_75" else "copy_async.cuh"
    mma = tuple(name for name in CUDA_FAMILIES["mma.sync"] if not name.startswith("copy_") or name == copies)
    return {"mma.sync": mma} | ({"wgmma": CUDA_FAMILIES["wgmma"]} if target.compute_capability >= 90 else {})


def _listed(files: dict[str, str], names: tuple[str, ...]) -> str:
    return "\n\n".join(f"{name}:\n" + "\n".join(functions_in(files, name)) for name in names)


__all__ = ["DirectPrompts", "direct_prompts", "load", "parameters", "translation_system"]
