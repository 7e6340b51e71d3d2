"""Calling a compiled kernel: the argument block, the contract's checks, and bytes that are loaded as they were hashed."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from generator.translate.records import Launch, ScalarParameter, TensorParameter, Translated
from verifier.compile import compile_translated
from verifier.launch import LaunchError, RawTensor, load_cpu, parallel_pointer

SOURCE = """
#include <stdint.h>
typedef void (*farm_parallel)(void (*)(void*), void*, unsigned, unsigned);
struct FarmCall {
  void* const* tensors; const int64_t* strides; const int64_t* ints; const float* floats;
  farm_parallel parallel; int64_t num_threads;
};
struct Work { const FarmCall* c; int64_t next; int64_t workers; };
static void body(void* p) {
  Work* w = (Work*)p; const FarmCall* c = w->c;
  __atomic_fetch_add(&w->workers, 1, __ATOMIC_RELAXED);
  for (int64_t i; (i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < c->ints[0];)
    for (int64_t j = 0; j < c->ints[1]; ++j) {
      const float* x = (const float*)c->tensors[0]; float* y = (float*)c->tensors[1];
      y[i * c->strides[2] + j * c->strides[3]] = x[i * c->strides[0] + j * c->strides[1]] * c->floats[0] + c->floats[1];
    }
}
extern "C" int32_t affine(const FarmCall* c) {
  if (c->ints[0] < 0) return 1;
  Work w = {c, 0, 0};
  if (c->parallel) c->parallel(body, &w, (unsigned)c->num_threads, 0); else body(&w);
  return w.workers == (c->parallel ? c->num_threads : 1) ? 0 : 7;
}
"""
LAUNCH = Launch(
    "affine",
    (TensorParameter("X", "f32", 0, 2, False), TensorParameter("Y", "f32", 0, 2, True)),
    (
        ScalarParameter("rows", "i32", False),
        ScalarParameter("a", "f32", True),
        ScalarParameter("cols", "i32", False),
        ScalarParameter("b", "f32", False),
    ),
    {"isa": "baseline"},
)


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    return compile_translated(Translated("cpu", "c++", SOURCE, LAUNCH, "p" * 64, {}), tmp_path_factory.mktemp("cache"))


def load(binary, **options):
    return load_cpu(Path(binary.path).read_bytes(), LAUNCH, expected_hash=binary.hash, **options)


def test_strides_ints_and_floats_arrive_in_their_own_order(binary):
    kernel = load(binary)
    x = torch.randn(5, 20)[:, 3:10]
    y = torch.zeros(7, 5, 9).transpose(0, 1)[:, 2, :7]
    kernel.call([x, y], [5, 2.0, 7, 0.5])
    assert torch.equal(y, x * 2 + 0.5)


def test_raw_pointers_do_as_well(binary):
    x, y = (ctypes.c_float * 6)(*range(6)), (ctypes.c_float * 6)()
    load(binary).call([RawTensor(ctypes.addressof(x), (3, 1)), RawTensor(ctypes.addressof(y), (3, 1))], [2, 10.0, 3, 1.0])
    assert list(y) == [1, 11, 21, 31, 41, 51]


def test_threads_as_many_as_asked(binary):
    x = torch.ones(8, 3)
    for threads in (1, 2, 3):
        y = torch.zeros(8, 3)
        load(binary, num_threads=threads).call([x, y], [8, 1.0, 3, 1.0])
        assert bool((y == 2).all())


def test_many_python_threads_share_one_kernel(binary):
    kernel, wrong = load(binary, num_threads=1), []

    def work(seed):
        x = torch.full((4, 4), float(seed))
        for _ in range(50):
            y = torch.zeros(4, 4)
            kernel.call([x, y], [4, 2.0, 4, 1.0])
            if not bool((y == 2 * seed + 1).all()):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize(
    ("tensors", "scalars", "message"),
    [
        ([torch.ones(2, 2)], [2, 1.0, 2, 0.0], "tensors: expected 2 \\(X, Y\\), found 1"),
        ([torch.ones(2, 2)] * 2, [2, 1.0, 2], "scalars: expected 4 .*found 3"),
        ([torch.ones(2, 2).T, torch.ones(2, 2)], [2, 1.0, 2, 0.0], "X: expected a last axis with stride 1, found stride 2"),
        ([torch.ones(2, 2), torch.ones(4)], [2, 1.0, 2, 0.0], "Y: expected 2 axes, found 1"),
        ([torch.ones(2, 2)] * 2, [2, -1.0, 2, 0.0], "a: expected more than 0, as the kernel was promised, found -1.0"),
        ([torch.ones(2, 2)] * 2, [2, float("nan"), 2, 0.0], "a: expected more than 0"),
    ],
)
def test_calls_outside_the_contract_are_refused(binary, tensors, scalars, message):
    with pytest.raises(LaunchError, match=message):
        load(binary).call(tensors, scalars)


def test_return_code_one_is_memory(binary):
    with pytest.raises(MemoryError, match="affine"):
        load(binary).call([torch.ones(2, 2)] * 2, [-1, 1.0, 2, 0.0])


def test_changed_bytes_are_refused(binary):
    data = bytearray(Path(binary.path).read_bytes())
    data[-1] ^= 1
    with pytest.raises(LaunchError, match="expected SHA-256"):
        load_cpu(bytes(data), LAUNCH, expected_hash=binary.hash)


def test_rubbish_and_a_missing_entry_are_refused(binary):
    with pytest.raises(LaunchError, match="cannot be loaded"):
        load_cpu(b"rubbish", LAUNCH)
    with pytest.raises(LaunchError, match="no entry point named other"):
        load_cpu(Path(binary.path).read_bytes(), Launch("other", (), ()))


def test_the_file_may_vanish_after_loading(binary, tmp_path):
    data = Path(binary.path).read_bytes()
    kernel = load_cpu(data, LAUNCH)
    x, y = torch.ones(2, 2), torch.zeros(2, 2)
    kernel.call([x, y], [2, 1.0, 2, 0.0])
    assert torch.equal(x, y)


def test_the_pool_is_torchs_own():
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libgomp" in line and "torch" in line)
    assert parallel_pointer() == ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value


def test_launching_needs_no_torch():
    code = "import sys, verifier.launch, verifier.compile; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
