"""Small attention kernels in C++ for the loader's tests, and catalog rows that tell of them. Plain loops: right, not fast."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from catalog.envelope import lengths_bucket, verification_points
from catalog.kernels import KernelIndex
from catalog.schema import WRITER_COLUMNS, make_row, seal_row
from catalog.source import Source
from generator.binding import rule_scalars, rule_tensors
from generator.canonical import digest_bytes, digest_text
from generator.spec import TL_DTYPES, AttentionSpec, Rule
from generator.translate.records import Launch, ScalarParameter, TensorParameter, Translated
from verifier.compile import compile_translated
from verifier.environment import device_key
from verifier.records import Binary

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
typedef void (*farm_parallel)(void (*)(void*), void*, unsigned, unsigned);
struct FarmCall {
  void* const* tensors; const int64_t* strides; const int64_t* ints; const float* floats;
  farm_parallel parallel; int64_t num_threads;
};
#if BF16
typedef uint16_t T;
static float load(T x) { uint32_t b = uint32_t(x) << 16; float f; memcpy(&f, &b, 4); return f; }
static T store(float f) { uint32_t b; memcpy(&b, &f, 4); return T((b + 0x7fff + ((b >> 16) & 1)) >> 16); }
#else
typedef float T;
static float load(T x) { return x; }
static T store(float f) { return f; }
#endif
struct Job { const FarmCall* call; int64_t next; };
static void one(const FarmCall& c, int64_t b, int64_t h) {
  const int64_t *st = c.strides, SeqQ = c.ints[0], SeqK = c.ints[1], group = c.ints[2] / c.ints[3], kh = h / group;
  const T *Q = (const T*)c.tensors[0] + b * st[0] + h * st[1], *K = (const T*)c.tensors[1] + b * st[4] + kh * st[5];
  const T *V = (const T*)c.tensors[2] + b * st[8] + kh * st[9];
  T* O = (T*)c.tensors[3] + b * st[12] + h * st[13];
  int at_tensor = 4;
  const int64_t* at_stride = st + 16;
  auto captured = [&](int axes) { at_stride += axes; return c.tensors[at_tensor++]; };
#if DOC
  const int64_t doc_row = at_stride[1];
  const int32_t* DocStart = (const int32_t*)c.tensors[4] + b * at_stride[0];
  const int32_t* DocEnd = (const int32_t*)c.tensors[5] + b * at_stride[2];
  captured(2), captured(2);
#endif
#if PAD
  const int32_t* KvLen = (const int32_t*)c.tensors[at_tensor] + b * at_stride[0];
  captured(1);
#endif
#if ALIBI
  const float* slope = (const float*)c.tensors[at_tensor] + h * at_stride[0];
  captured(1);
#endif
#if SINK
  const float* sink = (const float*)c.tensors[at_tensor] + h * at_stride[0];
  captured(1);
#endif
  float* s = (float*)malloc(sizeof(float) * (SeqK + 1));
  for (int64_t i = 0; i < SeqQ; i++) {
    int64_t at = i + (TOP_LEFT ? 0 : SeqK - SeqQ);
    float top = -INFINITY;
    for (int64_t j = 0; j < SeqK; j++) {
      float x = 0;
      for (int d = 0; d < D; d++) x += load(Q[i * st[2] + d]) * load(K[j * st[6] + d]);
      x *= c.floats[0];
#if SOFTCAP
      x = c.floats[1] * tanhf(x / c.floats[1]);
#endif
#if ALIBI
      x -= *slope * fabsf(float(at - j));
#endif
      bool sees = true;
#if DOC
      sees = j >= DocStart[i * doc_row] && j < DocEnd[i * doc_row];
#endif
#if PAD
      sees = sees && j < *KvLen;
#endif
#if CAUSAL
      sees = sees && j <= at;
#endif
#if WINDOW
      sees = sees && j >= at - c.ints[5] && j <= at + c.ints[6];
#endif
      s[j] = sees ? x : -INFINITY;
      top = fmaxf(top, s[j]);
    }
#if SINK
    top = fmaxf(top, *sink);
#endif
    float sum = 0;
    for (int64_t j = 0; j < SeqK; j++) { s[j] = s[j] == -INFINITY ? 0 : expf(s[j] - top); sum += s[j]; }
#if SINK
    sum += expf(*sink - top);
#endif
    for (int d = 0; d < DV; d++) {
      float o = 0;
      for (int64_t j = 0; j < SeqK; j++) if (s[j] != 0) o += s[j] * load(V[j * st[10] + d]);
      O[i * st[14] + d] = store((sum > 0 ? o / sum : 0) + OFFSET);
    }
#if LSE
    float* LSE_ = (float*)c.tensors[at_tensor];
    LSE_[b * at_stride[0] + h * at_stride[1] + i * at_stride[2]] = sum > 0 ? top + logf(sum) : -INFINITY;
#endif
  }
  free(s);
}
static void body(void* data) {
  Job* job = (Job*)data;
  int64_t heads = job->call->ints[2], all = heads * job->call->ints[4];
  for (int64_t n; (n = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < all;) one(*job->call, n / heads, n % heads);
}
extern "C" int32_t test_attention(const FarmCall* call) {
  if (CRASH) *(volatile int*)0 = 1;
  while (HANG) {}
  if (CODE) return CODE;
  Job job{call, 0};
  bool many = call->num_threads > 1 && call->ints[2] * call->ints[4] > 1;
  if (call->parallel && many) call->parallel(body, &job, (unsigned)call->num_threads, 0); else body(&job);
  return 0;
}
"""

#: Faults that a kernel may be built with.
FAULTS = {
    "": {},
    "wrong": {"OFFSET": "1"},
    "crash": {"CRASH": "1"},
    "no_memory": {"CODE": "1"},
    "broken": {"CODE": "7"},
    "hang": {"HANG": "1"},
}


@functools.cache
def build(spec: AttentionSpec, fault: str = "", lse: bool = False, mark: str = "") -> tuple[bytes, Launch]:
    """The binary for the family of a spec, and its launch. mark: makes another binary of the same code."""
    names = {rule.name for rule in spec.masks + spec.scores}
    top_left = any(dict(r.parameters).get("align") == "top_left" for r in spec.masks)
    macros = {
        "D": spec.head_dim, "DV": spec.head_dim_v, "CAUSAL": int("causal" in names), "WINDOW": int("window" in names),
        "TOP_LEFT": int(top_left), "SOFTCAP": int("softcap" in names), "ALIBI": int("alibi" in names),
        "SINK": int("sink_logit" in names), "DOC": int("document" in names), "PAD": int("padding" in names), "LSE": int(lse),
        "BF16": int(spec.dtype == "bf16"), "CRASH": 0, "CODE": 0, "HANG": 0, "OFFSET": 0, **FAULTS[fault],
    }  # fmt: skip
    source = (
        "".join(f"#define {k} {v}\n" for k, v in macros.items()) + SOURCE + f'// {mark}\nextern const char mark[] = "{mark}";\n'
    )
    dtype = TL_DTYPES[spec.dtype]
    tensors = [TensorParameter(name, dtype, 2, 2, name == "O") for name in "QKVO"]
    tensors += [TensorParameter(c.name, c.dtype, len(c.offset), len(c.shape), False) for c in rule_tensors(spec).values()]
    tensors += [TensorParameter("LSE", "f32", 2, 1, True)] if lse else []
    scalars = [ScalarParameter("scale", "f32", True)]
    scalars += [ScalarParameter(name, "i32", False) for name in ("SeqQ", "SeqK", "Heads", "KvHeads", "Batch")]
    scalars += [ScalarParameter(s.name, s.dtype, s.positive) for _, s, _ in rule_scalars(spec).values()]
    launch = Launch("test_attention", tuple(tensors), tuple(scalars), {"isa": "avx2"})
    translated = Translated("cpu", "c++", source, launch, digest_text(source), {})
    binary = compile_translated(translated, Path(tempfile.gettempdir()) / f"farm-test-kernels-{os.getuid()}")
    assert isinstance(binary, Binary), binary
    with open(binary.path, "rb") as file:
        return file.read(), launch


def spec(batch=1, heads=4, kv_heads=4, seqlen_q=32, seqlen_k=32, dim=16, dim_v=None, **more) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, dim if dim_v is None else dim_v, batch, seqlen_q, seqlen_k, **more)


CAUSAL = (Rule.make("causal", align="top_left"),)
CAUSAL_BR = (Rule.make("causal", align="bottom_right"),)


class Shelf:
    """Rows and binaries as a catalog has them, in memory: `source()` serves them."""

    def __init__(self, location_problem: str = "") -> None:
        self.rows: list[dict] = []
        self.binaries: dict[str, bytes] = {}
        self.reads = 0
        self.location_problem = location_problem

    def add(
        self, of: AttentionSpec, *, fault="", lse=False, mark="", ours_s=1e-4, torch_s=1e-3, key=None, buckets=None, **columns
    ) -> str:
        """A verified row for a spec; its kernel's id. buckets: those whose points count as verified (default: the spec's own)."""
        binary, launch = build(replace(of, batch=1, num_heads=of.group, num_kv_heads=1, seqlen_q=8, seqlen_k=8), fault, lse, mark)
        name = digest_bytes(binary)
        self.binaries[name] = binary
        key = device_key("cpu").hash if key is None else key
        buckets = buckets or [lengths_bucket(of.seqlen_q, of.seqlen_k)]
        shapes = [(2, 37, 53), *((1, *point) for bucket in buckets for point in verification_points(bucket))]
        timing = {} if ours_s is None else {
            "p50_s": ours_s, "baseline_name": "torch sdpa", "baseline_p50_s": torch_s,
            "rivals": {"measured": {"torch sdpa": {"p50_s": torch_s}, "flex-attention": {"p50_s": torch_s / 9}}},
        }  # fmt: skip
        base = {
            "attempt_key": digest_text(f"{of.hash}{name}{key}{len(self.rows)}"), "reason_code": "ok", "spec": of, "target": "cpu",
            "translator_version": "test", "harness_version": "test", "device_key": key, "device_name": "a test device",
            "source_hash": digest_text("source"), "binary_hash": name, "launch": launch, "rule_id": "test",
            "verified_shapes": shapes, "isa": [], "deterministic": True, **timing,
        }  # fmt: skip
        row = make_row(**(base | columns))
        self.rows.append(seal_row(row, run_id="run", writer_id="writer", sequence=len(self.rows)))
        return name[:12]

    def source(self) -> Source:
        def fetch(group):
            names = ("dtype", "head_dim", "head_dim_v")
            return [row for row in self.rows if group is None or tuple(row[n] for n in names) == group]

        return Source("memory", KernelIndex(fetch), self.read, self.location_problem)

    def read(self, name: str) -> bytes:
        self.reads += 1
        return self.binaries[name]

    def save(self, folder: Path) -> Path:
        """The same as a catalog on disk."""
        import catalog

        store = catalog.open(folder, create=True)
        for binary in self.binaries.values():
            store.artifacts.put(binary)
        with store.writer(f"run{len(list(folder.iterdir()))}") as writer:
            for row in self.rows:
                writer.append({name: None if name in WRITER_COLUMNS else value for name, value in row.items()})
        return folder
