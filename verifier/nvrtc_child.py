"""The child that runs NVRTC: source file in, cubin and ptxas report out. Started by `verifier.compile_cuda`, never imported.

    python -m verifier.nvrtc_child SOURCE CUBIN ARCH [OPTION...]

Exit status 0: the cubin is written and the report is on standard output. 1: the log is on standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(source: str, cubin: str, arch: str, *options: str) -> int:
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status):
            raise RuntimeError(nvrtc.nvrtcGetErrorString(status)[1].decode())
        return values[0] if len(values) == 1 else values

    text = Path(source).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(text, Path(source).name.encode(), 0, [], []))
    flags = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    print(log.decode(errors="replace").rstrip("\0 \n"))
    if int(status):
        return 1
    data = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, data))
    Path(cubin).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
