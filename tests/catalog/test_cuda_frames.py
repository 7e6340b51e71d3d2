"""Cubins on CUDA tensors, as far as that can be told without a GPU: what the launcher is given, and when it is packed anew."""

from __future__ import annotations

import contextlib

import pytest
import torch
from kernel_factory import CAUSAL, spec

from catalog import cuda_frames
from catalog.calls import AttentionCall
from catalog.cuda_frames import KEPT_CALLS, BoundCudaKernel, CudaEntry
from catalog.frames import bound_kernel
from catalog.operands import Output, contiguous_strides
from catalog.reasons import RunFailed
from generator.canonical import digest_bytes
from generator.translate.facts import CudaFacts, Workspace
from generator.translate.records import Launch, ScalarParameter, TensorParameter
from verifier.launch import LaunchError
from verifier.launch_cuda import CudaError

SPEC = spec(batch=2, heads=4, kv_heads=2, seqlen_q=8, seqlen_k=12, dim=16, dtype="fp16", masks=CAUSAL)


def cuda_facts_with(workspace: Workspace | None) -> CudaFacts:
    return {
        "isa": "sm_90a", "grid": [1, 1, 1], "threads": 32, "shared_bytes": 0, "aligned_16": [], "tensor_maps": [],
        "workspace": workspace, "parameters": {"bytes": 8, "alignment": 8, "fields": []},
    }  # fmt: skip


LAUNCH = Launch(
    "kernel",
    (*(TensorParameter(n, "f16", 2, 2, n == "O") for n in "QKVO"), TensorParameter("LSE", "f32", 2, 1, True)),
    (ScalarParameter("scale", "f32", True), ScalarParameter("SeqK", "i32", False)),
    cuda_facts_with(None),
)


class Prepared:
    repacks: tuple = ()

    def __init__(self, log: list, error: Exception | None) -> None:
        self.log, self.error = log, error

    def run(self, stream: int) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(stream)


class Kernel:
    """Records what it is asked for."""

    def __init__(self) -> None:
        self.prepared: list = []
        self.runs: list[int] = []
        self.entered: list[int] = []
        self.error: Exception | None = None

    def prepare(self, tensors, scalars) -> Prepared:
        self.prepared.append((tensors, scalars))
        return Prepared(self.runs, self.error)


class Query:
    """A CUDA tensor as far as a frame looks at it: an address and a device."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return self.address

    def new_empty(self, shape, dtype):
        return Query(999)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> tuple[BoundCudaKernel, Kernel]:
    monkeypatch.setattr(cuda_frames, "current_stream", lambda device: 77)
    monkeypatch.setattr(cuda_frames, "is_current", lambda device: False)
    entered: list[int] = []
    monkeypatch.setattr(cuda_frames, "on_device", lambda device: contextlib.nullcontext(entered.append(device)))
    monkeypatch.setattr(cuda_frames, "allocating_in_captures", contextlib.nullcontext)
    entry, kernel = CudaEntry(LAUNCH, b"cubin", digest_bytes(b"cubin")), Kernel()
    monkeypatch.setattr(entry, "kernel", lambda device, stream: kernel)
    strides = tuple(contiguous_strides(s) for s in ((2, 4, 8, 16), (2, 2, 12, 16), (2, 2, 12, 16)))
    call = AttentionCall("f", "cuda:0", ("fp16",) * 3, 2, 4, 2, 8, 12, 16, 16, strides, scale=SPEC.scale, mask_forms=(CAUSAL,))
    shape = (2, 4, 8, 16)
    made = bound_kernel(entry, call, SPEC, Output(shape, strides[0], strides[0]), {})
    assert isinstance(made, BoundCudaKernel)
    kernel.entered = entered
    return made, kernel


def tensors(first: int = 1000) -> list[Query]:
    return [Query(first + 100 * i) for i in range(4)]


def test_a_call_is_packed_once_for_its_addresses_and_goes_to_torchs_stream(bound) -> None:
    frame, kernel = bound
    frame.run(*tensors())
    frame.run(*tensors())
    assert kernel.runs == [77, 77] and len(kernel.prepared) == 1
    (q, k, _, o, lse), scalars = kernel.prepared[0]
    assert (q.pointer, q.shape, q.strides) == (1000, (2, 4, 8, 16), (512, 128, 16, 1))
    assert k.shape == (2, 2, 12, 16) and o.pointer == 1300 and lse is None
    assert scalars == [SPEC.scale, 12]


def test_the_devices_context_is_entered_for_the_null_stream_only(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other stream brings its context: the driver launches a kernel of no context there."""
    frame, kernel = bound
    frame.run(*tensors())
    frame.run(*tensors())
    assert kernel.entered == [0], "once, to load and pack"
    monkeypatch.setattr(cuda_frames, "current_stream", lambda device: 0)
    frame.run(*tensors())
    frame.run(*tensors())
    assert kernel.entered == [0, 0, 0, 0] and kernel.runs == [77, 77, 0, 0]
    monkeypatch.setattr(cuda_frames, "is_current", lambda device: True)
    frame.run(*tensors())
    assert len(kernel.entered) == 4 and kernel.runs[-1] == 0


def test_an_lse_that_is_wanted_is_written(bound) -> None:
    frame, kernel = bound
    assert frame.run_with_lse(*tensors()).data_ptr() == 999
    lse = kernel.prepared[0][0][4]
    assert (lse.pointer, lse.shape, lse.strides) == (999, (2, 4, 8), (32, 8, 1))


def test_a_kernel_that_insists_on_every_output_gets_a_place_for_its_lse(bound) -> None:
    frame, kernel = bound
    frame._every_output = True
    frame.run(*tensors())
    assert kernel.prepared[0][0][4].pointer == 999


def test_packed_calls_are_few(bound) -> None:
    frame, kernel = bound
    for i in range(KEPT_CALLS + 5):
        frame.run(*tensors(10_000 * (i + 1)))
    assert len(frame._prepared) == KEPT_CALLS and len(kernel.prepared) == KEPT_CALLS + 5


@pytest.mark.parametrize(("error", "broken"), [(CudaError("launch: refused"), True), (LaunchError("Q: rows"), False)])
def test_what_the_driver_refuses_is_told(bound, error: Exception, broken: bool) -> None:
    frame, kernel = bound
    kernel.error = error
    with pytest.raises(RunFailed) as caught:
        frame.run(*tensors())
    assert caught.value.broken is broken and str(error) in str(caught.value)


def test_other_bytes_are_not_taken() -> None:
    with pytest.raises(LaunchError, match="not what was verified"):
        CudaEntry(LAUNCH, b"other", digest_bytes(b"cubin"))


def test_an_exclusive_workspace_means_a_kernel_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_frames, "CudaKernel", lambda launch, cubin: object())
    shared = CudaEntry(LAUNCH, b"cubin", digest_bytes(b"cubin"))
    assert shared.kernel(0, 1) is shared.kernel(0, 2) is not shared.kernel(1, 1)
    exclusive = Launch("kernel", (), (), cuda_facts_with({"bytes": 64, "zeroed": True, "exclusive": True}))
    own = CudaEntry(exclusive, b"cubin", digest_bytes(b"cubin"))
    assert own.kernel(0, 1) is own.kernel(0, 1) is not own.kernel(0, 2)
