"""The CUDA launcher without a GPU: a driver that notes what it is told and runs kernels in the emulator."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "generator"))

from cuda_emulation import build
from host_driver import HostDriver, Launched

from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from generator.targets import TARGETS
from generator.tl.fill import fill, hole_choices
from generator.tl.ir import Constant, Program
from generator.translate import translate
from generator.translate.records import Translated
from verifier import launch_cuda
from verifier.cuda_arguments import misaligned, too_narrow
from verifier.launch import LaunchError, RawTensor
from verifier.oracle import attention

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
    pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings"),
]


class EmulatedDriver(HostDriver):
    """Kernels run in the emulator."""

    def __init__(self, translated: Translated, folder: Path) -> None:
        super().__init__(self._emulate, sms=3)
        self._library = build(translated, folder)

    def cuTensorMapEncodeTiled(self, kind, rank, address, extents, strides, box, steps, *modes) -> tuple[int, Any]:  # type: ignore[no-untyped-def]
        numbers = [[int(x) for x in values] for values in (extents, strides, box)]
        if int(address) % 16 or any(s % 16 or not s for s in numbers[1]) or any(not 0 < b <= 256 for b in numbers[2]):
            return 1, None
        block = ctypes.create_string_buffer(struct.pack("<Q5Q4Q5I", int(address), *numbers[0], *numbers[1], *numbers[2]), 128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(block))

    def _emulate(self, launched: Launched, parameters: int) -> None:
        assert (launched.grid[1:], launched.block[1:], launched.cluster) == ((1, 1), (1, 1), (1, 1, 1))
        block = ctypes.c_void_p(ctypes.c_void_p.from_address(parameters).value)
        if launched.name == "farm_repack":
            self._library.emulate_repack(block, min(launched.grid[0], 2), launched.block[0])
            return
        run = self._library.emulate_unaligned if launched.name.endswith("__unaligned") else self._library.emulate
        run(block, launched.grid[0], launched.block[0], 1)


SPEC = AttentionSpec(2, 1, 40, 72, 1, 70, 90, "bf16", (Rule.make("causal"),))


def load(
    spec: AttentionSpec, target: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[launch_cuda.CudaKernel, EmulatedDriver]:
    program = RuleAuthor().code(spec, target)
    tiles = {"BM": 64, "BN": 32}
    body = tuple(Constant(s.name, (tiles.get(s.name, s.choices[0]),)) if isinstance(s, Constant) else s for s in program.body)
    translated = translate(Program(program.name, program.stage, body), TARGETS[target])
    assert isinstance(translated, Translated)
    driver = EmulatedDriver(translated, folder)
    driver.install(monkeypatch)
    return launch_cuda.CudaKernel(translated.launch, b"cubin"), driver


@pytest.fixture(params=["sm_80", "sm_90a"])
def loaded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[launch_cuda.CudaKernel, EmulatedDriver]:
    return load(SPEC, request.param, tmp_path, monkeypatch)


def tensors(spec: AttentionSpec = SPEC) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)

    def make(heads: int, rows: int, d: int) -> torch.Tensor:
        return torch.randn((spec.batch, rows, heads, d), generator=g).bfloat16().transpose(1, 2)

    q, k, v = make(2, spec.seqlen_q, 40), make(1, spec.seqlen_k, 40), make(1, spec.seqlen_k, 72)
    o = torch.full((spec.batch, 2, spec.seqlen_q, 72), torch.nan, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": v, "o": o, "lse": torch.full((spec.batch, 2, spec.seqlen_q), torch.nan)}


def call(kernel: launch_cuda.CudaKernel, given: dict[str, torch.Tensor], spec: AttentionSpec = SPEC, stream: int = 0) -> None:
    binding = bind(kernel.launch, spec)
    kernel.call([given.get(t.name, given.get(t.role)) for t in binding.tensors], [s.value for s in binding.scalars], stream)


def assert_right(given: dict[str, torch.Tensor], spec: AttentionSpec = SPEC) -> None:
    expected = attention(spec, given)
    assert float((given["o"].double() - expected.out).norm()) <= 6e-3 * float(expected.out.norm())
    one_rounding = 2.0**-9  # of a weight in bf16, whose sums sm_80's programs take as rounded (`Option row_sums = rounded`)
    torch.testing.assert_close(given["lse"].double(), expected.lse, atol=one_rounding, rtol=1e-5)


def test_a_call_gives_the_right_values(loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    kernel, driver = loaded
    given = tensors()
    call(kernel, given, stream=77)
    assert_right(given)
    assert [(x.name, x.stream) for x in driver.launches] == [(kernel.launch.entry, 77)]
    call(kernel, given)  # the queue's counter was left at zero
    assert_right(given)


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same values in rows that begin at multiples of `by` elements and of no more."""
    pitch = -(-(tensor.shape[-1] + 2 * by) // (2 * by)) * 2 * by + by
    wide = torch.zeros(*tensor.shape[:-1], pitch, dtype=tensor.dtype)
    wide[..., by : by + tensor.shape[-1]] = tensor
    return wide[..., by : by + tensor.shape[-1]]


def test_rows_in_steps_of_an_element_are_copied_first(loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    """Pieces of 2 bytes are slower than a copy. What then is left decides the entry point; an output is written where it lies."""
    kernel, driver = loaded
    given = tensors()
    given |= {name: shifted(given[name], 1) for name in ("q", "o")}
    call(kernel, given)
    assert_right(given)
    assert [x.name for x in driver.launches] == ["farm_repack", kernel.launch.entry]
    given["k"] = shifted(given["k"], 2)
    call(kernel, given)
    assert_right(given)
    assert [x.name for x in driver.launches[2:]] == ["farm_repack", "farm_repack", kernel.launch.entry], "then all that has to be"


@pytest.mark.parametrize(("target", "most"), [("sm_90a", 512), ("sm_80", 640), ("sm_75", 1280)])
def test_operands_are_copied_first_where_every_matrix_is_long(target: str, most: int) -> None:
    """Pieces cost time with the product of queries and keys, a copy with their sum: with few queries pieces are faster."""
    spec = dataclasses.replace(SPEC, dtype="fp16")
    translated = translate(fill(code := RuleAuthor().code(spec, target), next(hole_choices(code))), TARGETS[target])
    assert isinstance(translated, Translated)
    for queries, keys, is_long in ((most, 9000, False), (most + 1, most + 1, True), (2, 9000, False), (9000, most, False)):
        given = []
        for t in translated.launch.tensors:
            rows = queries if t.name in ("Q", "O") else keys
            pitch = 44 if t.name in ("Q", "V") else 48
            given.append(RawTensor(0, (rows * pitch, rows * pitch, pitch, 1)[-t.ndim :], (1, 1, rows, 40)[-t.ndim :]))
        apart = misaligned(translated.launch, given)
        assert [translated.launch.tensors[i].name for i in apart] == ["Q", "V"]
        assert too_narrow(translated.launch, given) == (apart if is_long else []), (queries, keys)


@pytest.mark.parametrize("by", [2, 4])
def test_rows_that_begin_anywhere_are_read_where_they_lie(by: int, loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    """By the second entry point, without a copy; the kernel itself is launched where rows begin at multiples of 16 bytes."""
    kernel, driver = loaded
    given = tensors()
    given |= {name: shifted(given[name], by) for name in ("q", "k", "o")}
    call(kernel, given)
    assert_right(given)
    assert [x.name for x in driver.launches] == [f"{kernel.launch.entry}__unaligned"]
    aligned = tensors()
    call(kernel, aligned)
    assert driver.launches[-1].name == kernel.launch.entry
    assert torch.equal(aligned["o"], given["o"]), "the same arithmetic"


def test_expanded_operands_are_read_where_they_lie(loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    """Tensor maps take no stride of 0: a kernel with maps has them read by its second entry point, another by itself."""
    kernel, driver = loaded
    spec = dataclasses.replace(SPEC, batch=2)
    given = tensors(spec)
    given["k"] = given["k"][:1].expand(given["k"].shape)
    call(kernel, given, spec)
    assert_right(given, spec)
    wanted = "__unaligned" if kernel.launch.target_facts["tensor_maps"] else ""
    assert [x.name for x in driver.launches] == [kernel.launch.entry + wanted]


def test_keys_that_end_inside_their_tensor_in_rows_that_begin_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a padding mask only the device knows how many keys there are."""
    spec = dataclasses.replace(SPEC, masks=(Rule.make("padding"),))
    kernel, _ = load(spec, "sm_90a", tmp_path, monkeypatch)
    given = tensors(spec) | {"KvLen": torch.full((spec.batch,), spec.seqlen_k - 5, dtype=torch.int32)}
    for by in (1, 2):
        moved = given | {"k": shifted(given["k"], by)}
        call(kernel, moved, spec)
        assert_right(moved, spec)


def test_an_output_may_be_left_out(loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    kernel, _ = loaded
    given = tensors()
    lse = given.pop("lse")
    call(kernel, given)
    assert torch.isnan(lse).all() and not torch.isnan(given["o"]).any()
    with pytest.raises(LaunchError, match="Q: expected a tensor"):
        call(kernel, {n: t for n, t in given.items() if n != "q"})


def test_empty_calls(loaded: tuple[launch_cuda.CudaKernel, EmulatedDriver]) -> None:
    """No queries: nothing is launched. No keys: zeros, and LSE -inf."""
    from dataclasses import replace

    kernel, driver = loaded
    none = replace(SPEC, seqlen_q=0)
    call(kernel, tensors(none), none)
    assert driver.launches == []
    keyless = replace(SPEC, seqlen_k=0)
    given = tensors(keyless)
    call(kernel, given, keyless)
    assert (given["o"] == 0).all() and (given["lse"] == -torch.inf).all()
