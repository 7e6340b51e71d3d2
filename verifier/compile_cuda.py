"""CUDA source text to cubins with NVRTC, on machines with or without a GPU, through `verifier.binary_cache`.

The compiler runs in a killable child. What ptxas reports and what the machine code holds goes into `Binary.resources`. `nvcc` is
the second choice, where NVRTC's Python package is missing.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from generator.canonical import digest_bytes
from generator.translate.direct.headers import COPIES, cuda_files, headers_hash, write_headers
from generator.translate.records import Translated
from verifier.binary_cache import cache_key, private_folder, read_entry, write_entry
from verifier.children import Ended, Limits, run_limited
from verifier.compile_failed import compile_failed
from verifier.cuda_arguments import cuda_facts
from verifier.cuda_versions import ptx_isa_of, version_of
from verifier.foreign import binary_refusal, compiled_text_hash, is_foreign, toolkit_headers
from verifier.records import Binary, CompileFailed

NVRTC_FLAGS = ("--std=c++17", "-default-device", "--ptxas-options=-v", "-diag-suppress=177", "-diag-suppress=550")
NVCC_FLAGS = ("-cubin", "-O3", "-std=c++17", "-Xptxas", "-v", "-diag-suppress=177", "-diag-suppress=550")
#: Instruction set of a target -> tensor instructions that its kernels should hold, and copies that should go with them.
EXPECTED: dict[str, tuple[str, ...]] = {
    "sm_75": ("HMMA.1688",),
    "sm_80": ("HMMA.16816", "LDGSTS"),
    "sm_90a": ("HGMMA", "UTMALDG"),
}
#: Families of instructions that are counted, by the beginning of the opcode.
COUNTED = (
    "HMMA.1688", "HMMA.16816", "HGMMA", "UTMALDG", "LDGSTS", "LDSM", "LDG", "STG", "LDS", "STS", "STL", "LDL", "MUFU.EX2",
    "FFMA", "FMUL", "FADD", "FMNMX", "SHFL", "BAR", "CALL",
)  # fmt: skip


class NoCudaCompiler(ValueError):
    """No CUDA compiler on this machine; the message says what to install."""


@dataclass(frozen=True, slots=True)
class CudaCompiler:
    kind: Literal["nvrtc", "nvcc"]
    version: str
    path: str = ""


@functools.lru_cache(maxsize=1)
def find_cuda_compiler() -> CudaCompiler:
    """NVRTC from its Python packages, else nvcc. Raises NoCudaCompiler, with what to install."""
    if find_spec("cuda") and find_spec("cuda.bindings"):
        for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13"):
            try:
                return CudaCompiler("nvrtc", f"NVRTC {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                continue
        if (version := _system_nvrtc()) is not None:
            return CudaCompiler("nvrtc", version)
    if path := shutil.which("nvcc"):
        lines = run_limited([path, "--version"], Limits(wall_s=30)).log.strip().splitlines()
        return CudaCompiler("nvcc", lines[-1] if lines else "nvcc", path)
    raise NoCudaCompiler(
        "no CUDA compiler found: pip install 'kernel-farm[cuda]' (NVRTC, no GPU needed), or put nvcc on the path"
    )


def _system_nvrtc() -> str | None:
    """The version of an NVRTC that lies in a toolkit rather than in a Python package."""
    code = "from cuda.bindings import nvrtc; r = nvrtc.nvrtcVersion(); print('NVRTC %d.%d' % r[1:])"
    ended = run_limited([sys.executable, "-c", code], Limits(wall_s=60))
    return ended.log.strip() if ended.code == 0 else None


def compile_cuda(
    translated: Translated, cache_dir: str | os.PathLike[str], limits: Limits | None = None, arch: str | None = None
) -> Binary | CompileFailed:
    """Compile, or find in the cache, the cubin of a translated program.

    arch: another architecture than the target's own, to check an older target's code on a newer card ("sm_90").
    A failed compile is a value. Raises NoCudaCompiler.
    """
    cache, limits, compiler = Path(cache_dir), limits or Limits(), find_cuda_compiler()
    isa = str(translated.launch.target_facts["isa"])
    arch = arch or isa
    flags = (f"-arch={arch}", *(NVRTC_FLAGS if compiler.kind == "nvrtc" else NVCC_FLAGS))
    headers: dict[str, str] = {}
    includes: tuple[Path, ...] = ()
    if is_foreign(translated.launch):  # folders differ from machine to machine, what lies in them by its version
        headers = cuda_files(standard_names=compiler.kind == "nvrtc")
        includes, version = toolkit_headers()
        flags += (f"-I<farm {headers_hash(headers)[:12]}>", f"-I<CUDA headers {version}>")
    key = cache_key(compiled_text_hash(translated), flags, compiler.version)
    if (hit := read_entry(cache, key)) is not None:
        return hit
    with private_folder(cache) as work:
        source, out = work / "kernel.cu", work / "kernel.cubin"
        source.write_text(translated.source)
        options = []
        if headers:
            write_headers(headers, work / "include")
            before = "--pre-include=" if compiler.kind == "nvrtc" else "-include="
            options = [*(f"-I{folder}" for folder in ("include", *includes)), f"{before}{COPIES}"]
        ended = _run(compiler, source, out, arch, limits, options)
        if ended.how == "timeout" or ended.code != 0 or not out.exists():
            return compile_failed(ended, limits)
        data = out.read_bytes()
        if refused := binary_refusal(data, translated.launch):
            return CompileFailed("compile_error", refused, ended.wall_s)
        resources = resources_of(ended.log, translated, out) | {"compiled_for": arch} | _made_by(compiler)
    binary = Binary(
        "", digest_bytes(data), translated.hash, translated.target, compiler.version, flags, ended.wall_s, resources, ended.log
    )
    return write_entry(cache, key, binary, data, suffix=".cubin")


def _made_by(compiler: CudaCompiler) -> dict[str, str | None]:
    toolkit = version_of(compiler.version)
    return {} if toolkit is None else {"cuda_toolkit": f"{toolkit[0]}.{toolkit[1]}", "ptx_isa": ptx_isa_of(compiler.version)}


def _run(compiler: CudaCompiler, source: Path, out: Path, arch: str, limits: Limits, options: list[str]) -> Ended:
    env = os.environ | {
        "TMPDIR": str(source.parent),
        "LC_ALL": "C",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
    }
    if compiler.kind == "nvrtc":
        command = [sys.executable, "-m", "verifier.nvrtc_child", str(source), str(out), arch, *NVRTC_FLAGS, *options]
    else:
        command = [compiler.path, *NVCC_FLAGS, *options, f"-arch={arch}", "-o", str(out), str(source)]
    return run_limited(command, limits, env=env, cwd=str(source.parent))


REPORT = re.compile(
    r"Compiling entry function '(?P<entry>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def resources_of(log: str, translated: Translated, cubin: Path) -> dict[str, Any]:
    """registers, spill_bytes (stores and loads), local_bytes, shared_bytes of a block, bytes of the cubin, SASS counts, warnings.

    registers: a thread's at the start; a kernel that reallocates them (sm_90a) has its own numbers in the source.
    unaligned: the same of the entry point for rows that begin anywhere, with its `entry`, where there is one.
    """
    facts, reported = cuda_facts(translated.launch), {m["entry"]: _reported(m) for m in REPORT.finditer(log)}
    out: dict[str, Any] = {"bytes": cubin.stat().st_size, "shared_bytes": facts["shared_bytes"]}
    out |= reported.get(translated.launch.entry, {})
    if (second := facts.get("unaligned")) is not None and second["entry"] in reported:
        named = {"entry": second["entry"], "shared_bytes": second["shared_bytes"]}
        out["unaligned"] = named | reported[second["entry"]]
    if (mix := instruction_mix(cubin, translated.launch.entry)) is not None:
        out["instructions"] = mix
    out["warnings"] = _warnings(out, translated)
    return out


def _reported(m: re.Match[str]) -> dict[str, int]:
    spilled = int(m["stores"]) + int(m["loads"])
    return {"registers": int(m["registers"]), "spill_bytes": spilled, "local_bytes": int(m["stack"])}


def _warnings(resources: dict[str, Any], translated: Translated) -> list[str]:
    out = []
    if resources.get("spill_bytes"):
        out.append(f"{resources['spill_bytes']} bytes of registers spilled: choose smaller tiles")
    if spilled := resources.get("unaligned", {}).get("spill_bytes"):
        out.append(f"{spilled} bytes of registers spilled in calls whose rows do not begin at 16 bytes: choose smaller tiles")
    mix, facts = resources.get("instructions"), translated.launch.target_facts
    expected = (
        EXPECTED["sm_80"] if facts.get("family") == "mma.sync" and facts["isa"] == "sm_90a" else EXPECTED.get(facts["isa"], ())
    )
    multiplies = facts.get("family") == "wgmma" or "gemm<" in translated.source.rpartition("constexpr int MT")[2]
    if mix is not None and multiplies:
        out += [f"no {name} instruction" for name in expected if not mix.get(name)]
    return out


def find_nvdisasm() -> str | None:
    """NVIDIA's disassembler: from its Python package, or a toolkit's."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for candidate in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(candidate)
    return shutil.which("nvdisasm") or next((p for p in ("/usr/local/cuda/bin/nvdisasm",) if os.access(p, os.X_OK)), None)


def disassemble(cubin: Path) -> str | None:
    """SASS text of a cubin, or None where there is no disassembler."""
    if (tool := find_nvdisasm()) is None:
        return None
    listing = cubin.with_suffix(".sass")
    ended = run_limited(["/bin/sh", "-c", 'exec "$1" -c "$2" > "$3"', "sh", tool, str(cubin), str(listing)], Limits(wall_s=60))
    return listing.read_text(errors="replace") if ended.code == 0 and listing.exists() else None


def instruction_mix(cubin: Path, entry: str) -> dict[str, int] | None:
    """How often each family of COUNTED stands in a kernel's machine code, and `total`; None without a disassembler."""
    text = disassemble(cubin)
    if text is None:
        return None
    found = re.search(rf"\.text\.{re.escape(entry)}:(.*?)(?:\n\s*\.section|\Z)", text, re.DOTALL)
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", found[1] if found else "", re.MULTILINE)
    counts = Counter(family for opcode in opcodes for family in COUNTED if opcode == family or opcode.startswith(family + "."))
    return {**dict(sorted(counts.items())), "total": len(opcodes)}
