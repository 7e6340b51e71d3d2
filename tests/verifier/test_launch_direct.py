"""What a launch description asks of the launcher besides what translators do: arguments one by one, clusters, compact tensors.

The driver here notes what it is told, and copies tensors as the module's own kernels do.
"""

import ctypes
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from host_driver import HostDriver

from generator.binding import bind
from generator.spec import AttentionSpec
from generator.targets import find_target
from generator.translate.direct import read_launch
from generator.translate.records import Launch
from verifier import launch_cuda
from verifier.launch import LaunchError

pytestmark = pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings")
SPEC = AttentionSpec(2, 1, 8, 8, 3, 5, 7, "fp16")
PLAIN = {
    "entry": "kernel",
    "arguments": [
        {"tensor": "Q"}, {"scalar": "SeqQ"}, {"tensor": "K"}, {"tensor": "V"}, {"tensor": "O"}, {"tensor": "LSE"},
        {"struct": [{"scalar": "scale"}, {"value": ["*", "scale", 0.5], "type": "f32"}, {"tensor": "O", "stride": 1}]},
        {"value": ["*", "SeqK", "$sms"], "type": "i64"},
    ],
    "grid": [["*", 2, "Batch"], 1],
    "block": [32, 2],
    "shared_bytes": 1024,
    "cluster": [2],
    "compact": ["Q", "O", "LSE"],
}  # fmt: skip


class Driver(HostDriver):
    """`on_kernel` is the kernel, called with the address of its parameters."""

    def __init__(self, on_kernel):
        super().__init__(self._call, sms=132)
        self._on_kernel = on_kernel

    def _call(self, launched, parameters):
        if not launched.name.startswith("farm_"):
            self._on_kernel(parameters)
            return
        kind = np.uint32 if launched.name.endswith("_32") else np.uint16
        x, y, *numbers = np.ctypeslib.as_array((ctypes.c_int64 * 10).from_address(parts_of(parameters, 1)[0])).tolist()
        shape, strides = tuple(numbers[:4]), tuple(numbers[4:])
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        item = np.dtype(kind).itemsize
        raw = np.frombuffer((ctypes.c_char * (reach * item)).from_address(x), kind)
        tensor = np.lib.stride_tricks.as_strided(raw, shape, [s * item for s in strides], writeable=True)
        copy = np.frombuffer((ctypes.c_char * (int(np.prod(shape)) * item)).from_address(y), kind).reshape(shape)
        (tensor if "unpack" in launched.name else copy)[...] = copy if "unpack" in launched.name else tensor


def parts_of(parameters, count):
    return list((ctypes.c_void_p * count).from_address(parameters))


def kernel(monkeypatch, on_kernel, **changes):
    launch = read_launch(json.dumps(PLAIN | changes), SPEC, find_target("sm_90a"))
    assert isinstance(launch, Launch), str(launch)
    driver = Driver(on_kernel)
    driver.install(monkeypatch)
    return launch_cuda.CudaKernel(launch, b"cubin"), driver


def tensors():
    def make(heads, rows):
        return torch.randn(SPEC.batch, heads, rows, 8).half()

    o = torch.zeros(SPEC.batch, 2, 5, 8, dtype=torch.float16)
    return {"Q": make(2, 5), "K": make(1, 7), "V": make(1, 7), "O": o, "LSE": torch.zeros(SPEC.batch, 2, 5)}


def call(loaded, given):
    binding = bind(loaded.launch, SPEC)
    loaded.call([given[t.name] for t in loaded.launch.tensors], [s.value for s in binding.scalars])


def test_arguments_arrive_one_by_one_and_blocks_in_clusters(monkeypatch):
    seen = {}

    def read(parameters):
        parts = parts_of(parameters, 8)
        seen["pointers"] = [ctypes.c_uint64.from_address(parts[i]).value for i in (0, 2, 3, 4, 5)]
        seen["SeqQ"] = ctypes.c_int32.from_address(parts[1]).value
        seen["struct"] = (*(ctypes.c_float * 2).from_address(parts[6]), ctypes.c_int64.from_address(parts[6] + 8).value)
        seen["last"] = ctypes.c_int64.from_address(parts[7]).value

    loaded, driver = kernel(monkeypatch, read)
    given = tensors()
    call(loaded, given)
    assert seen["pointers"] == [given[name].data_ptr() for name in ("Q", "K", "V", "O", "LSE")]
    assert (seen["SeqQ"], seen["last"]) == (5, 7 * 132)
    assert seen["struct"] == pytest.approx((SPEC.scale, SPEC.scale / 2, 40))
    [launched] = driver.launches
    assert (launched.grid, launched.block, launched.cluster) == ((6, 1, 1), (32, 2, 1), (2, 1, 1))


def test_tensors_that_have_to_be_compact_are_copied_there_and_back(monkeypatch):
    def fill(parameters):
        parts = parts_of(parameters, 8)
        q, o, lse = (ctypes.c_uint64.from_address(parts[i]).value for i in (0, 4, 5))
        ctypes.memmove(o, q, 2 * SPEC.batch * 2 * 5 * 8)
        values = (ctypes.c_float * (SPEC.batch * 2 * 5)).from_address(lse)
        values[1] = 3.0

    loaded, driver = kernel(monkeypatch, fill)
    given = tensors()
    wide = torch.full((SPEC.batch, 5, 2, 11), 7.0, dtype=torch.float16)
    given["O"] = wide[..., 1:9].transpose(1, 2)
    rows = torch.full((SPEC.batch, 2, 10), -1.0)
    given["LSE"] = rows[..., ::2]
    call(loaded, given)
    names = [launched.name for launched in driver.launches]
    assert names == ["farm_repack", "farm_repack_32", "kernel", "farm_unpack", "farm_unpack_32"]
    assert torch.equal(given["O"], given["Q"]), "every element where the caller wants it"
    assert (wide[..., 0] == 7).all() and (wide[..., 9:] == 7).all(), "nothing beside it"
    assert rows[0, 0, 2] == 3 and int((rows != -1).sum()) == 1, "what the kernel leaves alone stays as it was"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": [3]}, "whole clusters of 2"),
        ({"grid": [2, 70000]}, "0 to 65535 blocks along y"),
        ({"arguments": [*PLAIN["arguments"][:-1], {"value": ["*", "SeqK", 2**40]}]}, "does not fit i32"),
    ],
)
def test_numbers_that_no_launch_takes_are_named(monkeypatch, changes, said):
    loaded, driver = kernel(monkeypatch, lambda _: None, **changes)
    with pytest.raises(LaunchError, match=said):
        call(loaded, tensors())
    assert driver.launches == []
