"""Why a compiler made no binary, from how it ended: the limit of time, the limit of memory, or the source."""

from __future__ import annotations

from verifier.children import Ended, Limits
from verifier.records import CompileFailed

#: What compilers print when memory runs out, in lower case.
_OUT_OF_MEMORY = (
    "virtual memory exhausted", "out of memory", "outofmemory", "cannot allocate memory", "bad_alloc", "memoryerror",
    "killed signal",
)  # fmt: skip


def compile_failed(ended: Ended, limits: Limits) -> CompileFailed:
    """The reason and the log of a compiler that exceeded a limit, or made no file."""
    if ended.how == "timeout":
        return CompileFailed("compile_timeout", f"killed after {limits.wall_s:g} s\n{ended.log}", ended.wall_s)
    out_of_memory = ended.code == -9 or any(sign in ended.log.lower() for sign in _OUT_OF_MEMORY)
    return CompileFailed(
        "compile_oom" if out_of_memory else "compile_error", ended.log or f"exit status {ended.code}", ended.wall_s
    )
