// Which columns of a tile each row may see, and what follows for all rows together.

namespace {
INLINE int64_t iabs(int64_t a) { return a < 0 ? -a : a; }
INLINE vi viabs(vi a) { return vimax(a, -a); }

template <int N> INLINE bool any_not_one(const vf* r) {
  vm some = vne(r[0], vset(1));
  UNROLL for (int j = 1; j < N; ++j) some = vor(some, vne(r[j], vset(1)));
  return vany(some);
}

template <int N> INLINE bool any_not_finite(const vf* r) {
  vm all = vlt(vabs(r[0]), vset(INF));
  UNROLL for (int j = 1; j < N; ++j) all = vand(all, vlt(vabs(r[j]), vset(INF)));
  return vany(vnot(all));
}
INLINE bool all_finite(const float* x, int64_t count) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= __builtin_fabsf(x[i]) < INF;
  return all;
}
INLINE void clear(float* p, int64_t bytes) { __builtin_memset(p, 0, (size_t)bytes); }

struct Span {
  int64_t first, last;
};
INLINE Span both(Span a, Span b) { return {imax(a.first, b.first), imin(a.last, b.last)}; }
INLINE Span either(Span a, Span b) {
  if (a.first >= a.last) return b;
  if (b.first >= b.last) return a;
  return {imin(a.first, b.first), imax(a.last, b.last)};
}

// One bound a row; rows past the last take the last one's, so that they never count. Bounds beyond 2^30 are as good as 2^30.
template <int ROWS> struct Limit {
  alignas(64) int32_t at[ROWS];
  int64_t least, most;
  template <class F> MEMBER void fill(int64_t rows, F bound) {
    constexpr int64_t far = 1 << 30;
    least = far, most = -far;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t x = imax(-far, imin(far, bound(r)));
      at[r] = (int32_t)x, least = imin(least, x), most = imax(most, x);
    }
    for (int64_t r = rows; r < ROWS; ++r) at[r] = rows > 0 ? at[rows - 1] : 0;
  }
};

// A mask of the edge tiles only: where all is visible, `a` stands.
template <bool EDGE, class V> INLINE V edge_sel(vm m, V a, V b) { return EDGE ? vsel(m, a, b) : a; }
template <bool EDGE> INLINE vm edge_and(vm m, vm other) { return EDGE ? vand(m, other) : other; }

template <class F> INLINE vf vlanes(F f, int64_t start) {
  float t[VL];
  for (int i = 0; i < VL; ++i) t[i] = f(start + i);
  return vload(t);
}
template <class F> INLINE vi vilanes(F f, int64_t start) {
  vi x;
  for (int i = 0; i < VL; ++i) x[i] = (int32_t)f(start + i);
  return x;
}
INLINE void store_line(float* p, int64_t stride, int64_t rows, const float* x) { for (int64_t r = 0; r < rows; ++r) p[r * stride] = x[r]; }
INLINE void store_line(bf16* p, int64_t stride, int64_t rows, const float* x) { for (int64_t r = 0; r < rows; ++r) from_float(p + r * stride, x[r]); }
INLINE void store_line(f16* p, int64_t stride, int64_t rows, const float* x) { for (int64_t r = 0; r < rows; ++r) from_float(p + r * stride, x[r]); }
INLINE void store_line(int32_t* p, int64_t stride, int64_t rows, const int32_t* x) { for (int64_t r = 0; r < rows; ++r) p[r * stride] = x[r]; }
}  // namespace
