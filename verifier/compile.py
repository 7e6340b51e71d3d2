"""Source text to shared objects, in killable children, through `verifier.binary_cache`. CUDA sources go to
`verifier.compile_cuda`.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from generator.canonical import digest_bytes
from generator.translate.direct.headers import cpu_files, headers_hash, write_headers
from generator.translate.records import Translated
from verifier.binary_cache import cache_key, private_folder, read_entry, write_entry
from verifier.children import Limits, run_limited
from verifier.compile_cuda import compile_cuda
from verifier.compile_failed import compile_failed
from verifier.elf import imports_of
from verifier.foreign import CPP_FLAGS, binary_refusal, compiled_text_hash, is_foreign, source_refusal
from verifier.records import Binary, CompileFailed

BASE_FLAGS = (
    "-O2", "-std=c++17", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math",
    "-fno-threadsafe-statics", "-ffp-contract=off", "-w", "-Wl,-z,now", "-Wl,-z,noexecstack",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
#: `target_facts["isa"]` of a C++ launch -> compiler flags. The loader picks by the CPU's own flags
#: (`verifier.environment.isa_levels`).
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
CompilerKind = Literal["gcc", "clang", "zig"]
#: zig rebuilds libc++ for every new set of -m flags (75 s) unless told that there is no C++ library, and traps on undefined
#: behaviour by default.
_KIND_FLAGS: dict[CompilerKind, tuple[str, ...]] = {
    "gcc": (),
    "clang": (),
    "zig": ("-nostdlib++", "-fno-sanitize=undefined", "-target", "x86_64-linux-gnu"),
}


class NoCompiler(ValueError):
    """No C++ compiler on this machine; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: how to call it and what it calls itself."""

    command: tuple[str, ...]
    kind: CompilerKind
    version: str

    def flags(self, isa: str) -> tuple[str, ...]:
        if isa not in ISA_FLAGS:
            raise ValueError(f"target_facts.isa: expected one of {', '.join(ISA_FLAGS)}, found {isa!r}")
        return (*BASE_FLAGS, *ISA_FLAGS[isa], *_KIND_FLAGS[self.kind])


def find_compiler(command: str | None = None) -> Compiler:
    """The C++ compiler to use: `command` or FARM_CXX when given, else g++, clang++, c++, then the one inside the Python
    package ziglang.

    Raises NoCompiler, with what to install.
    """
    wanted = command or os.environ.get("FARM_CXX", "")
    if wanted:
        if (found := _probe(tuple(wanted.split()))) is None:
            raise NoCompiler(
                f"FARM_CXX: {wanted!r} does not run here; name a working C++ compiler, or unset it to let the farm look for one"
            )
        return found
    candidates: list[tuple[str, ...]] = [(name,) for name in ("g++", "clang++", "c++")]
    if find_spec("ziglang"):
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for candidate in candidates:
        if (found := _probe(candidate)) is not None:
            return found
    raise NoCompiler(
        "no C++ compiler found (looked for g++, clang++, c++ and the Python package ziglang); "
        "install one, for example `apt install g++` or `pip install ziglang`, or name one in FARM_CXX"
    )


@functools.lru_cache(maxsize=16)
def _probe(command: tuple[str, ...]) -> Compiler | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        ended = run_limited([*command, "--version"], Limits(wall_s=30))
    except FileNotFoundError:
        return None
    if ended.code != 0:
        return None
    version = ended.log.strip().splitlines()[0] if ended.log.strip() else "unknown"
    kind: CompilerKind = "zig" if "ziglang" in command else "clang" if "clang" in version.lower() else "gcc"
    return Compiler(command, kind, version)


def compile_translated(
    translated: Translated,
    cache_dir: str | os.PathLike[str],
    limits: Limits | None = None,
    compiler: Compiler | None = None,
    arch: str | None = None,
) -> Binary | CompileFailed:
    """Compile, or find in the cache, the binary of a translated program.

    arch: CUDA only: another architecture than the target's own, to check an older target's code on a newer card ("sm_90").
    A failed compile is a value, not an exception; so is foreign code that breaks the rules of `verifier.foreign`. Raises
    NoCompiler, and ValueError for an instruction set or language that is not known.
    """
    limits = limits or Limits()
    if refused := source_refusal(translated):
        return CompileFailed("compile_error", refused, 0.0)
    match translated.language:
        case "c++":
            return _compile_cpp(translated, Path(cache_dir), limits, compiler or find_compiler())
        case "cuda":
            return compile_cuda(translated, cache_dir, limits, arch)
        case other:
            raise ValueError(f"language: expected c++ or cuda, found {other!r}")


def _compile_cpp(translated: Translated, cache: Path, limits: Limits, compiler: Compiler) -> Binary | CompileFailed:
    flags = compiler.flags(translated.launch.target_facts.get("isa", "baseline"))
    headers = cpu_files() if is_foreign(translated.launch) else {}
    # What a binary depends on is the headers' text, not where they lie while it is compiled.
    flags += (*CPP_FLAGS, f"-I<farm {headers_hash(headers)[:12]}>") if headers else ()
    key = cache_key(compiled_text_hash(translated), flags, compiler.version)
    if (hit := read_entry(cache, key)) is not None:
        return hit
    with private_folder(cache) as work:
        source, out = work / "kernel.cpp", work / "kernel.so"
        source.write_text(translated.source)
        if headers:
            write_headers(headers, work / "include")
        options = [flag for flag in flags if not flag.startswith("-I")] + (["-Iinclude"] if headers else [])
        env = os.environ | {"TMPDIR": str(work), "ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), "LC_ALL": "C"}
        ended = run_limited([*compiler.command, *options, "-o", str(out), str(source), "-lm"], limits, env=env, cwd=str(work))
        if ended.how == "timeout" or ended.code != 0 or not out.exists():
            return compile_failed(ended, limits)
        data = out.read_bytes()
    if refused := binary_refusal(data, translated.launch):
        return CompileFailed("compile_error", refused, ended.wall_s)
    resources = {"bytes": len(data), "imports": list(imports_of(data))}
    binary = Binary(
        "", digest_bytes(data), translated.hash, translated.target, compiler.version, flags, ended.wall_s, resources, ended.log
    )
    return write_entry(cache, key, binary, data, suffix=".so")
