"""What emitted mma.sync kernels compute, run on the CPU by the emulator, against dense float64 attention."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_emulation import run_emulated
from dense_attention import ROUND, attention, random_call

from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from generator.targets import TARGETS
from generator.tl.ir import Constant, Hint, Program
from generator.tl.parser import parse_or_raise
from generator.translate import translate
from generator.translate.records import Translated
from verifier.checks import Outputs, check_outputs
from verifier.cuda_arguments import evaluate
from verifier.inputs import Case
from verifier.trial import make_trial

#: Of LSE: on sm_80 the row sums of bf16 are sums of rounded weights.
LSE_LIMIT = {"fp16": 2e-5, "bf16": 2.0**-8}
PROGRAMS = Path(__file__).parents[1] / "programs" / "valid"
pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"), pytest.mark.slow]


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values that the dtype holds exactly, as its bits."""
    if dtype == "fp16":
        return np.ascontiguousarray(x, dtype=np.float16).view(np.uint16)
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    return (
        x.view(np.float16).astype(np.float64)
        if dtype == "fp16"
        else (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    )


def kernel(spec: AttentionSpec, target: str, tiles: dict[str, int], **hints: str) -> Translated:
    program = RuleAuthor().code(spec, target)
    body = [Constant(s.name, (tiles.get(s.name, s.choices[0]),)) if isinstance(s, Constant) else s for s in program.body]
    hinted = (*(Hint(name, value) for name, value in hints.items()), *body)
    translated = translate(Program(program.name, program.stage, hinted), TARGETS[target])
    assert isinstance(translated, Translated), translated
    return translated


def at_odd_multiples(array: np.ndarray, by: int) -> np.ndarray:
    """The same elements in rows that begin at odd multiples of `by` elements from an address of 16 bytes."""
    pitch = -(-(array.shape[-1] + 2 * by) // (2 * by)) * 2 * by + by
    room = np.full(array[..., 0].size * pitch + 16, 0x7EEE, array.dtype)
    first = (-room.ctypes.data % 16) // array.itemsize
    wide = room[first : first + array[..., 0].size * pitch].reshape(*array.shape[:-1], pitch)
    wide[..., by : by + array.shape[-1]] = array
    return wide[..., by : by + array.shape[-1]]


def run(
    translated: Translated,
    spec: AttentionSpec,
    call: dict[str, np.ndarray],
    folder: Path,
    moved: Mapping[str, int] | None = None,
    seed: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """moved: tensors whose rows begin at odd multiples of so many elements. seed: of the order in which warps take turns."""
    binding = bind(translated.launch, spec)
    arrays = {}
    for t in binding.tensors:
        if t.role in ("q", "k", "v"):
            arrays[t.name] = encode(call[t.name], spec.dtype)
        elif t.role == "o":
            arrays[t.name] = np.full(t.shape, 0x7FFF, np.uint16)
        elif t.role == "lse":
            arrays[t.name] = np.full(t.shape, np.nan, np.float32)
        else:
            arrays[t.name] = np.ascontiguousarray(call[t.name], dtype=np.int32 if t.dtype == "i32" else np.float32)
    arrays |= {name: at_odd_multiples(arrays[name], by) for name, by in (moved or {}).items()}
    run_emulated(translated, arrays, binding.values, folder, seed)
    if moved and (wide := arrays["O"].base) is not None:
        between = np.count_nonzero(wide == 0x7EEE)
        assert between >= wide.size - arrays["O"].size
    return decode(np.ascontiguousarray(arrays["O"]), spec.dtype), arrays["LSE"]


def check(spec: AttentionSpec, target: str, folder: Path, tiles: dict[str, int], **hints: str) -> None:
    call = random_call(spec)
    found, found_lse = run(kernel(spec, target, tiles, **hints), spec, call, folder)
    expected, lse = attention(spec, call)
    assert np.isfinite(found).all()
    limit = 6e-3 if spec.dtype == "bf16" else 1.5e-3
    assert np.linalg.norm(found - expected) <= limit * max(np.linalg.norm(expected), 1e-30)
    assert np.array_equal(np.isneginf(lse), np.isneginf(found_lse))
    seen = np.isfinite(lse)
    rounded = target == "sm_80" and spec.dtype == "bf16"
    np.testing.assert_allclose(found_lse[seen], lse[seen], atol=LSE_LIMIT[spec.dtype] if rounded else 2e-5, rtol=2e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what is compiled here, by its content: a kernel that several tests call is compiled once."""
    return tmp_path_factory.mktemp("emulated")


def spec(
    dtype: str,
    rows: int,
    keys: int,
    dims: tuple[int, int] = (32, 32),
    masks: tuple[Rule, ...] = (),
    scores: tuple[Rule, ...] = (),
) -> AttentionSpec:
    return AttentionSpec(2, 1, *dims, 1, rows, keys, dtype, masks, scores)  # type: ignore[arg-type]


CAUSAL = (Rule.make("causal"),)


@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_odd_head_dims_and_ragged_lengths(target: str, folder: Path) -> None:
    """D 40 and DV 72 are padded inside; rows that see nothing; two warps share the rows."""
    for rows, keys in ((45, 70), (70, 33)):
        check(spec("fp16", rows, keys, (40, 72), CAUSAL), target, folder, {"BM": 32, "BN": 32}, warps="2")


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_rows_that_begin_anywhere(target: str, folder: Path) -> None:
    """Q, V and O at odd multiples of 1, 2 and 4 elements, K at multiples of 16 bytes; what lies between the rows of O stays."""
    tiles = {"BM": 64, "BN": 32} if target == "sm_90a" else {"BM": 32, "BN": 32}
    of = spec("fp16", 45, 70, (40, 72), CAUSAL)
    call, translated = random_call(of), kernel(of, target, tiles)
    assert "__unaligned" in translated.launch.target_facts["unaligned"]["entry"]
    plain = run(translated, of, call, folder)
    for by in (1, 2, 4):
        moved = run(translated, of, call, folder, {"Q": by, "V": by, "O": by})
        for x, y in zip(plain, moved, strict=True):
            np.testing.assert_array_equal(x, y)
    expected, _ = attention(of, call)
    assert np.linalg.norm(plain[0] - expected) <= 1.5e-3 * np.linalg.norm(expected)


def test_the_four_warps_that_copy_may_come_in_any_order(folder: Path) -> None:
    """Where all of them waited for consumers to take the next tile of the grid, one that came late waited for ever."""
    of = spec("fp16", 150, 40, masks=CAUSAL)
    call, translated = random_call(of), kernel(of, "sm_90a", {"BM": 64, "BN": 32})
    plain = run(translated, of, call, folder)
    for seed in range(1, 13):
        moved = run(translated, of, call, folder, {"K": 1}, seed)
        np.testing.assert_array_equal(plain[0], moved[0])


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_rows_that_end_inside_a_chunk(target: str, folder: Path) -> None:
    """A product over 35 columns: what lies behind a row's last element is neither read nor counted."""
    text = re.sub(r"B([MNK]) = \d+", r"B\1 = 64", (PROGRAMS / "gemm.tl").read_text())
    dtype = "fp16" if target == "sm_75" else "bf16"
    translated = translate(parse_or_raise(text.replace("bf16", "f16") if dtype == "fp16" else text), TARGETS[target])
    assert isinstance(translated, Translated), translated
    rng = np.random.default_rng(1)
    a, b = (encode(rng.standard_normal((n, 35)).astype(np.float32), dtype) for n in (70, 50))
    expected = decode(a, dtype) @ decode(b, dtype).T
    for by in (1, 2, 4):
        arrays = {"A": a, "B": b, "C": np.full((70, 50), 0x7FFF, np.uint16)}
        arrays = {name: at_odd_multiples(array, by) for name, array in arrays.items()}
        run_emulated(translated, arrays, {"M": 70, "N": 50, "Kdim": 35}, folder)
        found = decode(np.ascontiguousarray(arrays["C"]), dtype)
        assert np.linalg.norm(found - expected) <= 6e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "masks, scores",
    [
        ((Rule.make("sink_window", sink=3, left=9),), (Rule.make("sink_logit"),)),
        ((Rule.make("document"),), ()),
        ((Rule.make("causal"), Rule.make("padding")), (Rule.make("softcap", cap=3.0), Rule.make("alibi"))),
    ],
    ids=["sink_window", "document", "padding"],
)
def test_masks_and_scores(masks: tuple[Rule, ...], scores: tuple[Rule, ...], folder: Path) -> None:
    """Gaps between visible tiles, bounds read row by row, captured scalars and vectors."""
    check(spec("bf16", 50, 90, masks=masks, scores=scores), "sm_80", folder, {"BM": 32, "BN": 16}, warps="1")


def test_stages_and_operands_in_registers(folder: Path) -> None:
    """Copies run three places ahead of their readers; Q stays in registers, or is read in every iteration."""
    for resident in ("on", "off"):
        check(spec("bf16", 40, 100, masks=CAUSAL), "sm_80", folder, {"BM": 32, "BN": 16}, stages="2", resident=resident)


ORDERS: dict[str, dict[str, str]] = {
    "rotated": {}, "one slot": {"stages": "1"}, "three slots": {"stages": "3", "resident": "on"},
    "turns": {"pingpong": "on"}, "turns, three slots": {"pingpong": "on", "stages": "3"}, "program order": {"rotate": "off"},
}  # fmt: skip


@pytest.mark.parametrize("hints", ORDERS.values(), ids=ORDERS)
def test_orders_of_products_and_other_code(hints: dict[str, str], folder: Path) -> None:
    """Products an iteration ahead, two groups of warps in turn, or as the program has them; edges on both sides, no key."""
    for masks, rows, keys in (((Rule.make("window", left=20),), 70, 60), (CAUSAL, 40, 20)):
        check(spec("bf16", rows, keys, masks=masks), "sm_80", folder, {"BM": 64, "BN": 16}, warps="4", **hints)


def hostile(of: AttentionSpec, case: str) -> dict[str, np.ndarray]:
    """Inputs whose references have to move late, often, or never: keys are run from the last to the first."""
    call, keys = random_call(of), np.arange(of.seqlen_k)[None, None, :, None]
    match case:
        case "ever larger":
            call["K"] = call["K"] * (1 + (of.seqlen_k - keys) / 4.0)
        case "one key above all":
            call["K"] = np.where(keys == 5, 60.0 * call["K"], call["K"])
        case "beyond 2^128 at once":
            call["Q"], call["K"] = np.abs(call["Q"]), np.where(keys < 7, 300.0, -300.0) * np.abs(call["K"])
        case "far below 0":
            call["Q"], call["K"] = np.abs(call["Q"]), -60.0 * np.abs(call["K"])
    return call | {name: ROUND["bf16"](call[name]) for name in "QK"}


@pytest.mark.parametrize("case", ["ever larger", "one key above all", "beyond 2^128 at once", "far below 0"])
@pytest.mark.parametrize("hints", [{}, {"rotate": "off"}], ids=["rotated", "program order"])
def test_references_move_where_a_weight_reaches_two(case: str, hints: dict[str, str], folder: Path) -> None:
    """Right for all inputs; with maxima in every tile as well; and wrong where nobody looks at the weights."""
    of = spec("bf16", 70, 100, masks=CAUSAL)
    call, translated = hostile(of, case), kernel(of, "sm_80", {"BM": 32, "BN": 16}, **hints)
    expected, lse = attention(of, call)
    looks = "return (seen & 0x40004000u) != 0;"
    assert translated.source.count(looks) == 1
    for instead in (looks, "return true;", "return false;"):
        altered = replace(translated, source=translated.source.replace(looks, instead))
        out, found_lse = run(altered, of, call, folder)
        right = bool(np.linalg.norm(out - expected) <= 6e-3 * np.linalg.norm(expected))
        if instead != "return false;":
            assert right
            np.testing.assert_allclose(found_lse, lse, atol=LSE_LIMIT["bf16"], rtol=2e-6)
        elif case == "beyond 2^128 at once":
            assert not right


@pytest.mark.parametrize(
    "l2_bytes, sections", [(0, (1, 10)), (20_000, (3, 3)), (1 << 30, (10, 1))], ids=["one each", "3 + 3 + 4", "all"]
)
def test_blocks_are_taken_in_sections(
    l2_bytes: int, sections: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile of five heads and two batches is computed, in whichever order blocks take them; two tiles a head.

    Blocks announce the tiles of the one that takes their place; what lies outside is not touched.
    """
    monkeypatch.setattr("generator.translate.cuda.tile_order.section_bytes", lambda *_: l2_bytes)
    of = AttentionSpec(5, 5, 32, 32, 2, 40, 40, "bf16", CAUSAL)
    translated = kernel(of, "sm_80", {"BM": 32, "BN": 16})
    values, fields = bind(translated.launch, of).values, translated.launch.target_facts["parameters"]["fields"]
    assert tuple(evaluate(f["value"], values) for f in fields if "value" in f)[:2] == sections
    check(of, "sm_80", folder, {"BM": 32, "BN": 16}, announce="on")


def test_very_negative_logits_are_judged_right(folder: Path) -> None:
    """Scores near -1e5, a weight near 1 in most rows: the product of maximum and scale is rounded, and with it that weight."""
    of = spec("fp16", 40, 70, masks=CAUSAL)
    for seed in (1, 7):
        trial = make_trial(Case("very negative logits", of, values="negative", seed=seed))
        call = {n: trial.values[n.lower()].float().numpy() for n in "QKV"}
        out, lse = run(kernel(of, "sm_80", {"BM": 32, "BN": 32}), of, call, folder)
        outputs = Outputs(torch.from_numpy(out).half(), torch.from_numpy(lse), {})
        assert check_outputs(outputs, trial.expected) is None


@pytest.mark.parametrize("values", ["large", "negative", "dominant", "equal", "ramp"])
def test_hostile_values_without_maxima_are_judged_right(values: str, folder: Path) -> None:
    """Weights looked at instead of scores, row sums of rounded weights: LSE too stays within the verifier's limits."""
    of = spec("bf16", 60, 150, masks=CAUSAL)
    trial = make_trial(Case(values, of, values=values, seed=1))  # type: ignore[arg-type]
    call = {n: trial.values[n.lower()].float().numpy() for n in "QKV"}
    out, lse = run(kernel(of, "sm_80", {"BM": 32, "BN": 16}), of, call, folder)
    assert check_outputs(Outputs(torch.from_numpy(out).bfloat16(), torch.from_numpy(lse), {}), trial.expected) is None


def test_unaligned_outputs_are_written_element_by_element(folder: Path) -> None:
    """An output row of 34 bytes more than a multiple of 16; nothing beside it is touched."""
    s = spec("bf16", 20, 20)
    translated, call = kernel(s, "sm_80", {"BM": 32, "BN": 32}), random_call(s)
    wide = np.full((1, 2, 20, 33), 0x7FFF, np.uint16)
    arrays = {n: encode(call[n], "bf16") for n in "QKV"} | {"O": wide[..., :32], "LSE": np.zeros((1, 2, 20), np.float32)}
    run_emulated(translated, arrays, bind(translated.launch, s).values, folder)
    expected, _ = attention(s, call)
    assert np.linalg.norm(decode(wide[..., :32].copy(), "bf16") - expected) <= 6e-3 * np.linalg.norm(expected)
    assert (wide[..., 32] == 0x7FFF).all()


@pytest.mark.parametrize(
    "masks, scores, tiles, hints",
    [
        (CAUSAL, (), {"BM": 128, "BN": 32}, {}),  # two warpgroups out of step
        ((Rule.make("sink_window", sink=3, left=20),), (Rule.make("sink_logit"),), {"BM": 64, "BN": 16}, {"stages": "1"}),
        ((Rule.make("padding"),), (), {"BM": 64, "BN": 48}, {"order": "static"}),  # keys end inside their tensor
        ((Rule.make("document"),), (), {"BM": 64, "BN": 32}, {"rotate": "off"}),
        ((), (Rule.make("alibi"),), {"BM": 192, "BN": 16}, {"pingpong": "off"}),
        (CAUSAL, (), {"BM": 192, "BN": 32}, {"resident": "off"}),  # warpgroups that see nothing at first, or have no rows
        ((Rule.make("window", left=40),), (), {"BM": 128, "BN": 16}, {"ahead": "off", "pingpong": "on"}),
    ],
    ids=["causal", "sink_window", "padding", "document", "full", "three", "window"],
)
def test_wgmma(
    masks: tuple[Rule, ...], scores: tuple[Rule, ...], tiles: dict[str, int], hints: dict[str, str], folder: Path
) -> None:
    """Producer and consumers, rings, tensor maps, products that run late; head sizes that fill no chunk of 64."""
    check(spec("bf16", 150, 130, (40, 72), masks, scores), "sm_90a", folder, tiles, **hints)


def test_wgmma_with_nothing_to_see(folder: Path) -> None:
    """No keys, fewer keys than queries, one row: blocks that run one masked tile."""
    for rows, keys in ((3, 0), (100, 20), (1, 1)):
        check(spec("fp16", rows, keys, masks=CAUSAL), "sm_90a", folder, {"BM": 64, "BN": 32})
