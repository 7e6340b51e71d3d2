"""Launches cubins through NVIDIA's cuda-bindings, on a stream that the caller names. Judges nothing, imports no torch.

The current CUDA context of the calling thread is used (torch's, where torch has made one). Modules are never unloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from generator.translate.records import Launch, TensorParameter
from verifier.cuda_arguments import ITEM_BYTES, Call, TensorMap, make_call, misaligned
from verifier.launch import LaunchError, RawTensor, TensorLike, check_call

ZEROS_BYTES = 1 << 16  # stands for empty tensors
REPACK_THREADS = 256
SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
L2_PROMOTION_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class CudaError(RuntimeError):
    """The driver refused; the message names the call and the kernel."""


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call. Raises CudaError."""
    status, *values = result
    if int(status):
        _, name = _driver().cuGetErrorString(status)
        raise CudaError(f"{what}: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Prepared:
    """One call with everything but the stream fixed; keeps alive what the call points to."""

    kernel: CudaKernel
    grid: tuple[int, int, int]
    block: Any
    repacks: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    parameters: Any = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))

    def run(self, stream: int = 0) -> None:
        if 0 in self.grid:
            return
        for repack in self.repacks:
            repack(stream)
        self.kernel.launch_block(self.grid, self.parameters, stream)


class CudaKernel:
    """A loaded kernel. One launch at a time may run where the launch asks for an exclusive workspace: use one object a stream."""

    def __init__(self, launch: Launch, cubin: bytes) -> None:
        driver = _driver()
        self.launch, self._facts = launch, launch.target_facts
        self._cubin = cubin
        self._module = checked(driver.cuModuleLoadData(cubin), f"{launch.entry}: loading")
        self._function = checked(
            driver.cuModuleGetFunction(self._module, launch.entry.encode()), f"{launch.entry}: not in the module"
        )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        size = int(self._facts["shared_bytes"])
        if size > 48 * 1024:
            checked(driver.cuFuncSetAttribute(self._function, attribute, size), f"{launch.entry}: {size} bytes of shared memory")
        self._sms = self._device_attribute("MULTIPROCESSOR_COUNT")
        wanted = self._facts["workspace"]
        self._workspace = self._zeroed(wanted["bytes"]) if wanted else 0
        self._zeros = self._zeroed(ZEROS_BYTES)
        self._repack: Any = None

    @property
    def attributes(self) -> dict[str, int]:
        """registers, local_bytes and shared_bytes (static), as the driver tells them."""
        driver = _driver()
        names = {"registers": "NUM_REGS", "local_bytes": "LOCAL_SIZE_BYTES", "shared_bytes": "SHARED_SIZE_BYTES"}
        get, enum = driver.cuFuncGetAttribute, driver.CUfunction_attribute
        return {
            k: int(checked(get(getattr(enum, f"CU_FUNC_ATTRIBUTE_{n}"), self._function), "attribute")) for k, n in names.items()
        }

    def _device_attribute(self, name: str) -> int:
        driver = _driver()
        device = checked(driver.cuCtxGetDevice(), "current device")
        return int(
            checked(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device), name)
        )

    def _zeroed(self, size: int) -> int:
        driver = _driver()
        address = checked(driver.cuMemAlloc(max(size, 16)), "workspace")
        checked(driver.cuMemsetD8(address, 0, max(size, 16)), "workspace")
        return int(address)

    # ------------------------------------------------------------------------------------------------------ calls

    def call(self, tensors: Sequence[TensorLike | None], scalars: Sequence[int | float], stream: int = 0) -> None:
        """Queue one run on a stream (a CUstream handle). Raises LaunchError for arguments that the launch does not allow."""
        self.prepare(tensors, scalars).run(stream)

    def prepare(self, tensors: Sequence[TensorLike | None], scalars: Sequence[int | float]) -> Prepared:
        """A call that can be queued again and again on the same tensors. None leaves an output out."""
        strides = [t.stride() if t is not None else (1,) * p.ndim for p, t in zip(self.launch.tensors, tensors, strict=True)]
        check_call(self.launch, strides, scalars)
        for p, t in zip(self.launch.tensors, tensors, strict=True):
            if t is None and not p.written:
                raise LaunchError(f"{p.name}: expected a tensor, found None; only outputs can be left out")
        given = list(tensors)
        repacks = []
        present = [t if t is not None else RawTensor(0, (0,) * p.ndim) for p, t in zip(self.launch.tensors, tensors, strict=True)]
        for i in misaligned(self.launch, present):
            tensor = present[i]
            given[i], run = self._repacked(self.launch.tensors[i], tensor)
            repacks.append(run)
        call = make_call(self.launch, given, scalars, self._workspace, self._sms, self._zeros)
        block = ctypes.create_string_buffer(bytes(self._with_maps(call)), len(call.block))
        return Prepared(self, call.grid, block, tuple(repacks), (tuple(tensors), tuple(given)))

    def launch_block(self, grid: tuple[int, int, int], parameters: Any, stream: int) -> None:
        """`parameters`: an array with the address of a filled parameter block."""
        threads, shared = int(self._facts["threads"]), int(self._facts["shared_bytes"])
        status = _driver().cuLaunchKernel(self._function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(parameters), 0)
        if int(status[0]):
            checked(status, f"{self.launch.entry}: launch")

    def _with_maps(self, call: Call) -> bytearray:
        for m in call.maps:
            call.block[m.offset : m.offset + 128] = encode_tensor_map(m)
        return call.block

    def _repacked(self, parameter: TensorParameter, tensor: TensorLike) -> tuple[RawTensor, Any]:
        """A compact copy for a tensor whose address or strides are not multiples of 16 bytes, and what fills it."""
        driver, shape = _driver(), tuple(getattr(tensor, "shape", None) or ())
        if len(shape) != parameter.ndim or parameter.ndim > 4:
            raise LaunchError(
                f"{parameter.name}: expected rows of 16 bytes; without a shape, or with over four axes, it cannot be repacked"
            )
        if self._repack is None:
            name = self._facts["repack"].encode()
            self._repack = checked(driver.cuModuleGetFunction(self._module, name), f"{self.launch.entry}: repack")
        strides = [1] * parameter.ndim
        for a in range(parameter.ndim - 2, -1, -1):
            strides[a] = strides[a + 1] * shape[a + 1]
        total = strides[0] * shape[0]
        copy = checked(driver.cuMemAlloc(max(16, total * ITEM_BYTES[parameter.dtype])), f"{parameter.name}: repack")
        lead = 4 - parameter.ndim
        block = (ctypes.c_int64 * 10)(tensor.data_ptr(), int(copy), *([1] * lead), *shape, *([0] * lead), *tensor.stride())
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        grid = max(1, min(4 * self._sms, -(-total // REPACK_THREADS)))

        def run(stream: int) -> None:
            launched = driver.cuLaunchKernel(
                self._repack, grid, 1, 1, REPACK_THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0
            )
            checked(launched, f"{self.launch.entry}: repack of {parameter.name}")

        run.kept = (block, parameters, _Memory(int(copy)))  # type: ignore[attr-defined]
        return RawTensor(int(copy), tuple(strides), shape), run


class _Memory:
    """Device memory that is given back with its owner."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            _driver().cuMemFree(self.address)


def encode_tensor_map(m: TensorMap) -> bytes:
    """The 128 bytes of a tensor map (CUtensorMap)."""
    driver = _driver()
    dtype = driver.CUtensorMapDataType
    kind = {"bf16": dtype.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": dtype.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}[m.dtype]
    rank = len(m.extents)
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            rank,
            m.address,
            [driver.cuuint64_t(n) for n in m.extents],
            [driver.cuuint64_t(s) for s in m.strides],
            [driver.cuuint32_t(n) for n in m.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(SWIZZLE_128),
            driver.CUtensorMapL2promotion(L2_PROMOTION_256),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"tensor map {m.extents} strides {m.strides} box {m.box}",
    )
    return ctypes.string_at(encoded.getPtr(), 128)
