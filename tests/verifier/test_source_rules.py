"""Foreign source is refused for what a kernel never needs, and ordinary kernels pass."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.source_rules import MAX_SOURCE_BYTES, violations

GOOD_CPU = """
#include <immintrin.h>  // vectors
#include <stdint.h>
#define UNROLL _Pragma_not
/* open("x") in a comment is only words */
struct FarmCall { void* const* tensors; const int64_t* strides; };
static inline float f(float x) { return x * 2.0f; }
#pragma GCC unroll 8
static const float big = 1'000.5f;
static const char quote = '\\'';
extern "C" int32_t entry(const FarmCall* call) { float open_sum = 0; return call->tensors[0] ? 0 : (int32_t)f(open_sum); }
"""
GOOD_CUDA = """
#include <cuda_bf16.h>
__device__ unsigned smem(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(float* o) {
#pragma unroll
  for (int i = 0; i < 4; ++i) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\\n" "bar.sync 0;" ::"r"(0u)); o[i] = 1; }
}
"""


@pytest.mark.parametrize(("source", "language"), [(GOOD_CPU, "c++"), (GOOD_CUDA, "cuda"), ("", "c++")])
def test_ordinary_kernels_pass(source, language):
    assert violations(source, language) == ()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#include <stdio.h>", "allowed: call.h"),
        ('#include "/etc/passwd"', "not accepted"),
        ("#  include <unistd.h>", "not accepted"),
        ("#include MACRO", "not accepted"),
        ("#include <immintrin.h> \\\n", "continued"),
        ("#inc\\\nlude <unistd.h>", "continued"),
        ("%:include <unistd.h>", "digraphs"),
        ("??=include <unistd.h>", "digraphs"),
        ('#embed "/etc/passwd"', "#embed"),
        ('#line 1 "x"', "#line"),
        ("#pragma GCC poison x", "unroll"),
        ("#pragma GCC push_options", "unroll"),
        ("#define A as##m", "paste"),
        ('int x = 0; _Pragma("GCC optimize") int y;', "_Pragma"),
        ('void f() { asm("syscall"); }', "inline assembly"),
        ('void f() { __asm__ volatile ("nop"); }', "inline assembly"),
        ("long f() { return syscall(1); }", "calls no system"),
        ("void f() { fork(); }", "calls no system"),
        ('void* f() { return dlsym(0, "x"); }', "load, find"),
        ("__attribute__((constructor)) void f() {}", "before the entry"),
        ("[[gnu::constructor]] void f() {}", "before the entry"),
        ('__attribute__((section(".init_array"))) void* p;', "before the entry"),
        ("int* f() { return new int; }", "freestanding"),
        ("int main() { return 0; }", "host code"),
        ("char c = '\0';", "control character '\\x00'"),
        ("int x = 1'0; void f() { asm(\"syscall\"); } int y = 1'0;", "inline assembly"),
        ("int x = 0xA'b; void f() { asm(\"syscall\"); } int y = 0xA'b;", "inline assembly"),
        ('void f() { 1. asm("syscall"); }', "inline assembly"),
        ('// words\rvoid f() { asm("syscall"); }', "control character"),
        ("#define J(a, b) \\\n a##b\nvoid f() { J(a, sm)(0); }", "paste"),
        ("#define J(a, b) \\\n a \\\n ##b\nvoid f() { J(a, sm)(0); }", "paste"),
        ('#if __has_include("/etc/passwd")\n#endif', "what files"),
        ("#define H __has_embed\n", "what files"),
        ("int ｆork;", "ASCII"),
        ("int x; /* never ends", "does not end"),
        ("#if 0\nvoid f() { fork(); }\n#endif", "calls no system"),
    ],
)
def test_cpu_source_is_refused(source, said):
    assert any(said in v.message for v in violations(source, "c++")), violations(source, "c++")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#include <cuda_runtime.h>", "not accepted"),
        ("int f() { k<<<1, 2>>>(); }", "host code"),
        ("__host__ void f() {}", "host code"),
        ('__device__ void f() { printf("PASS"); }', "timed"),
        ('__device__ void f() { asm volatile("trap;"); }', "inside its own grid"),
        ('__device__ void f() { asm volatile(R"(st.release.sys.b32 [%0], 1;)"); }', "inside its own grid"),
        ('__device__ void f() { asm("nano" /* and */ R"(sleep)"\n".u32 5;"); }', "inside its own grid"),
        ('__device__ void f() { asm("nano\\x73leep.u32 5;"); }', "readable"),
        ('__device__ void f() { asm("nano\\163leep.u32 5;"); }', "readable"),
        ('#if __has_include("/etc/passwd")\n#endif', "what files"),
    ],
)
def test_cuda_source_is_refused(source, said):
    assert any(said in v.message for v in violations(source, "cuda")), violations(source, "cuda")


def test_lines_are_named():
    [violation] = violations("int a;\n/* two\nlines */\nvoid f() { fork(); }\n", "c++")
    assert violation.line == 4


@pytest.mark.parametrize(
    "source",
    ["/*" * 400_000, '"' * 900_000, 'R"(' * 300_000, "a" * (MAX_SOURCE_BYTES + 1), "#define\\\n" * 100_000, "'" * 900_000]
    + ['"a"' * 300_000, "1'" * 400_000, "#define \\\n##" * 80_000, "#" * 900_000, "\\" * 900_000, '"' + "\\" * 900_000 + '"'],
)
@pytest.mark.parametrize("language", ["c++", "cuda"])
def test_hostile_text_takes_no_more_than_seconds(source, language):
    start = time.process_time()
    violations(source, language)
    assert time.process_time() - start < 8, "reading it more than once a character would take minutes"


@given(st.text(alphabet="/*\"'R()\\\n#%:<?ainclude \0x", max_size=200), st.sampled_from(["c++", "cuda"]))
def test_any_text_is_survived(source, language):
    violations(source, language)
