"""Public faults of attention kernels, tried on compiled kernels: values known by hand, memory that bites.

The programs are the rule author's, the code is the CPU translator's, and each is called in this process. Each test names the
report that it comes from. "Q = 0" means that the weights are uniform over what a row may see.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.scores import alibi_slopes
from generator.spec import AttentionSpec, Rule
from generator.targets import CPU_TARGETS
from generator.tl.fill import fill
from generator.translate import translate
from generator.translate.records import Translated
from verifier.compile import compile_translated
from verifier.environment import isa_levels
from verifier.input_layout import call_view, slots_of
from verifier.inputs import Case
from verifier.judge import read_binary
from verifier.launch import CpuKernel, RawTensor, load_cpu

INF = math.inf
BR, TL, PADDING = Rule.make("causal"), Rule.make("causal", align="top_left"), Rule.make("padding")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


#: Named by content, so that tests may share it and a second run compiles nothing.
CACHE = Path(os.environ.get("FARM_TEST_CACHE", tempfile.gettempdir())) / f"farm-test-kernels-{os.getuid()}"


@pytest.fixture(scope="session")
def kernel_for():
    """One compiled kernel for each family of specs: lengths, head counts and numbers are arguments."""

    @functools.lru_cache(maxsize=64)
    def build(family: str, spec: AttentionSpec) -> CpuKernel:
        target = CPU_TARGETS[next(level for level in isa_levels() if level in CPU_TARGETS)]
        code = RuleAuthor().code(spec, "cpu")
        program = fill(code, {name: hole.choices[0] for name, hole in code.holes.items()})
        translated = translate(program, target)
        assert isinstance(translated, Translated), translated
        return load_cpu(read_binary(compile_translated(translated, CACHE)), translated.launch, num_threads=2)

    families: dict[str, AttentionSpec] = {}
    return lambda spec: build(spec.family_hash, families.setdefault(spec.family_hash, spec))


@pytest.fixture(scope="session")
def attend(kernel_for):
    """O and LSE of (seqlen, dim) matrices or (heads, seqlen, dim) tensors of one batch entry."""

    def call(q, k, v, masks=(), scores=(), scale=1.0, dtype="fp32", **captured):
        q, k, v = (torch.as_tensor(x).to(DTYPES[dtype]) for x in (q, k, v))
        q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
        sizes = (len(q), len(k), q.shape[2], v.shape[2], 1, q.shape[1], k.shape[1])
        spec = AttentionSpec(*sizes, dtype=dtype, masks=masks, scores=scores, softmax_scale=scale)
        tensors = {"q": q[None], "k": k[None], "v": v[None]}
        return run(kernel_for(spec), spec, tensors | {name: torch.as_tensor(x) for name, x in captured.items()})

    return call


def run(kernel: CpuKernel, spec: AttentionSpec, tensors: dict[str, torch.Tensor]):
    binding = bind(kernel.launch, spec)
    out = torch.full((spec.batch, spec.num_heads, spec.seqlen_q, spec.head_dim_v), math.nan, dtype=DTYPES[spec.dtype])
    lse = torch.full(out.shape[:3], math.nan)
    given = {**tensors, "o": out, "lse": lse}
    kernel.call([given[t.name if t.role == "captured" else t.role] for t in binding.tensors], [s.value for s in binding.scalars])
    return out[0].float(), lse[0]


def filled(values, dim=16):
    """One row for each value, filled with it."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(len(values), dim).contiguous()


def zeros(rows, dim=16):
    return torch.zeros(rows, dim)


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "v", "out", "lse"),
    [
        (BR, 2, [1, 2, 3, 4, 5], [2.5, 3.0], [math.log(4), math.log(5)]),
        (TL, 2, [1, 2, 3, 4, 5], [1.0, 1.5], [0, math.log(2)]),
        (BR, 5, [1, 3], [0, 0, 0, 1, 2], [-INF, -INF, -INF, 0, math.log(2)]),
        (TL, 5, [1, 3], [1, 2, 2, 2, 2], [0, *[math.log(2)] * 4]),
    ],
)
def test_causal_with_unequal_lengths(attend, mask, seqlen_q, v, out, lse):
    """Dao-AILab/flash-attention#1778; NVIDIA/cutlass#2336."""
    got_out, got_lse = attend(zeros(seqlen_q), zeros(len(v)), filled(v), (mask,))
    assert got_out[0, :, 0].tolist() == pytest.approx(out) and got_lse[0].tolist() == pytest.approx(lse, abs=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scores_below_a_finite_minus_infinity(attend, dtype):
    """flashinfer-ai/flashinfer#4267, #4450."""
    out, lse = attend(torch.full((1, 16), 64.0), torch.full((2, 16), -64.0), filled([1, 1]), dtype=dtype)
    assert bool((out == 1).all()) and lse.item() == pytest.approx(-65536 + math.log(2), abs=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rubbish", [math.nan, INF])
def test_rubbish_beyond_a_length_changes_no_bit(attend, rubbish, dtype):
    """Dao-AILab/flash-attention#2374; flashinfer-ai/flashinfer#941: a weight of zero times NaN."""
    clean, dirty = ([*range(1, 14), *[x] * 3] for x in (0.0, rubbish))
    k = torch.zeros(16, 16)
    k[13:] = rubbish
    expected = attend(zeros(1), zeros(16), filled(clean), (PADDING,), dtype=dtype, KvLen=torch.tensor([13], dtype=torch.int32))
    got = attend(zeros(1), k, filled(dirty), (PADDING,), dtype=dtype, KvLen=torch.tensor([13], dtype=torch.int32))
    assert got[0][0, 0, 0].item() == pytest.approx(7) and got[1].item() == pytest.approx(2.5649, abs=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sequences_of_length_zero(attend):
    """Dao-AILab/flash-attention#2842: an empty sequence wrote into another one's LSE."""
    out, lse = attend(zeros(1), zeros(5), filled([1, 2, 3, 4, 5]), (PADDING,), KvLen=torch.tensor([0], dtype=torch.int32))
    assert bool((out == 0).all()) and lse.item() == -INF


@pytest.mark.parametrize("seqlen_q", [1, 32, 33, 65])
def test_lengths_around_the_tile(attend, seqlen_q):
    """pytorch/pytorch#159247."""
    for seqlen_k in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        out, lse = attend(zeros(seqlen_q), zeros(seqlen_k), filled(list(range(seqlen_k))))
        torch.testing.assert_close(out, torch.full_like(out, (seqlen_k - 1) / 2), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen_k)), rtol=1e-6, atol=1e-5)


def test_offsets_beyond_31_bits_and_wrapped_memory_that_bites(kernel_for):
    """pytorch/pytorch#190857; vllm-project/vllm#50427: token 2 lies at offset 2147483776, which int32 wraps to -2147483520."""
    spec = AttentionSpec(1, 1, 16, 16, 1, 1, 3, dtype="fp16", softmax_scale=1.0)
    kernel, stride = kernel_for(spec), (1 << 30) + 64
    handle = os.memfd_create("sparse")
    os.ftruncate(handle, 2 * stride * 2 + 4096)
    with mmap.mmap(handle, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        values = np.frombuffer(memory, np.float16)
        for token, value in enumerate((1, 2, 6)):
            values[token * stride : token * stride + 16] = value
        assert os.fstat(handle).st_blocks * 512 < 1 << 20, "the file is sparse"
        q, out, lse = (
            torch.zeros(1, 1, 1, 16, dtype=torch.float16),
            torch.zeros(1, 1, 1, 16, dtype=torch.float16),
            torch.zeros(1, 1, 1),
        )
        far = RawTensor(values.ctypes.data, (stride * 3, stride * 3, stride, 1))
        given = {"q": q, "k": far, "v": far, "o": out, "lse": lse}
        binding = bind(kernel.launch, spec)
        # K as V too: with Q = 0 the weights are uniform whatever K holds
        kernel.call([given[t.role] for t in binding.tensors], [s.value for s in binding.scalars])
        del values
    os.close(handle)
    assert bool((out == 3).all()), out


def test_strided_views_give_what_contiguous_tensors_give(kernel_for):
    """pytorch/pytorch#112577, #116333: (B, S, H, D) memory, a last axis with gaps refused, odd strides of axes of size 1."""
    spec = AttentionSpec(4, 2, 16, 16, 2, 19, 23, masks=(BR,))
    kernel, generator = kernel_for(spec), torch.Generator().manual_seed(0)
    shapes = {"q": (2, 19, 4, 16), "k": (2, 23, 2, 16), "v": (2, 23, 2, 16)}
    transposed = {name: torch.randn(shape, generator=generator).transpose(1, 2) for name, shape in shapes.items()}
    contiguous = {name: t.contiguous() for name, t in transposed.items()}
    expected, got = run(kernel, spec, contiguous), run(kernel, spec, transposed)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    gaps = torch.randn(2, 2, 23, 32, generator=generator)[..., ::2]
    with pytest.raises(ValueError, match="V: expected a last axis with stride 1, found stride 2"):
        run(kernel, spec, contiguous | {"v": gaps})
    one = AttentionSpec(4, 2, 16, 16, 1, 19, 23, masks=(BR,))
    odd = {name: torch.as_strided(t, (1, *t.shape[1:]), (12345, *t.stride()[1:])) for name, t in contiguous.items()}
    first = {name: t[:1].clone() for name, t in contiguous.items()}
    assert torch.equal(run(kernel, one, odd)[0], run(kernel, one, first)[0])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_and_bases_that_are_not_aligned(kernel_for, dtype):
    """vllm-project/vllm#41257; Jim137/qkan#26: D = 46, a pitch of 92 bytes, a view that starts one element into its storage."""
    spec = AttentionSpec(1, 1, 46, 46, 1, 3, 2, dtype=dtype)
    kernel = kernel_for(spec)
    slots = {s.name: s for s in slots_of(Case("odd", spec, layout="sliced"), bind(kernel.launch, spec))}
    assert slots["Q"].offset == 1 and call_view(slots["Q"], "standard", spec)[1][2] == 49

    def odd(*rows):
        storage = torch.full((1 + 46 * len(rows),), math.nan, dtype=DTYPES[dtype])
        view = storage[1:].view(1, 1, len(rows), 46)
        for i, value in enumerate(rows):
            view[0, 0, i] = value
        return view

    out, lse = run(kernel, spec, {"q": odd(0, 0, 0), "k": odd(5, -5), "v": odd(1, 3)})
    assert bool((out == 2).all()) and lse.flatten().tolist() == pytest.approx([math.log(2)] * 3, abs=1e-3)


def test_softcap_stands_before_the_mask_and_never_overflows(attend):
    """onnx/onnx#7865; vllm-project/vllm#56578."""
    cap2, cap50 = (Rule.make("softcap", cap=float(cap)) for cap in (2, 50))
    unit = torch.zeros(2, 16)
    unit[:, 0] = 1.0

    def keys(*scores):
        k = torch.zeros(len(scores), 16)
        k[:, 0] = torch.tensor(scores)
        return k

    assert attend(unit, keys(0.0, 3.0), filled([1, 101]), (TL,), (cap2,))[0][0, 0, 0].item() == 1.0
    out, lse = attend(unit[:1], keys(5000.0, 4990.0), filled([1, 3]), (), (cap50,))
    assert out[0, 0, 0].item() == pytest.approx(2.0) and lse.item() == pytest.approx(50.6931, abs=1e-4)
    out, lse = attend(unit[:1], keys(-5000.0, 0.0), filled([1, 3]), (), (cap50,))
    assert out[0, 0, 0].item() == pytest.approx(3.0) and lse.item() == pytest.approx(0.0, abs=1e-5)


def test_slopes_for_any_number_of_heads(attend):
    """ml-explore/mlx#343."""
    slopes = torch.tensor(alibi_slopes(6))
    assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    v = filled([0, 1])[None].expand(6, 2, 16)
    out, _ = attend(torch.zeros(6, 1, 16), torch.zeros(6, 2, 16), v, (BR,), (Rule.make("alibi"),), Slopes=slopes)
    assert out[[0, 4, 5], 0, 0].tolist() == pytest.approx([0.56218, 0.62246, 0.53121], abs=1e-5)


def test_one_dominant_key_among_many(attend):
    """sgl-project/sglang#6101: tame inputs hid a bug."""
    q, k, v = torch.zeros(1, 16), torch.zeros(4096, 16), torch.zeros(4096, 16)
    q[:, 0], k[7, 0], v[7] = 1.0, 30.0, 5.0
    assert attend(q, k, v)[0][0, 0, 0].item() == pytest.approx(5.0, abs=1e-5)


def test_memory_of_a_call_grows_with_the_length_not_its_square(kernel_for):
    """Scores of 8,192 x 8,192 would be 256 MiB; tiles, packed copies and threads' stacks are a few."""

    def peak_kib(reset: bool) -> int:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is held now
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    for dtype in ("fp32", "bf16"):
        spec = AttentionSpec(1, 1, 64, 64, 1, 8192, 8192, dtype=dtype, masks=(BR,))
        kernel = kernel_for(spec)
        tensors = {name: torch.ones(1, 1, 8192, 64, dtype=DTYPES[dtype]) for name in "qkv"}
        held = peak_kib(reset=True)
        run(kernel, spec, tensors)
        assert peak_kib(reset=False) - held < 48 << 10
