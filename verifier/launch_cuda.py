"""Launches cubins through NVIDIA's cuda.core, on a stream that the caller names. Judges nothing, imports no torch.

Code, kernels, their attributes and the device are cuda.core's objects. What cuda.core 1.2 lacks goes through cuda-bindings:
`launch` takes numbers, buffers and tensor maps as arguments, but no struct by value, so kernels are launched by
`cuLaunchKernelEx` with a configuration and a block of arguments that are made once; tensor maps inside such a block; setting the
limit of dynamic shared memory; memory that no stream orders, which a call may need while its stream is captured.

A kernel runs in its stream's context; on the null stream in the current one of the calling thread (torch's, where torch has made
one). Code is never unloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from generator.translate.records import Launch, TensorParameter
from verifier.cuda_arguments import ITEM_BYTES, Call, TensorMap, cuda_facts, entry_for, make_call, too_narrow
from verifier.launch import LaunchError, RawTensor, TensorLike, check_call

ZEROS_BYTES = 1 << 16  # stands for empty tensors
#: Of the kernel that copies: threads of a block, elements for which there is one more block, blocks a multiprocessor at most.
COPY_THREADS, COPY_ELEMENTS, COPY_BLOCKS = 256, 1024, 16
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_...
L2_PROMOTION_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class CudaError(RuntimeError):
    """The driver refused; the message names the call and the kernel."""


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _core() -> Any:
    import cuda.core

    return cuda.core


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call. Raises CudaError."""
    status, *values = result
    if int(status):
        _, name = _driver().cuGetErrorString(status)
        raise CudaError(f"{what}: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Launchable:
    """A kernel with its arguments: all that the driver is told but the stream, made once.

    parameters: an array with the address of each of the kernel's parameters. shape: grid, block, cluster, dynamic shared memory.
    """

    function: Any
    shape: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
    parameters: Any
    what: str
    kept: Any = None

    def __post_init__(self) -> None:
        self._launch, self._at = _driver().cuLaunchKernelEx, ctypes.addressof(self.parameters)
        self._configs: dict[int, Any] = {}

    def run(self, stream: int) -> None:
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = launch_config(*self.shape, stream)
        status = self._launch(config, self.function, self._at, 0)
        if status[0]:
            checked(status, self.what)


@dataclass
class Prepared:
    """One call with everything but the stream fixed; keeps alive what the call points to."""

    kernel: Launchable | None  # None: there is nothing to do
    repacks: tuple[Launchable, ...] = ()
    unpacks: tuple[Launchable, ...] = ()
    kept: tuple[Any, ...] = ()

    def run(self, stream: int = 0) -> None:
        if self.kernel is None:
            return
        for repack in self.repacks:
            repack.run(stream)
        self.kernel.run(stream)
        for unpack in self.unpacks:
            unpack.run(stream)


@dataclass(frozen=True)
class _Entry:
    """One entry point of the code: how it is launched, and what the driver launches."""

    launch: Launch
    function: Any

    def launchable(self, grid: tuple[int, int, int], block: Any) -> Launchable:
        """The driver is told where each parameter lies: one struct, or the parts of the block that the launch names."""
        facts, at = cuda_facts(self.launch), ctypes.addressof(block)
        parts = facts["parameters"].get("parts", (0,))
        threads = tuple(int(n) for n in facts.get("block", (facts["threads"], 1, 1)))
        cluster = tuple(int(n) for n in facts.get("cluster", (1, 1, 1)))
        shape, where = (grid, threads, cluster, int(facts["shared_bytes"])), (at + part for part in parts)
        return Launchable(self.function, shape, (ctypes.c_void_p * len(parts))(*where), f"{self.launch.entry}: launch", block)


class CudaKernel:
    """A loaded kernel. One launch at a time may run where the launch asks for an exclusive workspace: use one object a stream."""

    def __init__(self, launch: Launch, cubin: bytes) -> None:
        """For the current device. Raises CudaError."""
        self.launch, self._facts = launch, cuda_facts(launch)
        self._device = _core().Device()
        with _told(f"{launch.entry}: loading"):
            self._code = _core().ObjectCode.from_cubin(cubin, name=launch.entry)
            self._kernel = self._code.get_kernel(launch.entry)
        self._entries = {launch.entry: self._entry(launch, self._kernel)}
        self._copies: dict[str, Any] = {}
        self._sms = int(self._device.properties.multiprocessor_count)
        wanted = self._facts["workspace"]
        self._workspace = self._zeroed(wanted["bytes"]) if wanted else 0
        self._zeros = self._zeroed(ZEROS_BYTES)

    @property
    def attributes(self) -> dict[str, int]:
        """registers, local_bytes and shared_bytes (static), as the driver tells them of the current device."""
        told = self._kernel.attributes
        return {"registers": told.num_regs, "local_bytes": told.local_size_bytes, "shared_bytes": told.shared_size_bytes}

    def _entry(self, launch: Launch, kernel: Any) -> _Entry:
        size = cuda_facts(launch)["shared_bytes"]
        if size > 48 * 1024:
            attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            status = _driver().cuKernelSetAttribute(attribute, size, kernel.handle, self._device.device_id)
            checked(status, f"{launch.entry}: {size} bytes of shared memory")
        return _Entry(launch, self._function(kernel))

    def _function(self, kernel: Any) -> Any:
        """What the driver launches: the kernel of whichever context its stream has. Its code is brought to the device now, since
        that may not happen while a stream is captured.
        """
        checked(_driver().cuKernelGetFunction(kernel.handle), f"{self.launch.entry}: loading")
        return _driver().CUfunction(int(kernel.handle))

    def _found(self, launch: Launch) -> _Entry:
        """An entry point, looked up when it is first wanted."""
        if launch.entry not in self._entries:
            with _told(f"{launch.entry}: loading"):
                kernel = self._code.get_kernel(launch.entry)
            self._entries[launch.entry] = self._entry(launch, kernel)
        return self._entries[launch.entry]

    def _zeroed(self, size: int) -> int:
        driver = _driver()
        address = checked(driver.cuMemAlloc(max(size, 16)), "workspace")
        checked(driver.cuMemsetD8(address, 0, max(size, 16)), "workspace")
        return int(address)

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
        for i in too_narrow(self.launch, present):
            parameter = self.launch.tensors[i]
            copy = _CompactCopy.of(parameter, present[i])
            given[i] = present[i] = copy.tensor
            repacks.append(self._copy_run(parameter, copy, "repack"))
            if parameter.written:  # what the kernel leaves alone stays as it was
                unpacks.append(self._copy_run(parameter, copy, "unpack"))
        entry = self._found(entry_for(self.launch, present))
        call = make_call(entry.launch, given, scalars, self._workspace, self._sms, self._zeros)
        block = ctypes.create_string_buffer(bytes(self._with_maps(call)), len(call.block))
        launchable = None if call.is_empty else entry.launchable(call.grid, block)
        return Prepared(launchable, tuple(repacks), tuple(unpacks), (tuple(tensors), tuple(given)))

    def _with_maps(self, call: Call) -> bytearray:
        for m in call.maps:
            call.block[m.offset : m.offset + 128] = encode_tensor_map(m)
        return call.block

    def _copy_run(self, parameter: TensorParameter, copy: _CompactCopy, what: Literal["repack", "unpack"]) -> Launchable:
        """The copy of a tensor into its compact form (`repack`) or back (`unpack`), by the module's own kernel.

        Raises LaunchError where it has none.
        """
        named = self._facts.get(what)
        if named is None:
            raise LaunchError(f"{parameter.name}: expected rows of 16 bytes; the code of {self.launch.entry} cannot {what} it")
        name = named + ("_32" if ITEM_BYTES[parameter.dtype] == 4 else "")
        if name not in self._copies:
            with _told(f"{self.launch.entry}: {what}"):
                self._copies[name] = self._function(self._code.get_kernel(name))
        blocks = max(1, min(COPY_BLOCKS * self._sms, -(-copy.elements // COPY_ELEMENTS)))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(copy.block))
        shape = ((blocks, 1, 1), (COPY_THREADS, 1, 1), (1, 1, 1), 0)
        return Launchable(self._copies[name], shape, parameters, f"{self.launch.entry}: {what} of {parameter.name}", copy)


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


def launch_config(grid: tuple[int, ...], block: tuple[int, ...], cluster: tuple[int, ...], shared_bytes: int, stream: int) -> Any:
    """What `cuLaunchKernelEx` takes: grid in blocks, a handle of a stream."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster
        attribute.value.clusterDim = size
        config.attrs, config.numAttrs = [attribute], 1
    return config


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Raises CudaError for what cuda.core raises: it has no public name for its own errors."""
    try:
        yield
    except Exception as error:
        raise CudaError(f"{what}: {error}") from None


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
