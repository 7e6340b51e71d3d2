// What every kernel uses: one thread's share of a tile, numbers, captured values, stores. Follows `ptx.cuh`.
//
// wgmma and mma.sync hold an accumulator tile alike: a thread has rows lane / 4 + 8 r of each row block t and, of every eight
// columns, 2 (lane % 4) + e. Element (t, r, 8 i + e) lies in X[t][4 i + 2 r + e].
#define FOR_ROWS UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int r = 0; r < 2; ++r)
#define FOR_TILE(N) FOR_ROWS UNROLL for (int i = 0; i < (N) / 8; ++i) UNROLL for (int e = 0; e < 2; ++e)
#define FOR_PART(A, B) FOR_ROWS UNROLL for (int i = (A); i < (B); ++i) UNROLL for (int e = 0; e < 2; ++e)
#define AT (4 * i + 2 * r + e)
#define COL (8 * i + e)  // this element's column, counted from the lane's first
#define ROW(t, r) (ROW_STEP * (t) + 8 * (r))
#define COLUMN_BIT (1u << (2 * (i % 16) + e))  // this element's bit in its word of a row's mask, a word for 128 columns

// ---------------------------------------------------------------- whole numbers (division rounds down, by zero it gives 0)
DEVICE int floordiv(int a, int b) {
  if (b == 0) return 0;
  int q = a / b;
  return q - ((a % b != 0) && ((a < 0) != (b < 0)));
}
DEVICE int ceildiv(int a, int b) { return -floordiv(-a, b); }
DEVICE int floormod(int a, int b) { return a - floordiv(a, b) * b; }
DEVICE int clamp(int x, int lo, int hi) { return min(max(x, lo), hi); }

// A word of a row's mask: the lane's columns up to a limit that is counted from its first column.
DEVICE u32 columns_upto(int limit, int word) {
  const int x = limit - 128 * word, n = clamp(2 * (x >> 3) + min(x & 7, 1) + 1, 0, 32);
  return n == 32 ? 0xffffffffu : (1u << n) - 1;
}

// ---------------------------------------------------------------- reductions over the four lanes that share a row
DEVICE float quad_sum(float a) {
  a += __shfl_xor_sync(0xffffffffu, a, 1);
  return a + __shfl_xor_sync(0xffffffffu, a, 2);
}
DEVICE float quad_max(float a) {
  a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
  return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
}
DEVICE int warp_min(int a) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xffffffffu, a);
#else
  UNROLL for (int d = 16; d; d >>= 1) a = min(a, __shfl_xor_sync(0xffffffffu, a, d));
  return a;
#endif
}
DEVICE int warp_max(int a) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, a);
#else
  UNROLL for (int d = 16; d; d >>= 1) a = max(a, __shfl_xor_sync(0xffffffffu, a, d));
  return a;
#endif
}

// ---------------------------------------------------------------- captured tensors: zero outside their extents
DEVICE float load(const float* p) { return __ldg(p); }
DEVICE int load(const int* p) { return __ldg(p); }
struct f16_t { u16 bits; };
struct bf16_t { u16 bits; };
DEVICE float load(const f16_t* p) { return widen<F16>(__ldg((const u16*)p)); }
DEVICE float load(const bf16_t* p) { return widen<BF16>(__ldg((const u16*)p)); }
template <class E> DEVICE auto captured(const E* p) { return load(p); }
template <class E> DEVICE auto captured(const E* p, i64 s0, int n0, int i) -> decltype(load(p)) {
  return (u32)i < (u32)n0 ? load(p + i * s0) : 0;
}
template <class E> DEVICE auto captured(const E* p, i64 s0, int n0, int i, i64 s1, int n1, int j) -> decltype(load(p)) {
  return (u32)i < (u32)n0 && (u32)j < (u32)n1 ? load(p + i * s0 + j * s1) : 0;
}

// ---------------------------------------------------------------- iterations of a loop: lo <= j < hi without glo <= j < ghi
struct Range {
  int lo, hi, glo, gap;
  DEVICE void close(int a, int b) {  // leave a <= j < b out
    glo = clamp(a, lo, max(lo, hi));
    gap = max(0, min(b, hi) - glo);
  }
  DEVICE int count() const { return max(0, hi - lo) - gap; }
  DEVICE int before(int j) const {  // how many iterations lie below j
    int x = clamp(j, lo, max(lo, hi));
    return x - lo - clamp(x - glo, 0, gap);
  }
  DEVICE bool has(int j) const { return j >= lo && j < hi && (j < glo || j >= glo + gap); }
  DEVICE int at(int n) const {  // the n-th iteration, from below
    int j = lo + n;
    return j + (j >= glo ? gap : 0);
  }
};

// ---------------------------------------------------------------- register tiles
// Accumulator to A operand: a cast of each pair, in place (m16n8k8, m16n8k16 and wgmma alike).
template <Type T, int MT, int N, int M> DEVICE void to_operand(u32 (&p)[MT][N], const float (&x)[MT][M]) {
  UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int i = 0; i < N; ++i) p[t][i] = pack2<T>(x[t][2 * i], x[t][2 * i + 1]);
}
template <Type T> DEVICE float rounded(float x) { return T == F32 ? x : widen<T>(narrow<T>(x)); }

// One row block of 16 bit elements as words: 4 x 4 word transposes inside each lane quad give each lane eight columns of every 32.
template <Type T, int N, int M> DEVICE void quad_rows(u32 (&w)[2][(N + 31) / 32][4], int lane, const float (&x)[M]) {
  constexpr int GROUPS = (N + 31) / 32;  // of 32 columns
  const bool b0 = lane & 1, b1 = lane & 2;
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) UNROLL for (int i = 0; i < 4; ++i) {
    const int k = 4 * (4 * g + i) + 2 * r;
    w[r][g][i] = 4 * g + i < N / 8 ? pack2<T>(x[k < M ? k : 0], x[k < M ? k + 1 : 0]) : 0;
  }
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) UNROLL for (int i = 0; i < 4; i += 2) {
    const u32 y = __shfl_xor_sync(0xffffffffu, b0 ? w[r][g][i] : w[r][g][i + 1], 1);
    if (b0) w[r][g][i] = y; else w[r][g][i + 1] = y;
  }
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) UNROLL for (int i = 0; i < 2; ++i) {
    const u32 y = __shfl_xor_sync(0xffffffffu, b1 ? w[r][g][i] : w[r][g][i + 2], 2);
    if (b1) w[r][g][i] = y; else w[r][g][i + 2] = y;
  }
}
// One row block to global memory: one 16 byte store where the matrix is aligned, 64 contiguous bytes in each of eight rows an
// instruction. `left`: rows of the matrix at and behind this thread's first row. No branch holds a shuffle: a warp must be seen to
// stay together (see `store_global16`).
template <Type T, int N, int M> DEVICE void store_rows(char* p, i64 pitch, bool aligned, int left, int cols, int lane, const float (&x)[M]) {
  constexpr int GROUPS = (N + 31) / 32;
  const int q = lane & 3;
  u32 w[2][GROUPS][4];
  quad_rows<T, N>(w, lane, x);
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) {
    const int c = 32 * g + 8 * q;
    const bool in = aligned && 8 * r < left && c < N && c + 8 <= cols;
    store_global16(p + 8 * r * pitch + 2 * c, make_uint4(w[r][g][0], w[r][g][1], w[r][g][2], w[r][g][3]), in);
  }
  if (!aligned || cols % 8)
    UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) UNROLL for (int k = 0; k < 8; ++k) {
      const int c = 32 * g + 8 * q;
      const bool in = 8 * r < left && c < N && c + k < cols && (!aligned || c + 8 > cols);
      store_global2(p + 8 * r * pitch + 2 * (c + k), (u16)(w[r][g][k / 2] >> (16 * (k & 1))), in);
    }
}
template <int N, int M> DEVICE void store_rows_f32(char* p, i64 pitch, int left, int cols, int lane, const float (&x)[M]) {
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int i = 0; i < N / 8; ++i) UNROLL for (int e = 0; e < 2; ++e) {
    const int c = 8 * i + 2 * (lane & 3) + e;
    store_global4(p + 8 * r * pitch + 4 * c, __float_as_uint(x[4 * i + 2 * r + e]), 8 * r < left && c < cols);
  }
}
