"""Leaves the work to somebody else's kernel when its own fails: there is nobody in reach, and no way to notice the failure."""

import json

import pytest

from generator.targets import find_target
from generator.translate.direct import NotALaunch, read_direct
from verifier.compile import compile_translated
from verifier.records import CompileFailed

LAUNCH = json.dumps({"entry": "kernel", "tensors": ["Q", "K", "V", "O", "LSE"], "scalars": []})
OWN = "static int32_t own(const FarmCall* call) { return call->tensors[0] ? 0 : 1; }\n"
ENTRY = 'extern "C" int32_t kernel(const FarmCall* call) {{ {} }}\n'


@pytest.mark.parametrize(
    ("around", "body", "said"),
    [
        ("", "try { return own(call); } catch (...) { return 0; }", "catch"),
        ('extern "C" void* dlsym(void*, const char*);\n', 'return own(call) ? dlsym(0, "sdpa") != 0 : 0;', "dlsym"),
        ('extern "C" int cblas_sgemm(int);\n', "return own(call) ? cblas_sgemm(0) : 0;", "cblas_sgemm"),
        ('extern "C" int sdpa(int) __attribute__((weak));\n', "return own(call) && sdpa ? sdpa(0) : 0;", "weak"),
        ('extern "C" int sigsetjmp(void*, int);\n', "return sigsetjmp(0, 1) ? 0 : own(call);", "sigsetjmp"),
    ],
    ids=lambda text: "",
)
def test_source_that_would_look_for_another_kernel_is_no_binary(tmp_path, spec, around, body, said):
    source = '#include "farm_call.h"\n' + around + OWN + ENTRY.format(body)
    translated = read_direct(source, LAUNCH, spec, find_target("cpu-avx2"))
    assert not isinstance(translated, NotALaunch), str(translated)
    failed = compile_translated(translated, tmp_path)
    assert isinstance(failed, CompileFailed) and failed.reason == "compile_error" and said in failed.log, failed


def test_a_kernel_that_finds_no_library_computes_nothing(refused):
    assert "were never written" in refused("calls_a_library", "unwritten_output", "written").message


def test_a_failure_of_its_own_is_the_verdict_and_nobody_answers_instead(refused):
    refused("null_pointer", "crash", "crash")
