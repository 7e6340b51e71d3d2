// Products, transposes and copies of tiles in fp32. The layout of every tile is the caller's choice; nothing here knows what is computed.

namespace {

// Where a tile lies, row by row: in the tensor itself, or in scratch.
template <class T> struct View {
  const T* p;
  int64_t ld;  // elements from one row to the next
};

enum Scale { NONE, BY_ROW, BY_LANE };  // what the accumulator is multiplied by while it is loaded

// c[i][lane] (+)= sum over t of a[i * si + t * st] * b[t * ldb + lane], for R rows and N vectors of lanes. zero: c holds nothing yet.
template <int R, int N, bool ADD, Scale SCALE, class T>
INLINE void micro(const float* a, int64_t si, int64_t st, const T* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, const float* scale, bool zero = false) {
  vf acc[R][N];
  if (!ADD || zero) UNROLL for (int i = 0; i < R; ++i) UNROLL for (int j = 0; j < N; ++j) acc[i][j] = vset(0);
  else UNROLL for (int i = 0; i < R; ++i) UNROLL for (int j = 0; j < N; ++j) {
    acc[i][j] = vload(c + i * ldc + j * VL);
    if (SCALE == BY_ROW) acc[i][j] = acc[i][j] * vset(scale[i]);
    if (SCALE == BY_LANE) acc[i][j] = acc[i][j] * vload(scale + j * VL);
  }
  for (int64_t t = 0; t < depth; ++t, a += st, b += ldb) {
    if (!ADD && t % 16 == 0) UNROLL for (int i = 0; i < R; ++i) __builtin_prefetch(a + (R + i) * si);  // the next strip's rows
    vf bj[N];
    UNROLL for (int j = 0; j < N; ++j) bj[j] = vload(b + j * VL);
    UNROLL for (int i = 0; i < R; ++i) {
      vf ai = vset(a[i * si]);
      UNROLL for (int j = 0; j < N; ++j) acc[i][j] = vfma(ai, bj[j], acc[i][j]);
    }
  }
  UNROLL for (int i = 0; i < R; ++i) UNROLL for (int j = 0; j < N; ++j) vstore(c + i * ldc + j * VL, acc[i][j]);
}
template <int N, bool ADD, Scale SCALE, int R = MR, class T>
INLINE void strip(int64_t r, const float* a, int64_t si, int64_t st, const T* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, const float* scale, bool zero = false) {
  if (r == R) return micro<R, N, ADD, SCALE>(a, si, st, b, ldb, depth, c, ldc, scale, zero);
  if constexpr (R > 1) strip<N, ADD, SCALE, R - 1>(r, a, si, st, b, ldb, depth, c, ldc, scale, zero);
}
// Which part of a tile an edge tile's rows see: row r sees column n where lower[r] <= n + lower_x and n + upper_x < upper[r]; null: no limit.
struct Seen {
  const int32_t *lower, *upper;
  int64_t lower_x, upper_x;

  // The columns that rows [r, r + count) see together.
  MEMBER Span columns(int64_t r, int64_t count, Span all) const {
    int64_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t i = r; i < r + count; ++i) {
      if (lower) least = imin(least, lower[i]);
      if (upper) most = imax(most, upper[i]);
    }
    return {lower ? imax(all.first, least - lower_x) : all.first, upper ? imin(all.last, most - upper_x) : all.last};
  }
  // The vectors of rows (in rows) that see some of the columns [n, n + count).
  MEMBER Span rows(int64_t n, int64_t count, int64_t all) const {
    int64_t first = all, last = 0;
    for (int64_t r = 0; r < all; r += VL) {
      vm some = vmset(true);
      if (lower) some = vand(some, vle(viload(lower + r), viset(n + count - 1 + lower_x)));
      if (upper) some = vand(some, vlt(viset(n + upper_x), viload(upper + r)));
      if (vany(some)) first = imin(first, r), last = r + VL;
    }
    return {first, last};
  }
};

// Rows in strips of MR; what is left splits evenly (8 = 4 + 4), so that no strip is too thin to hide the latency of the FMAs.
INLINE int64_t strip_rows(int64_t rows) { return rows > MR && rows < MR + MR / 2 ? (rows + 1) / 2 : imin(rows, MR); }

// The rows of a product whose result lies row by row; `seen`: of the contraction, which runs over the columns of a masked tile.
template <int N, bool ADD, Scale SCALE, class T>
static void strips(int64_t rows, const float* a, int64_t si, int64_t st, const T* b, int64_t ldb, Span t, float* c, int64_t ldc, const float* scale, const Seen* seen, bool zero) {
  for (int64_t i = 0; i < rows;) {
    const int64_t r = strip_rows(rows - i);
    const Span s = seen ? seen->columns(i, r, t) : t;
    strip<N, ADD, SCALE>(r, a + i * si + s.first * st, si, st, b + s.first * ldb, ldb, imax(0, s.last - s.first), c + i * ldc, ldc, scale + (SCALE == BY_ROW ? i : 0), zero);
    i += r;
  }
}
// LANE_COUNT lanes, a multiple of VL: blocks of NV vectors, and one narrower block.
template <int LANE_COUNT, bool ADD, Scale SCALE, class T>
INLINE void product_rows(int64_t rows, const float* a, int64_t si, int64_t st, const T* b, int64_t ldb, Span t, float* c, int64_t ldc, const float* scale, const Seen* seen = nullptr, bool zero = false) {
  constexpr int REST = LANE_COUNT % LANES / VL, WHOLE = LANE_COUNT - REST * VL;
  for (int j = 0; j < WHOLE; j += LANES) strips<NV, ADD, SCALE>(rows, a, si, st, b + j, ldb, t, c + j, ldc, scale, seen, zero);
  if constexpr (REST > 0) strips<REST, ADD, SCALE>(rows, a, si, st, b + WHOLE, ldb, t, c + WHOLE, ldc, scale, seen, zero);
}

// A product whose result has its rows in lanes: columns [n.first, n.last), each from a row of the broadcast operand. Without ADD the last strip
// may overlap the one before: computing a column twice does no harm.
template <int N, bool ADD, Scale SCALE>
INLINE void column_strip(int64_t r, const float* a, int64_t si, int64_t st, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, const float* scale) {
  if constexpr (ADD) return strip<N, ADD, SCALE>(r, a, si, st, b, ldb, depth, c, ldc, scale);
  else if (r == MR) return micro<MR, N, ADD, SCALE>(a, si, st, b, ldb, depth, c, ldc, scale);
  for (int64_t i = 0; i < r; ++i) micro<1, N, ADD, SCALE>(a + i * si, si, st, b, ldb, depth, c + i * ldc, ldc, scale);
}
template <int N, bool ADD, Scale SCALE>
INLINE void some_lanes(int64_t vectors, int64_t r, const float* a, int64_t si, int64_t st, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, const float* scale) {
  if (vectors >= N) return column_strip<N, ADD, SCALE>(r, a, si, st, b, ldb, depth, c, ldc, scale);
  if constexpr (N > 1) some_lanes<N - 1, ADD, SCALE>(vectors, r, a, si, st, b, ldb, depth, c, ldc, scale);
}
template <int LANE_COUNT, bool ADD, Scale SCALE>
static void product_lanes(Span n, const float* a, int64_t si, int64_t st, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, const float* scale, const Seen* seen = nullptr) {
  for (int64_t i = n.first; i < n.last;) {
    int64_t r = ADD ? strip_rows(n.last - i) : imin(MR, n.last - i);
    if (!ADD && r < MR && n.last - n.first >= MR) i = n.last - MR, r = MR;
    const Span lanes = seen ? seen->rows(i, r, LANE_COUNT) : Span{0, LANE_COUNT};
    for (int64_t j = lanes.first; j < lanes.last; j += LANES)
      some_lanes<NV, ADD, SCALE>((lanes.last - j) / VL, r, a + i * si, si, st, b + j, ldb, depth, c + i * ldc + j, ldc, scale + (SCALE == BY_LANE ? j : 0));
    i += r;
  }
}

// VL sums from VL vectors: VL - 1 adds and 2 (VL - 1) shuffles, against 4 VL shuffles for as many separate sums.
INLINE vf sum_each(vf* r) {
#if defined(__AVX512F__)
  UNROLL for (int i = 0; i < 8; ++i) r[i] = _mm512_unpacklo_ps(r[i], r[i + 8]) + _mm512_unpackhi_ps(r[i], r[i + 8]);
  UNROLL for (int i = 0; i < 4; ++i) r[i] = _mm512_unpacklo_ps(r[i], r[i + 4]) + _mm512_unpackhi_ps(r[i], r[i + 4]);
  UNROLL for (int i = 0; i < 2; ++i) r[i] = _mm512_shuffle_f32x4(r[i], r[i + 2], 0x88) + _mm512_shuffle_f32x4(r[i], r[i + 2], 0xdd);
  r[0] = _mm512_shuffle_f32x4(r[0], r[1], 0x88) + _mm512_shuffle_f32x4(r[0], r[1], 0xdd);
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15), r[0]);
#else
  UNROLL for (int i = 0; i < 4; ++i) r[i] = _mm256_hadd_ps(r[2 * i], r[2 * i + 1]);
  UNROLL for (int i = 0; i < 2; ++i) r[i] = _mm256_hadd_ps(r[2 * i], r[2 * i + 1]);
  return _mm256_permute2f128_ps(r[0], r[1], 0x20) + _mm256_permute2f128_ps(r[0], r[1], 0x31);
#endif
}

// c[r][n] (+)= sum over t < depth of a[r][t] * b[n][t] for R rows: both operands run along the contraction, every byte of b is read once.
// depth is a multiple of VL. Writes up to VL - 1 columns past the last.
template <int R, bool ADD, Scale SCALE, class T>
static void dot_rows(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t first, int64_t last, int64_t depth, float* c, int64_t ldc, const float* scale) {
  constexpr int COLS = VL / R, AHEAD = 8;
  for (int64_t n = first; n < last; n += COLS) {
    vf acc[VL];
    UNROLL for (int i = 0; i < VL; ++i) acc[i] = vset(0);
    UNROLL for (int i = 0; i < COLS; ++i) {
      const T* row = b + imin(n + i, last - 1) * ldb;
      for (int64_t t = 0; t < depth; t += VL) {
        __builtin_prefetch(row + AHEAD * ldb + t);
        const vf x = vload(row + t);
        UNROLL for (int r = 0; r < R; ++r) acc[r * COLS + i] = vfma(x, vload(a + r * lda + t), acc[r * COLS + i]);
      }
    }
    float sums[VL];
    vstore(sums, sum_each(acc));
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int i = 0; i < COLS; ++i) {
      float* at = c + r * ldc + n + i;
      *at = sums[r * COLS + i] + (!ADD ? 0.f : SCALE == BY_ROW ? *at * scale[r] : *at);
    }
  }
}
template <int ROWS, bool ADD, Scale SCALE, class T>
INLINE void dot_product(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t first, int64_t last, int64_t depth, float* c, int64_t ldc, const float* scale) {
  constexpr int R = ROWS >= 4 ? 4 : ROWS >= 2 ? 2 : 1;
  dot_rows<R, ADD, SCALE>(a, lda, b, ldb, first, last, depth, c, ldc, scale);
  if constexpr (ROWS > R) dot_product<ROWS - R, ADD, SCALE>(a + R * lda, lda, b, ldb, first, last, depth, c + R * ldc, ldc, scale + (SCALE == BY_ROW ? R : 0));
}

// VL x VL transpose in registers.
INLINE void transpose_block(vf* r) {
#if defined(__AVX512F__)
  vf t[16];
  UNROLL for (int i = 0; i < 16; i += 4) {
    vf a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    vf c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    vf a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    vf c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
#else
  vf t[8];
  UNROLL for (int i = 0; i < 8; i += 4) {
    vf a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    vf c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  UNROLL for (int i = 0; i < 4; ++i)
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20), r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
#endif
}

// out[c * ld_out + r] = in[r * ld + c] for r < rows, c < cols; zero for rows up to padded_rows and for columns up to padded_cols.
template <class T>
static void transpose(const T* in, int64_t ld, int64_t rows, int64_t cols, float* out, int64_t ld_out, int64_t padded_rows, int64_t padded_cols) {
  int64_t c0 = 0;
  const int64_t whole = rows / VL * VL;
  for (; c0 + VL <= cols; c0 += VL)
    for (int64_t r0 = 0; r0 < whole; r0 += VL) {
      vf block[VL];
      UNROLL for (int i = 0; i < VL; ++i) block[i] = vload(in + (r0 + i) * ld + c0);
      transpose_block(block);
      UNROLL for (int i = 0; i < VL; ++i) vstore(out + (c0 + i) * ld_out + r0, block[i]);
    }
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = c < c0 ? whole : 0; r < rows; ++r) out[c * ld_out + r] = to_float(in[r * ld + c]);
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = rows; r < padded_rows; ++r) out[c * ld_out + r] = 0;
  for (int64_t c = cols; c < padded_cols; ++c)
    for (int64_t r = 0; r < padded_rows; ++r) out[c * ld_out + r] = 0;
}

// Rows [first, last) of a tile of `cols` columns as rows of `padded` columns, in scratch. What lies beyond valid_rows or valid_cols is zero.
template <class T, class Out>
static void pack_rows(const T* p, int64_t ld, int64_t first, int64_t last, int64_t valid_rows, int64_t cols, int64_t valid_cols, int64_t padded, Out* scratch) {
  const int64_t filled = imin(cols, valid_cols), whole = filled / VL * VL;
  for (int64_t r = first; r < last; ++r) {
    Out* out = scratch + r * padded;
    int64_t c = 0;
    if (r < valid_rows) {
      const T* in = p + r * ld;
      for (; c < whole; c += VL) vstore(out + c, vload(in + c));
      for (; c < filled; ++c) from_float(out + c, to_float(in[c]));
    }
    for (; c < padded; ++c) from_float(out + c, 0);
  }
}
template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
// The same rows where they lie, unless they have to be padded or converted, or lie a multiple of 2 KiB apart: these would share a few L1 sets.
template <class T, class Out>
INLINE View<Out> view_rows(const T* p, int64_t ld, int64_t first, int64_t last, int64_t valid_rows, int64_t cols, int64_t valid_cols, int64_t padded, Out* scratch) {
  if constexpr (is_same<T, Out>)
    if (last <= valid_rows && valid_cols >= cols && cols == padded && (ld * (int64_t)sizeof(T) % 2048 != 0 || last - first < 2)) return {p, ld};
  pack_rows(p, ld, first, last, valid_rows, cols, valid_cols, padded, scratch);
  return {scratch, padded};
}

// Rows of a tile that lies row by row, into a matrix of any dtype; multiplied by a value a row, unless scale is null.
template <class T> static void store_rows(T* p, int64_t ld, int64_t rows, int64_t cols, const float* tile, int64_t ld_tile, const float* scale) {
  const int64_t whole = cols / VL * VL;
  for (int64_t r = 0; r < rows; ++r) {
    const float by = scale ? scale[r] : 1;
    for (int64_t c = 0; c < whole; c += VL) vstore(p + r * ld + c, vload(tile + r * ld_tile + c) * vset(by));
    for (int64_t c = whole; c < cols; ++c) from_float(p + r * ld + c, tile[r * ld_tile + c] * by);
  }
}
// The same for a tile that lies column by column, its rows in lanes.
template <class T> static void store_lanes(T* p, int64_t ld, int64_t rows, int64_t cols, const float* tile, int64_t ld_tile, const float* scale) {
  for (int64_t r0 = 0; r0 < rows; r0 += VL)
    for (int64_t c0 = 0; c0 < cols; c0 += VL) {
      const int64_t r1 = imin(rows - r0, VL), c1 = imin(cols - c0, VL);
      if (r1 == VL && c1 == VL) {
        vf block[VL];
        const vf by = scale ? vload(scale + r0) : vset(1);
        UNROLL for (int i = 0; i < VL; ++i) block[i] = vload(tile + (c0 + i) * ld_tile + r0) * by;
        transpose_block(block);
        UNROLL for (int i = 0; i < VL; ++i) vstore(p + (r0 + i) * ld + c0, block[i]);
      } else {
        for (int64_t r = 0; r < r1; ++r)
          for (int64_t c = 0; c < c1; ++c) from_float(p + (r0 + r) * ld + c0 + c, tile[(c0 + c) * ld_tile + r0 + r] * (scale ? scale[r0 + r] : 1));
      }
    }
}
// VL values `stride` apart: how a statement reads a tile whose layout is the other one.
INLINE vf gather(const float* p, int64_t stride) {
  float t[VL];
  for (int i = 0; i < VL; ++i) t[i] = p[i * stride];
  return vload(t);
}
INLINE void scatter(float* p, int64_t stride, vf x) {
  float t[VL];
  vstore(t, x);
  for (int i = 0; i < VL; ++i) p[i * stride] = t[i];
}
}  // namespace
