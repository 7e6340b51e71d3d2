"""Loads and launches a kernel with the real cuda.core and cuda-bindings against the stub of the driver; prints what it was told.

Arguments: the stub's path, the launch description as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys


class Told(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("num_launches", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("shared_limit", ctypes.c_int),
        ("loaded", ctypes.c_int),
        ("block_bytes", ctypes.c_ubyte * 64),
    )


def main(stub: str, description: str) -> None:
    library = ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)  # what is loaded by this name from now on is the stub
    told = Told.in_dll(library, "stub_told")

    from generator.translate.records import launch_from_plain
    from verifier.launch import RawTensor
    from verifier.launch_cuda import CudaError, CudaKernel

    launch = launch_from_plain(json.loads(description))
    kernel = CudaKernel(launch, b"cubin")
    prepared = kernel.prepare([RawTensor(4096, (8, 1), (3, 8))], [5])
    for stream in (77, 0, 77):
        prepared.run(stream)
    errors = []
    for cubin, entry in ((b"other", "kernel"), (b"cubin", "missing")):
        try:
            CudaKernel(type(launch)(entry, launch.tensors, launch.scalars, launch.target_facts), cubin)
        except CudaError as error:
            errors.append(str(error))
    plain = {name: list(value) if isinstance(value := getattr(told, name), ctypes.Array) else value for name, _ in Told._fields_}
    print(json.dumps({**plain, "attributes": kernel.attributes, "errors": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
