"""CUDA compiles on a machine without a GPU: resources, instructions, the cache, failures as values."""

from __future__ import annotations

import re
import resource
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from generator.targets import TARGETS
from generator.tl.parser import parse_or_raise
from generator.translate import translate
from generator.translate.records import Translated
from verifier.children import Limits
from verifier.compile import compile_translated
from verifier.compile_cuda import EXPECTED, _warnings, compile_cuda, find_nvdisasm, resources_of
from verifier.records import Binary, CompileFailed

pytestmark = pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings and NVRTC")
PROGRAMS = Path(__file__).parents[1] / "programs" / "valid"
LIMITS = Limits(wall_s=200)


def translated(name: str, target: str, **constants: int) -> Translated:
    text = (PROGRAMS / f"{name}.tl").read_text()
    text = text.replace("bf16", "f16") if target == "sm_75" else text
    for constant, value in constants.items():
        text = re.sub(rf"\b{constant} = \d+", f"{constant} = {value}", text, count=1)
    out = translate(parse_or_raise(text), TARGETS[target])
    assert isinstance(out, Translated), out
    return out


#: Sane tiles of each target: no register may be spilled, and the tensor instructions have to be there.
SANE = [
    ("attention", "sm_75", {"BM": 128, "BN": 32}, ("HMMA.1688",)),
    ("attention", "sm_80", {"BM": 128, "BN": 64, "D": 64, "DV": 64}, ("HMMA.16816", "LDGSTS")),
    ("gemm", "sm_80", {"BM": 128, "BN": 128, "BK": 32}, ("HMMA.16816", "LDGSTS")),
    ("attention", "sm_90a", {"BM": 128, "BN": 128}, ("HGMMA", "UTMALDG")),
]


@pytest.mark.parametrize("name, target, tiles, wanted", SANE, ids=[f"{n}-{t}" for n, t, *_ in SANE])
def test_sane_tiles_spill_nothing(name: str, target: str, tiles: dict[str, int], wanted: tuple[str, ...], tmp_path: Path) -> None:
    binary = compile_cuda(translated(name, target, **tiles), tmp_path, LIMITS)
    assert isinstance(binary, Binary), binary
    found = binary.resources
    assert found["spill_bytes"] == found["local_bytes"] == 0 and 0 < found["registers"] <= 255, found
    assert found["shared_bytes"] <= TARGETS[target].shared_bytes
    second = found["unaligned"]
    assert second["entry"].endswith("__unaligned") and second["spill_bytes"] == second["local_bytes"] == 0, second
    assert 0 < second["registers"] <= 255 and second["shared_bytes"] <= TARGETS[target].shared_bytes
    if find_nvdisasm() is not None:
        assert all(found["instructions"].get(w) for w in wanted), found["instructions"]
        assert found["warnings"] == []
        assert not found["instructions"].get("STL") and not found["instructions"].get("LDL")


def test_both_entry_points_are_in_the_resources_and_either_may_warn(tmp_path: Path) -> None:
    source, cubin = translated("gemm", "sm_80", BM=64, BN=64, BK=32), tmp_path / "kernel.cubin"
    cubin.write_bytes(b"no machine code")
    log = "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_80'\n"
        f"ptxas         .     {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
        for name, stack, stores, loads, registers in (
            ("tl_gemm__unaligned", 24, 8, 12, 255), ("farm_repack", 0, 0, 0, 40), ("tl_gemm", 0, 0, 0, 128),
        )
    )  # fmt: skip
    found = resources_of(log, source, cubin)
    assert (found["registers"], found["spill_bytes"], found["local_bytes"]) == (128, 0, 0)
    shared = source.launch.target_facts["unaligned"]["shared_bytes"]
    wanted = {"entry": "tl_gemm__unaligned", "registers": 255, "spill_bytes": 20, "local_bytes": 24, "shared_bytes": shared}
    assert found["unaligned"] == wanted
    assert found["warnings"] == [
        "20 bytes of registers spilled in calls whose rows do not begin at 16 bytes: choose smaller tiles"
    ]
    alone = resources_of(log[log.index("Compiling entry function 'tl_gemm' ") :], source, cubin)
    assert "unaligned" not in alone and alone["warnings"] == []


def test_exponentials_run_under_the_second_product(tmp_path: Path) -> None:
    """sm_90a: of each steady loop, row maxima and the first exponentials stand between the wait for S and that for the output."""
    from verifier.compile_cuda import disassemble

    binary = compile_cuda(translated("attention", "sm_90a", BM=128, BN=64), tmp_path, LIMITS)
    assert isinstance(binary, Binary)
    copy = tmp_path / "kernel.cubin"
    copy.write_bytes(Path(binary.path).read_bytes())
    if (text := disassemble(copy)) is None:
        pytest.skip("no disassembler")
    counts, inside = [], None
    for line in text.splitlines():
        if "WARPGROUP.DEPBAR" in line:
            if ", 0x1" in line:
                inside = Counter()
            elif inside is not None:
                counts.append(inside)
                inside = None
        elif inside is not None:
            inside.update(x for x in ("MUFU.EX2", "FMNMX") if x in line)
    loops = [c for c in counts if c["FMNMX"]]  # not the end of a tile, where only the next one's first products run
    assert loops and min(c["FMNMX"] for c in loops) >= 32 and min(c["MUFU.EX2"] for c in loops) >= 4, counts


def test_a_hopper_attention_kernel_compiles_in_seconds_of_one_core(tmp_path: Path) -> None:
    """CPU seconds of the compiler's child and everything below it: a busy machine makes the clock on the wall useless."""
    took = []
    for attempt in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        binary = compile_cuda(translated("attention", "sm_90a", BM=128, BN=128), tmp_path / str(attempt), LIMITS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert isinstance(binary, Binary) and "D = 128" in (PROGRAMS / "attention.tl").read_text()
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took[-1] < 6:
            break
    assert min(took) < 6, took


def test_binaries_are_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = translated("gemm", "sm_80", BM=64, BN=64, BK=32)
    first = compile_translated(source, tmp_path, LIMITS)
    with monkeypatch.context() as nothing_runs:
        nothing_runs.setattr("verifier.compile_cuda.run_limited", lambda *a, **k: pytest.fail("compiled again"))
        again = compile_translated(source, tmp_path, LIMITS)
    assert isinstance(first, Binary) and again == first
    other = compile_cuda(source, tmp_path, LIMITS, arch="sm_90")
    assert isinstance(other, Binary) and other.hash != first.hash and "-arch=sm_90" in other.flags


def test_failures_are_values(tmp_path: Path) -> None:
    good = translated("gemm", "sm_80", BM=64, BN=64, BK=32)
    broken = compile_cuda(replace(good, source=good.source.replace("copy_commit();", "no_such_function();")), tmp_path, LIMITS)
    assert isinstance(broken, CompileFailed) and broken.reason == "compile_error" and "no_such_function" in broken.log
    late = compile_cuda(replace(good, source=good.source + "\n"), tmp_path, Limits(wall_s=0.2))
    assert isinstance(late, CompileFailed) and late.reason == "compile_timeout"
    assert not list((tmp_path / "tmp").iterdir()), "nothing is left behind"


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_a_missing_tensor_instruction_is_a_warning_where_there_are_products(target: str) -> None:
    tiles = {"BM": 128, "BN": 32} if target == "sm_75" else {"BM": 128, "BN": 64}
    without = {"instructions": {"FFMA": 900}}
    assert _warnings(without, translated("attention", target, **tiles)) == [f"no {name} instruction" for name in EXPECTED[target]]
    assert _warnings({}, translated("attention", target, **tiles)) == []  # no disassembler: nothing is known
    sums = replace(translated("attention", "sm_80", BM=128, BN=64), source="constexpr int MT = 2;\nvoid rows() {}")
    assert _warnings(without, sums) == []
