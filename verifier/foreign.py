"""Fences around native code that a model or a stranger wrote, before it ever runs: source, includes, what the binary holds.

Runs no candidate. The sandbox stands behind all of it; what no reading can stop is written in docs/direct_author.md.
"""

from __future__ import annotations

import functools
import os
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from generator.canonical import digest
from generator.translate.records import Launch, Translated, launch_hash
from verifier.elf import functions_of, imports_of, runs_by_itself
from verifier.source_rules import violations

#: Functions outside itself that a foreign kernel may call: maths, memory of its own, copies. No one of them reaches the system.
_MATHS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "sqrt", "cbrt", "hypot", "sin", "cos", "tan", "asin", "acos",
    "atan", "atan2", "sinh", "cosh", "tanh", "erf", "erfc", "fmod", "remainder", "fma", "fmax", "fmin", "fdim", "fabs", "floor",
    "ceil", "trunc", "round", "rint", "nearbyint", "lrint", "lround", "ldexp", "frexp", "copysign", "tgamma", "lgamma", "modf",
)  # fmt: skip
ALLOWED_IMPORTS = frozenset(
    {"memcpy", "memset", "memmove", "memcmp", "malloc", "calloc", "realloc", "free", "posix_memalign", "aligned_alloc"}
    | {"__stack_chk_fail"}
    | {name + suffix for name in _MATHS for suffix in ("", "f")}
)
#: Added when foreign C++ is compiled: no start files, so that nothing but the author's own could run before the entry point.
CPP_FLAGS = ("-nostartfiles",)


def is_foreign(launch: Launch) -> bool:
    """Whether the code comes from outside: said by the launch, which travels with the code wherever it goes."""
    return bool(launch.target_facts.get("foreign"))


def compiled_text_hash(translated: Translated) -> str:
    """What a binary depends on besides the compiler. Foreign source is refused or not by its launch too, and may hold several
    kernels.
    """
    if not is_foreign(translated.launch):
        return translated.hash
    return digest({"source": translated.hash, "launch": launch_hash(translated.launch)})


def source_refusal(translated: Translated) -> str:
    """What of the source is refused, line by line; "" when it may be compiled."""
    if not is_foreign(translated.launch):
        return ""
    found = violations(translated.source, "c++" if translated.language == "c++" else "cuda")
    return "\n".join(f"source line {v.line}: error: {v.message}" for v in found)


def binary_refusal(data: bytes, launch: Launch) -> str:
    """What of the compiled code is refused; "" when the sandbox may have it."""
    if not is_foreign(launch):
        return ""
    functions = functions_of(data)
    if launch.entry not in functions:
        named = ", ".join(name for name in functions if not name.startswith(("farm_", "$")))
        return f'error: launch.entry: the code has no function {launch.entry}; it has {named[:400] or "none"} (is it extern "C"?)'
    if "grid" in launch.target_facts:
        return ""  # device code imports nothing and has nothing that runs by itself
    strange = [name for name in imports_of(data) if name not in ALLOWED_IMPORTS]
    if strange:
        return f"error: the code calls {', '.join(strange)[:400]}, which a kernel may not; allowed are memory and maths of C"
    if runs_by_itself(data):
        return "error: the code has global objects that run code before the entry point; make them constants or locals"
    return ""


#: What a machine without `toolkit_headers` says.
NO_HEADERS = "this machine has no device headers of the CUDA toolkit; pip install 'kernel-farm[cuda]', or set CUDA_HOME"


@functools.cache
def toolkit_headers() -> tuple[tuple[Path, ...], str]:
    """Folders of the CUDA toolkit's device headers, and their version; no folders where there are none on this machine."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for include in sorted(Path(folder).glob("*/include")):
            if (include / "cuda_bf16.h").is_file():
                return _with_cccl(include), _version_of_package()
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(Path(nvcc).parents[1]) if nvcc else None]
    for home in (*filter(None, homes), "/usr/local/cuda"):
        include = Path(home) / "include"
        if (include / "cuda_bf16.h").is_file():
            return _with_cccl(include), f"toolkit in {include.parent.name}"
    return (), "none"


def _with_cccl(include: Path) -> tuple[Path, ...]:
    return tuple(folder for folder in (include, include / "cccl") if folder.is_dir())


def _version_of_package() -> str:
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
