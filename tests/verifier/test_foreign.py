"""Native code of a model: the recorded CUDA answer compiles; source, includes and binaries that break a rule never get to run."""

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from recorded_cuda import device_source, launch_text

from generator.authors.answers import extract
from generator.authors.direct_prompts import direct_prompts, header_families
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.translate.direct import NotALaunch, language_of, read_direct
from generator.translate.direct.headers import CPU_RUNTIME, CUDA_FAMILIES, CUDA_RUNTIME, STANDARD_NAMES
from verifier.compile import compile_translated
from verifier.elf import runs_by_itself
from verifier.foreign import CPP_FLAGS, toolkit_headers
from verifier.records import Binary, CompileFailed
from verifier.source_rules import ALLOWED_HEADERS, violations

RESPONSES = Path(__file__).parents[1] / "responses"

needs_nvrtc = pytest.mark.skipif(find_spec("cuda") is None, reason="needs NVRTC")
needs_toolkit = pytest.mark.skipif(not toolkit_headers()[0], reason="needs the CUDA toolkit's device headers")
CAUSAL = AttentionSpec(8, 2, 128, 128, 1, 300, 300, "bf16", (Rule.make("causal"),))
TINY = AttentionSpec(2, 1, 32, 32, 1, 64, 64, "fp32", (Rule.make("causal"),))
LAUNCH = json.dumps({"entry": "kernel", "tensors": ["Q", "K", "V", "O", "LSE"], "scalars": []})
BODY = 'extern "C" int32_t kernel(const FarmCall* call) { return 0; }\n'


def compiled(source, cache, launch=LAUNCH, spec=TINY, target="cpu-avx2"):
    translated = read_direct(source, launch, spec, find_target(target))
    assert not isinstance(translated, NotALaunch), str(translated)
    return compile_translated(translated, cache)


@needs_nvrtc
@needs_toolkit
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_recorded_cuda_answer_compiles(tmp_path, causal):
    assert violations(device_source(), "cuda") == ()
    spec = CAUSAL if causal else AttentionSpec(8, 2, 128, 128, 1, 300, 300, "bf16")
    binary = compiled(device_source(), tmp_path, launch_text(causal), spec, "sm_90a")
    assert isinstance(binary, Binary), binary
    assert binary.resources["spill_bytes"] == 0 and binary.resources["registers"] == 168
    assert binary.resources["instructions"]["HGMMA"] > 40 and binary.resources["instructions"]["UTMALDG"] > 10


def test_a_right_answer_in_cpp_compiles_and_calls_only_maths(tmp_path):
    answer = extract((RESPONSES / "written/direct_cpu.md").read_text())
    binary = compiled(answer.get("source"), tmp_path, answer.get("launch"))
    assert isinstance(binary, Binary), binary
    assert set(binary.resources["imports"]) <= {"expf", "logf", "memset", "memcpy"}


CALL = '#include "farm_call.h"\n'
GLOBAL_OBJECT = "int twice(int x);\nint at_start = twice(3);\nint twice(int x) { return x * (int)(long)&at_start; }\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CALL + GLOBAL_OBJECT + BODY, "global objects that run code"),
        (CALL + 'extern "C" void _init() {}\n' + BODY, "_init: what runs before"),
        (CALL + 'extern "C" int getpid();\n' + BODY.replace("return 0", "return getpid()"), "getpid"),
        (CALL + BODY.replace("kernel", "another"), "no function kernel; it has another"),
        (CALL + BODY.replace('extern "C" ', ""), 'is it extern "C"?'),
        ("#include <stdio.h>\n" + BODY, "source line 1"),
        (CALL + 'void f() { asm("syscall"); }\n' + BODY, "source line 2"),
        (CALL + BODY + "int32_t wrong( {\n", "kernel.cpp:3:"),
    ],
)
def test_cpp_that_breaks_a_rule_is_no_binary(tmp_path, source, said):
    failed = compiled(source, tmp_path)
    assert isinstance(failed, CompileFailed) and failed.reason == "compile_error" and said in failed.log, failed
    again = compiled(source, tmp_path)
    assert isinstance(again, CompileFailed) and said in again.log, "never from the cache"


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('extern "C" __global__ void other(float* o) {}', "no function kernel; it has other"),
        ('#include "/etc/passwd"\n', "not accepted"),
        ('extern "C" __global__ void kernel(float* o) { o[0] = nothing; }', "kernel.cu(1): error"),
    ],
)
def test_cuda_that_breaks_a_rule_is_no_binary(tmp_path, source, said):
    arguments = [{"tensor": name} for name in ("O", "LSE", "Q", "K", "V")]
    launch = json.dumps({"entry": "kernel", "arguments": arguments, "grid": [1], "block": 32, "shared_bytes": 0})
    failed = compiled(source, tmp_path, launch, CAUSAL, "sm_80")
    assert isinstance(failed, CompileFailed) and said in failed.log, failed


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_every_header_for_cpp_can_be_included(tmp_path, isa):
    source = "".join(f'#include "{name}"\n' for name in ("farm_call.h", *reversed(CPU_RUNTIME))) + BODY
    assert isinstance(binary := compiled(source, tmp_path, target=f"cpu-{isa}"), Binary), binary


@needs_nvrtc
@pytest.mark.parametrize(
    ("target", "family"), [("sm_75", "mma.sync"), ("sm_80", "mma.sync"), ("sm_90a", "mma.sync"), ("sm_90a", "wgmma")]
)
def test_every_header_of_a_family_can_be_included(tmp_path, target, family):
    names = [*STANDARD_NAMES, *reversed(header_families(find_target(target))[family]), "common.cuh"]
    step = f"#define FARM_MMA_K {8 if target == 'sm_75' else 16}\n"
    source = step + "".join(f"#include <{name}>\n" for name in names) + 'extern "C" __global__ void kernel(float* o) {}\n'
    arguments = [{"tensor": name} for name in ("O", "LSE", "Q", "K", "V")]
    launch = json.dumps({"entry": "kernel", "arguments": arguments, "grid": [1], "block": 32, "shared_bytes": 0})
    spec = AttentionSpec(8, 2, 128, 128, 1, 300, 300, "fp16")
    assert isinstance(binary := compiled(source, tmp_path, launch, spec, target), Binary), binary


def test_every_header_for_cuda_is_offered():
    offered = {name for names in CUDA_FAMILIES.values() for name in names} | {"ptx.cuh", "common.cuh"}
    assert offered == set(CUDA_RUNTIME)


@pytest.mark.parametrize("target", ["cpu-avx2", pytest.param("sm_80", marks=needs_nvrtc)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_example_of_a_prompt_compiles_and_is_no_answer(tmp_path, target, dtype):
    spec = AttentionSpec(2, 1, 32, 64, 1, 64, 64, dtype, (Rule.make("causal"),))
    language = language_of(find_target(target))
    prompts = direct_prompts(spec, find_target(target), tuple(ALLOWED_HEADERS[language]), ("-O2",), 24_000)
    example = extract(prompts.system[prompts.system.index("An example") :])
    assert isinstance(binary := compiled(example.get("source"), tmp_path, example.get("launch"), spec, target), Binary), binary
    for rule_name in ("expf", "exp2", "max"):
        assert rule_name not in example.get("source")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("int f() { return 1; }", False),
        ('extern "C" void _init() {}', True),
        ('extern "C" void _fini() {}', True),
        ("int g(); int x = g(); int g() { return (int)(long)&x; }", True),
        ("__attribute__((destructor)) void f() {}", True),
    ],
)
def test_what_a_loader_would_call_is_seen_in_the_binary(tmp_path, source, runs):
    """The second wall: the words that make such code are refused before, wherever they are seen."""
    (tmp_path / "x.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", *CPP_FLAGS, "-o", str(tmp_path / "x.so"), str(tmp_path / "x.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    assert runs_by_itself((tmp_path / "x.so").read_bytes()) is runs
