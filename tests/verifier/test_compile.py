"""Compiling: what a binary says of itself, how failures come back, and a cache that no writer and no kill can make wrong
(CASES 37).
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from generator.authors.rules import RuleAuthor
from generator.canonical import digest_bytes
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.tl.fill import fill, hole_choices
from generator.translate import translate
from generator.translate.records import Launch, ScalarParameter, TensorParameter, Translated
from verifier.children import Limits, run_limited
from verifier.compile import ISA_FLAGS, NoCompiler, compile_translated, find_compiler
from verifier.environment import cpu_flags
from verifier.judge import judge
from verifier.records import Binary, CompileFailed, Passed

BLOCK = """
#include <stdint.h>
typedef void (*farm_parallel)(void (*)(void*), void*, unsigned, unsigned);
struct FarmCall {
  void* const* tensors; const int64_t* strides; const int64_t* ints; const float* floats;
  farm_parallel parallel; int64_t num_threads;
};
"""
LAUNCH = Launch(
    "kernel",
    (TensorParameter("X", "f32", 0, 1, True),),
    (ScalarParameter("n", "i32", False), ScalarParameter("a", "f32", False)),
    {"isa": "baseline"},
)


def translated(body: str, launch: Launch = LAUNCH) -> Translated:
    return Translated("cpu", "c++", BLOCK + f'extern "C" int32_t kernel(const FarmCall* c) {{ {body} }}', launch, "p" * 64, {})


ADD = translated(
    "float* x = (float*)c->tensors[0]; for (int64_t i = 0; i < c->ints[0]; ++i) x[i * c->strides[0]] += c->floats[0]; return 0;"
)


def test_a_binary_names_its_bytes_and_comes_from_the_cache_the_second_time(tmp_path):
    first = compile_translated(ADD, tmp_path)
    assert isinstance(first, Binary)
    assert digest_bytes(Path(first.path).read_bytes()) == first.hash
    assert first.source_hash == ADD.hash and first.compiler == find_compiler().version
    before = os.stat(first.path).st_mtime_ns
    assert compile_translated(ADD, tmp_path) == first
    assert os.stat(first.path).st_mtime_ns == before


def test_flags_follow_the_instruction_set_and_make_another_entry(tmp_path):
    wide = translated("return 0;", Launch("kernel", LAUNCH.tensors, LAUNCH.scalars, {"isa": "avx512"}))
    binary = compile_translated(wide, tmp_path)
    assert isinstance(binary, Binary) and set(ISA_FLAGS["avx512"]) <= set(binary.flags)
    compile_translated(translated("return 0;"), tmp_path)
    assert len(list((tmp_path / "entries").rglob("*.json"))) == 2


def test_an_unknown_instruction_set_is_named(tmp_path):
    odd = translated("return 0;", Launch("kernel", (), (), {"isa": "sse9"}))
    with pytest.raises(ValueError, match="target_facts.isa: expected one of .*avx512.*found 'sse9'"):
        compile_translated(odd, tmp_path)


def test_imports_are_listed(tmp_path):
    binary = compile_translated(
        translated('extern "C" int system(const char*); return system("true");'.replace('extern "C"', "")), tmp_path
    )
    assert isinstance(binary, Binary) and any("system" in name for name in binary.resources["imports"])


def test_an_error_is_a_value_with_the_compilers_words(tmp_path):
    failed = compile_translated(translated("return undeclared_name;"), tmp_path)
    assert isinstance(failed, CompileFailed) and failed.reason == "compile_error" and "undeclared_name" in failed.log
    assert not list((tmp_path / "objects").rglob("*.so"))


def slow_source() -> Translated:
    """About 2^20 instantiations: far over any limit of a test, in time and in memory."""
    source = (
        "template<int D, int N> struct T { static constexpr int v = T<D-1,2*N>::v + T<D-1,2*N+1>::v; };"
        "template<int N> struct T<0,N> { static constexpr int v = 1; }; int x = T<24,1>::v;"
    )
    return Translated("cpu", "c++", source, LAUNCH, "p" * 64, {})


def test_a_slow_compile_is_killed_with_all_its_children(tmp_path):
    started = time.monotonic()
    failed = compile_translated(slow_source(), tmp_path, Limits(wall_s=1.0))
    assert isinstance(failed, CompileFailed) and failed.reason == "compile_timeout"
    assert time.monotonic() - started < 20
    until = time.monotonic() + 20
    while children_named("cc1plus") and time.monotonic() < until:
        time.sleep(0.05)
    assert not children_named("cc1plus")


def test_a_hungry_compile_is_told_apart(tmp_path):
    failed = compile_translated(slow_source(), tmp_path, Limits(wall_s=60, memory_bytes=200 << 20))
    assert isinstance(failed, CompileFailed) and failed.reason == "compile_oom", failed


def children_named(name: str) -> list[int]:
    import psutil

    return [p.pid for p in psutil.Process().children(recursive=True) if p.name() == name]


def test_a_killed_parent_takes_the_compiler_with_it(tmp_path):
    """Only the pipe that the parent held tells the child; no handler runs on SIGKILL."""
    script = "from verifier.children import *; run_limited(['/bin/sh','-c','echo $$ > %s; sleep 60; true'], Limits(60))" % (
        tmp_path / "pid"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FARM_CXX", raising=False)
    monkeypatch.setattr("verifier.compile.find_spec", lambda name: None)
    from verifier.compile import _probe

    _probe.cache_clear()
    with pytest.raises(NoCompiler, match="apt install g\\+\\+.*pip install ziglang.*FARM_CXX"):
        find_compiler()
    with pytest.raises(NoCompiler, match="FARM_CXX: 'no-such-compiler'"):
        find_compiler("no-such-compiler")
    _probe.cache_clear()


def test_a_changed_object_is_built_again(tmp_path):
    binary = compile_translated(ADD, tmp_path)
    data = bytearray(Path(binary.path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(binary.path).write_bytes(data)
    again = compile_translated(ADD, tmp_path)
    assert again.hash == binary.hash and digest_bytes(Path(again.path).read_bytes()) == binary.hash


def write_pairs(cache: Path, seed: int, rounds: int) -> None:
    """The cache's own writer, many times, without a compiler in between: source i always stands for the bytes that hold i."""
    from verifier.binary_cache import cache_key, read_entry, write_entry

    rng = random.Random(seed)
    for _ in range(rounds):
        i = rng.randrange(20)
        data = f"object {i} ".encode() * 500
        key = cache_key(f"source {i}", (), "test")
        found = read_entry(cache, key)
        if found is not None:
            assert Path(found.path).read_bytes() == data and found.source_hash == f"source {i}"
        if found is None or rng.random() < 0.5:
            write_entry(cache, key, Binary("", digest_bytes(data), f"source {i}", "cpu", "test", (), 0.0), data, ".so")


def test_eight_writers_some_killed_never_pair_a_source_with_another_binary(tmp_path):
    from verifier.binary_cache import cache_key, read_entry

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_pairs, args=(tmp_path, seed, 250)) for seed in range(8)]
    for writer in writers:
        writer.start()
    for victim in writers[:3]:
        time.sleep(0.05)
        victim.kill()
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers[3:]] == [0] * 5
    for i in range(20):
        found = read_entry(tmp_path, cache_key(f"source {i}", (), "test"))
        assert found is None or Path(found.path).read_bytes() == f"object {i} ".encode() * 500
    entries = [json.loads(p.read_text()) for p in (tmp_path / "entries").rglob("*.json") if not p.name.startswith(".")]
    assert entries and all(digest_bytes((tmp_path / e["path"]).read_bytes()) == e["hash"] for e in entries)


def test_compilers_at_once_on_one_cache(tmp_path):
    sources = [translated(f"return {i};") for i in (2, 3)]
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        results = pool.starmap(compile_translated, [(s, tmp_path) for s in sources * 3])
    assert len({r.hash for r in results}) == 2 and all(r.source_hash in {s.hash for s in sources} for r in results)


def test_a_folder_that_cannot_be_removed_does_no_harm(tmp_path, monkeypatch):
    import shutil

    def busy(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert isinstance(compile_translated(ADD, tmp_path), Binary)


def test_the_log_of_a_chatty_program_is_cut():
    ended = run_limited([sys.executable, "-c", "print('x' * 300000)"], Limits(20))
    assert ended.code == 0 and len(ended.log) < 70_000 and "[... cut ...]" in ended.log


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="no AVX2 here")
def test_the_compiler_of_ziglang_is_sound(tmp_path):
    """A kernel with vector code that it compiled passes every check that one of g++ has to pass."""
    pytest.importorskip("ziglang")
    spec = AttentionSpec(4, 2, 32, 32, 1, 70, 70, masks=(Rule.make("causal"),), scores=(Rule.make("softcap", cap=30.0),))
    target = find_target("cpu-avx2")
    code = RuleAuthor().code(spec, "cpu-avx2")
    made = translate(fill(code, next(hole_choices(code))), target)
    compiler = find_compiler(f"{sys.executable} -m ziglang c++")
    assert compiler.kind == "zig"
    binary = compile_translated(made, tmp_path, compiler=compiler)
    assert isinstance(binary, Binary), binary
    verdict = judge(binary, made.launch, spec)
    assert isinstance(verdict, Passed), verdict
