// A plain attention kernel with the C++ entry point of docs/architecture.md: the known good one, and what every trap is made of.
// Not fast, and not a translator's output. The text before this one defines DTYPE (0: f32, 1: f16, 2: bf16), HEAD_DIM, HEAD_DIM_V
// and CAUSAL (0: none, 1: bottom-right, 2: top-left). Tensors: Q, K, V, O, LSE. Scalars: scale; SeqQ, SeqK, Heads, KvHeads, Batch.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*farm_parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
struct FarmCall {
  void* const* tensors;
  const int64_t* strides;
  const int64_t* ints;
  const float* floats;
  farm_parallel parallel;
  int64_t num_threads;
};

#if DTYPE == 0
typedef float element;
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#elif DTYPE == 1
typedef _Float16 element;
static inline float widen(element x) { return (float)x; }
static inline element narrow(float x) { return (element)x; }
#else
typedef uint16_t element;
static inline float widen(element x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static inline element narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#endif

enum { Q, K, V, O };

struct Call {
  const FarmCall* raw;
  int64_t seqlen_q, seqlen_k, num_heads, num_kv_heads, batch;
  float scale;
  explicit Call(const FarmCall* c)
      : raw(c), seqlen_q(c->ints[0]), seqlen_k(c->ints[1]), num_heads(c->ints[2]), num_kv_heads(c->ints[3]), batch(c->ints[4]),
        scale(c->floats[0]) {}
  element* at(int tensor, int64_t b, int64_t h, int64_t row) const {
    const int64_t* s = raw->strides + 4 * tensor;
    return (element*)raw->tensors[tensor] + b * s[0] + h * s[1] + row * s[2];
  }
  float* lse(int64_t b, int64_t h, int64_t row) const {
    const int64_t* s = raw->strides + 16;
    return (float*)raw->tensors[4] + b * s[0] + h * s[1] + row * s[2];
  }
  int64_t kv_head(int64_t h) const { return h / (num_heads / num_kv_heads); }
  int64_t last_key(int64_t row) const {  // one past the last key that the row sees
    int64_t end = CAUSAL == 1 ? row + seqlen_k - seqlen_q + 1 : CAUSAL == 2 ? row + 1 : seqlen_k;
    return end < 0 ? 0 : end > seqlen_k ? seqlen_k : end;
  }
  int64_t rows() const { return batch * num_heads * seqlen_q; }
};

static float score(const Call& c, int64_t b, int64_t h, int64_t row, int64_t key) {
  const element *q = c.at(Q, b, h, row), *k = c.at(K, b, c.kv_head(h), key);
  float sum[8] = {};
  int d = 0;
  for (; d + 8 <= HEAD_DIM; d += 8)
    for (int i = 0; i < 8; ++i) sum[i] += widen(q[d + i]) * widen(k[d + i]);
  for (; d < HEAD_DIM; ++d) sum[0] += widen(q[d]) * widen(k[d]);
  return (((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]))) * c.scale;
}

// One row of O and its LSE, from the keys [0, end). `scores` holds SeqK floats.
static void attend_row(const Call& c, int64_t b, int64_t h, int64_t row, int64_t end, float* scores) {
  float top = -INFINITY, sum = 0, acc[HEAD_DIM_V] = {};
  for (int64_t key = 0; key < end; ++key) {
    scores[key] = score(c, b, h, row, key);
    top = scores[key] > top ? scores[key] : top;
  }
  for (int64_t key = 0; key < end; ++key) {
    const element* v = c.at(V, b, c.kv_head(h), key);
    float p = expf(scores[key] - top);
    sum += p;
    for (int d = 0; d < HEAD_DIM_V; ++d) acc[d] += p * widen(v[d]);
  }
  element* o = c.at(O, b, h, row);
  for (int d = 0; d < HEAD_DIM_V; ++d) o[d] = narrow(end ? acc[d] / sum : 0);
  *c.lse(b, h, row) = end ? top + logf(sum) : -INFINITY;
}

struct Work {
  const Call* call;
  int64_t next;
  int out_of_memory;
};

static void work_on_rows(void* data) {
  Work* work = (Work*)data;
  const Call& c = *work->call;
  float* scores = (float*)malloc((size_t)(c.seqlen_k + 1) * sizeof(float));
  if (!scores) {
    work->out_of_memory = 1;
    return;
  }
  for (int64_t i; (i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < c.rows();) {
    int64_t row = i % c.seqlen_q, h = i / c.seqlen_q % c.num_heads, b = i / c.seqlen_q / c.num_heads;
    attend_row(c, b, h, row, c.last_key(row), scores);
  }
  free(scores);
}

static int32_t attention(const Call& c) {
  Work work = {&c, 0, 0};
  if (c.raw->parallel)
    c.raw->parallel(work_on_rows, &work, (unsigned)c.raw->num_threads, 0);
  else
    work_on_rows(&work);
  return work.out_of_memory;
}

// Every element of O by a function of its place; LSE is left as `attention` wrote it.
template <class F>
static void for_each_output(const Call& c, F write) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.num_heads; ++h)
      for (int64_t row = 0; row < c.seqlen_q; ++row)
        for (int d = 0; d < HEAD_DIM_V; ++d) write(c.at(O, b, h, row)[d], b, h, row, d);
}
