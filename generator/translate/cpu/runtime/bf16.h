// Products of bf16 tiles with fp32 sums: AMX tiles, or vdpbf16ps on the very same layouts. Results have their rows in lanes, c[i][lane].
//
// First operand: rows of 16-bit values, 32 to a chunk; element (i, t) at a + i * lda + t / 32 * step + t % 32.
// Second operand: pairs, so that a 32-bit word holds (t, t + 1) of a lane: [lane / 16][t / 2][lane % 16][2].
// FARM_EMULATE_AMX: the tile instructions in software, so that machines without AMX can check what is built on them.
#if defined(__AMX_BF16__) && !defined(FARM_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {
struct View16 {
  const bf16* p;
  int64_t ld;
};
INLINE __m512i as_int(vf x) { return _mm512_castps_si512(x); }
INLINE vf as_float(__m512i x) { return _mm512_castsi512_ps(x); }
INLINE __mmask32 mask32(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// Rows of a tile -> pairs: lanes are rows, up to padded_rows (a multiple of 16); columns up to a multiple of 32. Zero where nothing is valid.
static void pack_pairs(const bf16* p, int64_t ld, int64_t rows, int64_t cols, bf16* out, int64_t padded_rows, int64_t padded_cols) {
  for (int64_t lane = 0; lane < padded_rows; lane += 16, out += padded_cols * 16)
    for (int64_t t = 0; t < padded_cols; t += 32) {
      vf r[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __mmask32 valid = lane + i < rows ? mask32(cols - t) : 0;
        r[i] = as_float(_mm512_maskz_loadu_epi16(valid, p + (valid ? (lane + i) * ld + t : 0)));
      }
      transpose_block(r);
      UNROLL for (int i = 0; i < 16; ++i) vstore((float*)(out + (t / 2 + i) * 32), r[i]);
    }
}
// Columns of a tile -> rows of a first operand: [row chunk of 32][column, up to padded_cols][32 rows]. Zero where nothing is valid.
static void pack_turned(const bf16* p, int64_t ld, int64_t rows, int64_t cols, bf16* out, int64_t padded_rows, int64_t padded_cols) {
  for (int64_t t = 0; t < padded_rows; t += 32)
    for (int64_t c = 0; c < padded_cols; c += 16, out += 512) {
      const __mmask16 valid = (__mmask16)mask32(imin(16, cols - c));
      vf r[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t even = t + 2 * i, odd = even + 1;
        __m512i lo = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(even < rows ? valid : 0, p + (even < rows && valid ? even * ld + c : 0)));
        __m512i hi = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd < rows ? valid : 0, p + (odd < rows && valid ? odd * ld + c : 0)));
        r[i] = as_float(_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
      }
      transpose_block(r);
      UNROLL for (int i = 0; i < 16; ++i) vstore((float*)(out + i * 32), r[i]);
    }
}
// Rows of a first operand: where they lie, unless they have to be filled up or lie a multiple of 2 KiB apart.
static void pack_rows16(const bf16* p, int64_t ld, int64_t first, int64_t last, int64_t valid_rows, int64_t cols, int64_t valid_cols, bf16* scratch) {
  const int64_t padded = (cols + 31) / 32 * 32;
  for (int64_t r = first; r < last; ++r)
    for (int64_t c = 0; c < padded; c += 32) {
      const __mmask32 valid = r < valid_rows ? mask32(imin(cols, valid_cols) - c) : 0;
      _mm512_storeu_si512(scratch + r * padded + c, _mm512_maskz_loadu_epi16(valid, p + (valid ? r * ld + c : 0)));
    }
}
static View16 view_rows16(const bf16* p, int64_t ld, int64_t first, int64_t last, int64_t valid_rows, int64_t cols, int64_t valid_cols, bf16* scratch) {
  if (last <= valid_rows && valid_cols >= cols && cols % 32 == 0 && ld * 2 % 2048 != 0) return {p, ld};
  pack_rows16(p, ld, first, last, valid_rows, cols, valid_cols, scratch);
  return {scratch, (cols + 31) / 32 * 32};
}
// Columns t and t + 1 of 16 lanes as pairs.
INLINE void store_pairs(bf16* p, vf even, vf odd) {
#if defined(__AVX512BF16__)
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
#else
  const __m512i lo = _mm512_srli_epi32(bf16_bits(even), 16);
  _mm512_storeu_si512(p, _mm512_ternarylogic_epi32(bf16_bits(odd), lo, _mm512_set1_epi32((int)0xffff0000), 0xe4 /* C ? A : B */));
#endif
}

#if defined(FARM_EMULATE_AMX)
static __thread float tile_sums[4][16][16];
static __thread bf16 tile_operands[8][16][32];
#define TILE_ZERO(T) __builtin_memset(tile_sums[T], 0, 1024)
#define TILE_LOAD_SUM(T, P, STRIDE) for (int i_ = 0; i_ < 16; ++i_) __builtin_memcpy(tile_sums[T][i_], (const char*)(P) + i_ * (STRIDE), 64)
#define TILE_LOAD(T, P, STRIDE) for (int i_ = 0; i_ < 16; ++i_) __builtin_memcpy(tile_operands[T][i_], (const char*)(P) + i_ * (STRIDE), 64)
#define TILE_STORE(T, P, STRIDE) for (int i_ = 0; i_ < 16; ++i_) __builtin_memcpy((char*)(P) + i_ * (STRIDE), tile_sums[T][i_], 64)
INLINE void tile_dp(int c, int a, int b) {
  for (int i = 0; i < 16; ++i) for (int t = 0; t < 16; ++t) for (int n = 0; n < 16; ++n) for (int e = 0; e < 2; ++e)
    tile_sums[c][i][n] += to_float(tile_operands[a][i][2 * t + e]) * to_float(tile_operands[b][t][2 * n + e]);
}
#define TILE_DP(C, A, B) tile_dp(C, A, B)
#define FARM_TILES 1
struct TileScope {};
static bool tiles_allowed() { return true; }
#elif defined(__AMX_BF16__)
// Inline assembly with memory clobbers: gcc 12's intrinsics have none, and may move across the stores that feed them.
#define TILE_ZERO(T) asm volatile("tilezero %%tmm" #T ::)
#define TILE_LOAD(T, P, STRIDE) asm volatile("tileloadd (%0,%1,1), %%tmm" #T ::"r"(P), "r"((int64_t)(STRIDE)) : "memory")
#define TILE_LOAD_SUM(T, P, STRIDE) TILE_LOAD(T, P, STRIDE)
#define TILE_STORE(T, P, STRIDE) asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"(P), "r"((int64_t)(STRIDE)) : "memory")
#define TILE_DP(C, A, B) asm volatile("tdpbf16ps %%tmm" #B ", %%tmm" #A ", %%tmm" #C ::)
#define FARM_TILES 1
struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
// Eight full tiles while in scope; what the thread had before (another library's configuration) is put back.
struct TileScope {
  alignas(64) TileConfig before, mine;
  TileScope() {
    asm volatile("sttilecfg %0" : "=m"(before));
    for (int i = 0; i < 8; ++i) mine.bytes[i] = 64, mine.rows[i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(mine));
  }
  ~TileScope() {
    if (before.palette) asm volatile("ldtilecfg %0" ::"m"(before));
    else asm volatile("tilerelease" ::);
  }
};
// The kernel hands out the tile registers once a process asks for them: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
static bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return allowed;
}
#else
#define FARM_TILES 0
struct TileScope {};
static bool tiles_allowed() { return true; }
#endif

// Which part of an edge tile a product leaves out. columns: what rows see of the result's columns. inner: of the contraction. Null: all of it.
struct Edges {
  const Seen *columns, *inner;
  const bf16 *head = nullptr, *tail = nullptr;  // copies of the first and last chunk, where part of them is hidden from every row
  int64_t head_at = -1, tail_at = -1;
  // Where chunk k of the first operand lies.
  MEMBER const bf16* chunk(const bf16* a, int64_t k, int64_t step) const { return k == head_at ? head : k == tail_at ? tail : a + k * step; }
  MEMBER Span lanes(int64_t n, int64_t count, int64_t all) const { return columns ? columns->rows(n, count, all) : Span{0, all}; }
  MEMBER Span chunks(int64_t lane, int64_t count, Span t) const {
    const Span s = inner ? inner->columns(lane, count, t) : t;
    return {s.first / 32, imax(s.first / 32, (s.last + 31) / 32)};
  }
};

// The contraction goes in chunks of 32, past what anybody sees. There the second operand is zero, but 0 times what lies there may be NaN: such
// chunks are copied with zeros. `seen`: what some row sees, in columns of the tile; rows: of the first operand; scratch: two chunks.
static void hide_ends(Edges& edges, const bf16* a, int64_t rows, Span seen, bf16* scratch) {
  const int64_t first = seen.first / 32, last = (seen.last - 1) / 32, step = rows * 32;
  auto copy = [&](int64_t k, bf16* out) {
    const __mmask32 kept = mask32(seen.last - k * 32) & ~mask32(seen.first - k * 32);
    for (int64_t i = 0; i < rows; ++i) _mm512_storeu_si512(out + i * 32, _mm512_maskz_loadu_epi16(kept, a + k * step + i * 32));
  };
  if (seen.first % 32 != 0) copy(first, scratch), edges.head = scratch, edges.head_at = first;
  if (seen.last % 32 != 0 && edges.head_at != last) copy(last, scratch + step), edges.tail = scratch + step, edges.tail_at = last;
}

template <int M> INLINE void no_maxima(float* most) { for (int i = 0; i < M; i += VL) vstore(most + i, vset(-INF)); }
struct NoPass { MEMBER void operator()(int64_t, int64_t, int64_t) const {} };

#if FARM_TILES
// c[i][lane] for i in n, 32 rows of the result by 32 lanes at a time: four tiles of sums, two of each operand. t: the contraction; zero: c
// holds nothing yet. pass(lane, first, last): what runs on each block of 32 lanes while it lies in L1, the next one's products under way.
template <int M, bool ADD, class Pass = NoPass>
static void product_bf16(Span n, const bf16* a, int64_t lda, int64_t step, Span t, const bf16* b, int64_t block, float* c, const Edges& edges, bool zero = false, Pass pass = {}) {
  static_assert(M % 32 == 0, "lanes in pairs of tiles");
  int64_t made = -1, made_lane = 0;  // the block before: its rows of the result, its lanes
  for (int64_t i = n.first; i < n.last; i += 32) {
    const Span lanes = edges.lanes(i, 32, M);
    for (int64_t lane = lanes.first / 32 * 32; lane < lanes.last; lane += 32) {
      float* out = c + i * M + lane;
      if (ADD && !zero) {
        TILE_LOAD_SUM(0, out, M * 4); TILE_LOAD_SUM(1, out + 16, M * 4);
        TILE_LOAD_SUM(2, out + 16 * M, M * 4); TILE_LOAD_SUM(3, out + 16 * M + 16, M * 4);
      } else {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      }
      const Span chunks = edges.chunks(lane, 32, t);
      const bf16* q = b + lane / 16 * block + chunks.first * 512;
      for (int64_t k = chunks.first; k < chunks.last; ++k, q += 512) {
        const bf16* p = edges.chunk(a, k, step) + i * lda;
        TILE_LOAD(4, p, lda * 2); TILE_LOAD(6, q, 64);
        TILE_DP(0, 4, 6);
        TILE_LOAD(7, q + block, 64);
        TILE_DP(1, 4, 7);
        TILE_LOAD(5, p + 16 * lda, lda * 2);
        TILE_DP(2, 5, 6); TILE_DP(3, 5, 7);
      }
      if (made >= 0) pass(made_lane, made, made + 32);
      made = i, made_lane = lane;
      TILE_STORE(0, out, M * 4); TILE_STORE(1, out + 16, M * 4);
      TILE_STORE(2, out + 16 * M, M * 4); TILE_STORE(3, out + 16 * M + 16, M * 4);
    }
  }
  if (made >= 0) pass(made_lane, made, made + 32);
}
#else
template <int R, int N, int M, bool ADD>
INLINE void pairs_strip(const bf16* first, int64_t i0, int64_t lda, int64_t step, Span chunks, const bf16* b, int64_t block, float* c, const Edges& edges, bool zero) {
  vf acc[R][N];
  UNROLL for (int i = 0; i < R; ++i) UNROLL for (int j = 0; j < N; ++j) acc[i][j] = ADD && !zero ? vload(c + i * M + j * VL) : vset(0);
  b += chunks.first * 512;
  for (int64_t k = chunks.first; k < chunks.last; ++k) {
    const bf16* a = edges.chunk(first, k, step) + i0 * lda;
    for (int t = 0; t < 32; t += 2, b += 32) {
      __m512i bj[N];
      UNROLL for (int j = 0; j < N; ++j) bj[j] = _mm512_loadu_si512(b + j * block);
      UNROLL for (int i = 0; i < R; ++i) {
        int32_t pair;
        __builtin_memcpy(&pair, a + i * lda + t, 4);
        const __m512i ai = _mm512_set1_epi32(pair);
        UNROLL for (int j = 0; j < N; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)ai, (__m512bh)bj[j]);
      }
    }
  }
  UNROLL for (int i = 0; i < R; ++i) UNROLL for (int j = 0; j < N; ++j) vstore(c + i * M + j * VL, acc[i][j]);
}
// Strips of 6 rows; 32 rows are four of them and two of 4.
template <int N, int M, bool ADD>
static void pairs_block(Span n, const bf16* a, int64_t lda, int64_t step, Span chunks, const bf16* b, int64_t block, float* c, const Edges& edges, bool zero) {
  for (int64_t i = n.first; i < n.last;) {
    const int64_t left = n.last - i;
    if (left % 6 == 0 || left > 8) pairs_strip<6, N, M, ADD>(a, i, lda, step, chunks, b, block, c + i * M, edges, zero), i += 6;
    else if (left >= 4) pairs_strip<4, N, M, ADD>(a, i, lda, step, chunks, b, block, c + i * M, edges, zero), i += 4;
    else pairs_strip<2, N, M, ADD>(a, i, lda, step, chunks, b, block, c + i * M, edges, zero), i += 2;
  }
}
template <int M, bool ADD, class Pass = NoPass>
static void product_bf16(Span n, const bf16* a, int64_t lda, int64_t step, Span t, const bf16* b, int64_t block, float* c, const Edges& edges, bool zero = false, Pass pass = {}) {
  const int64_t rows = edges.columns ? 32 : n.last - n.first;
  for (int64_t i = n.first; i < n.last; i += rows) {
    const Span lanes = edges.lanes(i, rows, M);
    for (int64_t lane = lanes.first / 32 * 32; lane < lanes.last;) {
      const bf16* q = b + lane / 16 * block;
      const bool wide = lane + 64 <= M && lanes.last - lane > 32;
      if (wide) pairs_block<4, M, ADD>({i, i + rows}, a, lda, step, edges.chunks(lane, 64, t), q, block, c + lane, edges, zero);
      else pairs_block<2, M, ADD>({i, i + rows}, a, lda, step, edges.chunks(lane, 32, t), q, block, c + lane, edges, zero);
      for (int64_t end = lane + (wide ? 64 : 32); lane < end; lane += 32) pass(lane, i, i + rows);
    }
  }
}
#endif
}  // namespace
