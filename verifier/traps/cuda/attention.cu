// A plain attention kernel, one block a query row, and faults that must be found. FAULT_* macros choose; made by hand.
typedef long long i64;
struct Params {
  const char *q, *k, *v;
  char *o, *lse;
  i64 sq[4], sk[4], sv[4], so[4], sl[3];
  float scale;
  int SeqQ, SeqK, Heads, KvHeads, Batch;
};
constexpr int THREADS = 64, MAX_KEYS = 8192;

#if DTYPE == 0
typedef float T;
__device__ float load(T x) { return x; }
__device__ T store(float x) { return x; }
#elif DTYPE == 1
typedef unsigned short T;
__device__ float load(T x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
__device__ T store(float x) { T h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
#else
typedef unsigned short T;
__device__ float load(T x) { return __uint_as_float((unsigned)x << 16); }
__device__ T store(float x) { unsigned b = __float_as_uint(x); return (T)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) attention_kernel(const __grid_constant__ Params p) {
  __shared__ float weight[MAX_KEYS];
  __shared__ float total, top;
  const int row = blockIdx.x % p.SeqQ, head = blockIdx.x / p.SeqQ % p.Heads, batch = blockIdx.x / p.SeqQ / p.Heads;
  const int kv = head / (p.Heads / p.KvHeads), last = CAUSAL ? row + (CAUSAL == 2 ? 0 : p.SeqK - p.SeqQ) : p.SeqK - 1;
  const T* q = (const T*)p.q + batch * p.sq[0] + head * p.sq[1] + row * p.sq[2];
  const T* k = (const T*)p.k + batch * p.sk[0] + kv * p.sk[1];
  const T* v = (const T*)p.v + batch * p.sv[0] + kv * p.sv[1];
  T* o = (T*)p.o + batch * p.so[0] + head * p.so[1] + row * p.so[2];
  float* lse = (float*)p.lse + batch * p.sl[0] + head * p.sl[1] + row * p.sl[2];
  FAULT_FIRST
  for (int j = threadIdx.x; j < p.SeqK; j += THREADS) {
    float s = 0;
    for (int d = 0; d < HEAD_DIM; ++d) s += load(q[d]) * load(k[j * p.sk[2] + d]);
    weight[j] = j <= last ? s * (FAULT_SCALE p.scale) : -INFINITY;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float m = -INFINITY, sum = 0;
    for (int j = 0; j < p.SeqK; ++j) m = fmaxf(m, weight[j]);
    for (int j = 0; j < p.SeqK; ++j) sum += weight[j] = m == -INFINITY ? 0.f : expf(weight[j] - m);
    top = m;
    total = sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < HEAD_DIM_V; d += THREADS) {
    float sum = 0;
    for (int j = 0; j < p.SeqK; ++j) sum += weight[j] == 0 ? 0.f : weight[j] * load(v[j * p.sv[2] + d]);
    T out = store(total > 0 ? sum / total : 0.f);
    FAULT_OUT
    o[d] = out;
  }
  if (threadIdx.x == 0) *lse = total > 0 ? top + logf(total) : -INFINITY;
  FAULT_LAST
}
