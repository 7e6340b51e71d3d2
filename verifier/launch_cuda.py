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
COPY_THREADS = 256
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_...
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
    unpacks: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    parameters: Any = field(init=False)

    def __post_init__(self) -> None:
        """Where the driver finds each parameter of the kernel: one struct, or the parts of the block that the launch names."""
        at = ctypes.addressof(self.block)
        parts = self.kernel.launch.target_facts["parameters"].get("parts", (0,))
        self.parameters = (ctypes.c_void_p * len(parts))(*(at + part for part in parts))

    def run(self, stream: int = 0) -> None:
        if 0 in self.grid:
            return
        for repack in self.repacks:
            repack(stream)
        self.kernel.launch_block(self.grid, self.parameters, stream)
        for unpack in self.unpacks:
            unpack(stream)


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
        self._block = tuple(int(n) for n in self._facts.get("block", (self._facts["threads"], 1, 1)))
        self._cluster = tuple(int(n) for n in self._facts.get("cluster", (1, 1, 1)))
        self._copies: dict[str, Any] = {}
        self._configs: dict[tuple[tuple[int, int, int], int], Any] = {}

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
        repacks, unpacks = [], []
        present = [t if t is not None else RawTensor(0, (0,) * p.ndim) for p, t in zip(self.launch.tensors, tensors, strict=True)]
        for i in misaligned(self.launch, present):
            parameter = self.launch.tensors[i]
            copy = _CompactCopy.of(parameter, present[i])
            given[i] = copy.tensor
            repacks.append(self._copy_run(parameter, copy, "repack"))
            if parameter.written:  # what the kernel leaves alone stays as it was
                unpacks.append(self._copy_run(parameter, copy, "unpack"))
        call = make_call(self.launch, given, scalars, self._workspace, self._sms, self._zeros)
        block = ctypes.create_string_buffer(bytes(self._with_maps(call)), len(call.block))
        return Prepared(self, call.grid, block, tuple(repacks), tuple(unpacks), (tuple(tensors), tuple(given)))

    def launch_block(self, grid: tuple[int, int, int], parameters: Any, stream: int) -> None:
        """`parameters`: an array with the address of each of the kernel's parameters."""
        shared, at = int(self._facts["shared_bytes"]), ctypes.addressof(parameters)
        if self._cluster == (1, 1, 1):
            status = _driver().cuLaunchKernel(self._function, *grid, *self._block, shared, stream, at, 0)
        else:
            status = _driver().cuLaunchKernelEx(self._config(grid, shared, stream), self._function, at, 0)
        if int(status[0]):
            checked(status, f"{self.launch.entry}: launch")

    def _config(self, grid: tuple[int, int, int], shared: int, stream: int) -> Any:
        """The last configuration of launches in clusters again, where it is the same."""
        if (grid, stream) not in self._configs:
            self._configs = {(grid, stream): cluster_config(grid, self._block, self._cluster, shared, stream)}
        return self._configs[grid, stream]

    def _with_maps(self, call: Call) -> bytearray:
        for m in call.maps:
            call.block[m.offset : m.offset + 128] = encode_tensor_map(m)
        return call.block

    def _copy_run(self, parameter: TensorParameter, copy: _CompactCopy, what: str) -> Any:
        """What queues the copy of a tensor into its compact form (`repack`) or back (`unpack`), by the module's own kernel."""
        driver = _driver()
        name = self._facts[what] + ("_32" if ITEM_BYTES[parameter.dtype] == 4 else "")
        if name not in self._copies:
            found = driver.cuModuleGetFunction(self._module, name.encode())
            self._copies[name] = checked(found, f"{self.launch.entry}: {what}")
        function, grid = self._copies[name], max(1, min(4 * self._sms, -(-copy.elements // COPY_THREADS)))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(copy.block))

        def run(stream: int) -> None:
            at = ctypes.addressof(parameters)
            launched = driver.cuLaunchKernel(function, grid, 1, 1, COPY_THREADS, 1, 1, 0, stream, at, 0)
            checked(launched, f"{self.launch.entry}: {what} of {parameter.name}")

        run.kept = (copy, parameters)  # type: ignore[attr-defined]
        return run


@dataclass
class _CompactCopy:
    """Device memory for a tensor whose elements then lie one after the other, and the argument of the kernels that copy."""

    tensor: RawTensor
    block: Any
    elements: int
    memory: _Memory

    @staticmethod
    def of(parameter: TensorParameter, tensor: TensorLike) -> _CompactCopy:
        """Raises LaunchError for a tensor that no copy can be made of."""
        shape = tuple(getattr(tensor, "shape", None) or ())
        if len(shape) != parameter.ndim or parameter.ndim > 4:
            raise LaunchError(
                f"{parameter.name}: expected rows of 16 bytes; without a shape, or with over four axes, it cannot be repacked"
            )
        strides = [1] * parameter.ndim
        for a in range(parameter.ndim - 2, -1, -1):
            strides[a] = strides[a + 1] * shape[a + 1]
        total = strides[0] * shape[0]
        copy = int(checked(_driver().cuMemAlloc(max(16, total * ITEM_BYTES[parameter.dtype])), f"{parameter.name}: repack"))
        lead = 4 - parameter.ndim
        block = (ctypes.c_int64 * 10)(tensor.data_ptr(), copy, *([1] * lead), *shape, *([0] * lead), *tensor.stride())
        return _CompactCopy(RawTensor(copy, tuple(strides), shape), block, total, _Memory(copy))


def cluster_config(grid: tuple[int, int, int], block: tuple[int, ...], cluster: tuple[int, ...], shared: int, stream: int) -> Any:
    """What `cuLaunchKernelEx` takes for blocks in clusters."""
    driver = _driver()
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared, stream
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster
    attribute.value.clusterDim = size
    config.attrs, config.numAttrs = [attribute], 1
    return config


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
    kind = {
        "bf16": dtype.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f16": dtype.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "f32": dtype.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "i32": dtype.CU_TENSOR_MAP_DATA_TYPE_INT32,
    }[m.dtype]
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
            driver.CUtensorMapSwizzle(SWIZZLES[m.swizzle_bytes]),
            driver.CUtensorMapL2promotion(L2_PROMOTION_256),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"tensor map {m.extents} strides {m.strides} box {m.box}",
    )
    return ctypes.string_at(encoded.getPtr(), 128)
