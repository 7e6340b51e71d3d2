// Vector types and element-wise maths, one instruction set per translation unit: what generated CPU kernels emit, not a general SIMD library.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {  // internal linkage: objects built with different -m flags must never share an inline function

constexpr float INF = __builtin_inff();

#if defined(__AVX512F__)
constexpr int VL = 16, NV = 4, MR = 6;  // lanes of a vector; a register tile of the GEMMs is MR rows of NV vectors: 24 of 32 registers
typedef __m512 vf;
typedef __mmask16 vm;
#else
constexpr int VL = 8, NV = 2, MR = 6;  // 12 of 16 registers
typedef __m256 vf;
typedef __m256 vm;
#endif
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(VL * 4)));  // +, - and * are 32-bit, unlike those of __m512i
constexpr int LANES = NV * VL;
constexpr int64_t up(int64_t n) { return (n + VL - 1) / VL * VL; }  // whole vectors

INLINE vi viset(int64_t x) { return vi{} + (int32_t)x; }
INLINE vi viload(const int32_t* p) { vi x; __builtin_memcpy(&x, p, sizeof x); return x; }
INLINE void vistore(int32_t* p, vi x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE vi viota() { vi x; for (int i = 0; i < VL; ++i) x[i] = i; return x; }

#if defined(__AVX512F__)
INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vset(float x) { return _mm512_set1_ps(x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vneg(vf a) { return (vf)((__m512i)a ^ _mm512_set1_epi32((int)0x80000000)); }
INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
INLINE vi vifloor(vf a) { return (vi)_mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE vf vsqrt(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf vcvt(vi a) { return _mm512_cvtepi32_ps((__m512i)a); }
INLINE vi vimax(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vi vimin(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vm vlt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vm vle(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE vm veq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE vm vlt(vi a, vi b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vm vle(vi a, vi b) { return _mm512_cmple_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vm veq(vi a, vi b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vm vand(vm a, vm b) { return a & b; }
INLINE vm vor(vm a, vm b) { return a | b; }
INLINE vm vnot(vm a) { return ~a; }
INLINE vm vmset(bool x) { return x ? 0xffff : 0; }
INLINE bool vany(vm m) { return m != 0; }
INLINE vf vsel(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
INLINE vi vsel(vm m, vi a, vi b) { return (vi)_mm512_mask_blend_epi32(m, (__m512i)b, (__m512i)a); }
INLINE float vhmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE float vhadd(vf a) { return _mm512_reduce_add_ps(a); }
#else
INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf vset(float x) { return _mm256_set1_ps(x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vneg(vf a) { return _mm256_xor_ps(a, vset(-0.f)); }
INLINE vf vabs(vf a) { return _mm256_andnot_ps(vset(-0.f), a); }
INLINE vi vifloor(vf a) { return (vi)_mm256_cvttps_epi32(_mm256_floor_ps(a)); }
INLINE vf vsqrt(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf vcvt(vi a) { return _mm256_cvtepi32_ps((__m256i)a); }
INLINE vi vimax(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vi vimin(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE vm vlt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
INLINE vm vle(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
INLINE vm veq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE vm vnot(vm a) { return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1))); }
INLINE vm vlt(vi a, vi b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32((__m256i)b, (__m256i)a)); }
INLINE vm vle(vi a, vi b) { return vnot(vlt(b, a)); }
INLINE vm veq(vi a, vi b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32((__m256i)a, (__m256i)b)); }
INLINE vm vand(vm a, vm b) { return _mm256_and_ps(a, b); }
INLINE vm vor(vm a, vm b) { return _mm256_or_ps(a, b); }
INLINE vm vmset(bool x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x ? -1 : 0)); }
INLINE bool vany(vm m) { return _mm256_movemask_ps(m) != 0; }
INLINE vf vsel(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
INLINE vi vsel(vm m, vi a, vi b) { return (vi)_mm256_castps_si256(vsel(m, _mm256_castsi256_ps((__m256i)a), _mm256_castsi256_ps((__m256i)b))); }
INLINE float vhmax(vf a) { float t[8], r; vstore(t, a); r = t[0]; for (int i = 1; i < 8; ++i) r = r > t[i] ? r : t[i]; return r; }
INLINE float vhadd(vf a) { float t[8], r = 0; vstore(t, a); for (int i = 0; i < 8; ++i) r += t[i]; return r; }
#endif
INLINE vm vgt(vf a, vf b) { return vlt(b, a); }
INLINE vm vge(vf a, vf b) { return vle(b, a); }
INLINE vm vne(vf a, vf b) { return vnot(veq(a, b)); }
INLINE vm vgt(vi a, vi b) { return vlt(b, a); }
INLINE vm vge(vi a, vi b) { return vle(b, a); }
INLINE vm vne(vi a, vi b) { return vnot(veq(a, b)); }

// One scalar function lane by lane: for what is rare (logarithms of an epilogue, integer division).
template <class F> INLINE vf vmap(vf a, F f) {
  float t[VL];
  vstore(t, a);
  for (int i = 0; i < VL; ++i) t[i] = f(t[i]);
  return vload(t);
}
template <class F> INLINE vi vimap(vi a, vi b, F f) {
  for (int i = 0; i < VL; ++i) a[i] = (int32_t)f(a[i], b[i]);
  return a;
}
INLINE vf vlog(vf a) { return vmap(a, [](float x) { return __builtin_logf(x); }); }
INLINE vf vlog2(vf a) { return vmap(a, [](float x) { return __builtin_log2f(x); }); }

// Whole numbers: division rounds towards minus infinity, and gives 0 by 0.
INLINE int64_t floordiv(int64_t a, int64_t b) { return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0)); }
INLINE int64_t ceildiv(int64_t a, int64_t b) { return -floordiv(-a, b); }
INLINE int64_t modulo(int64_t a, int64_t b) { return a - floordiv(a, b) * b; }
INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float fmin_(float a, float b) { return a < b ? a : b; }
INLINE float fmax_(float a, float b) { return a > b ? a : b; }
INLINE vi vidiv(vi a, vi b) { return vimap(a, b, floordiv); }
INLINE vi viceildiv(vi a, vi b) { return vimap(a, b, ceildiv); }
INLINE vi vimod(vi a, vi b) { return vimap(a, b, modulo); }

// 2^x for x <= ~128; 2^-inf = 0. Degree 5: 1e-7 relative; 4: 4e-6; 3: 1e-4 (below the rounding of bf16).
template <int DEGREE> INLINE vf exp2_mantissa(vf f) {  // 2^f, f in [0, 1)
  if constexpr (DEGREE == 5) {
    vf p = vfma(vset(1.8775743e-3f), f, vset(8.9893453e-3f));
    p = vfma(p, f, vset(5.5826314e-2f));
    p = vfma(p, f, vset(2.4015361e-1f));
    p = vfma(p, f, vset(6.9315308e-1f));
    return vfma(p, f, vset(9.9999994e-1f));
  } else if constexpr (DEGREE == 4) {
    vf p = vfma(vset(1.35206032e-2f), f, vset(5.20374288e-2f));
    p = vfma(p, f, vset(2.41427493e-1f));
    p = vfma(p, f, vset(6.93006621e-1f));
    return vfma(p, f, vset(1.00000252f));
  } else {
    vf p = vfma(vset(7.8024194e-2f), f, vset(2.2606722e-1f));
    p = vfma(p, f, vset(6.9583374e-1f));
    return vfma(p, f, vset(9.9992520e-1f));
  }
}
template <int DEGREE = 5> INLINE vf vexp2(vf x) {
#if defined(__AVX512F__)
  vf f = _mm512_reduce_ps(x, 1);                              // x - floor(x); +0 for infinities
  return _mm512_scalef_ps(exp2_mantissa<DEGREE>(f), x);       // takes floor(x) itself, and gives 0 for -inf
#else
  vm large = vlt(vset(127.99999f), x), nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  vf y = vmin(vmax(x, vset(-127.f)), vset(127.99999f));       // 2^-127 has a zero exponent field: 0 after the shift below
  vf r = _mm256_floor_ps(y);
  vi e = ((vi)_mm256_cvtps_epi32(r) + 127) << 23;
  vf p = exp2_mantissa<DEGREE>(y - r) * (vf)e;
  return vsel(nan, x, vsel(large, vset(INF), p));
#endif
}
// e^x as 2^(x log2 e), with the rounding error of the product put back.
template <int DEGREE = 5> INLINE vf vexp(vf x) {
  const vf y = x * vset(1.44269502f);
  const vf error = vfma(x, vset(1.92596299e-8f), vfma(x, vset(1.44269502f), vneg(y)));
  const vf e = vexp2<DEGREE>(y), corrected = vfma(e, error * vset(0.693147182f), e);
  return vsel(vlt(vabs(y), vset(INF)), corrected, e);
}
// Odd polynomial near zero, where 1 - 2 / (1 + e^2x) would cancel.
INLINE vf vtanh(vf x) {
  const vf a = vabs(x), q = a * a;
  const vf e = vexp2<5>(vmin(a, vset(15.f)) * vset(2.88539008f));
  const vf far = vset(1.f) - vset(2.f) / (e + vset(1.f));
  vf p = vfma(vset(-5.69199e-3f), q, vset(2.062629e-2f));
  p = vfma(p, q, vset(-5.373532e-2f));
  p = vfma(p, q, vset(1.3331381e-1f));
  p = vfma(p, q, vset(-3.3333279e-1f));
  const vf near = vfma(p * q, a, a), y = vsel(vlt(a, vset(0.625f)), near, far);
  return vsel(vlt(x, vset(0.f)), vneg(y), y);
}

// ------------------------------------------------------------------------------------------------ 16-bit values

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
INLINE float to_float(float x) { return x; }
INLINE float to_float(int32_t x) { return (float)x; }
INLINE float to_float(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; float f; __builtin_memcpy(&f, &u, 4); return f; }
INLINE float to_float(f16 x) { return _cvtsh_ss(x.bits); }
INLINE void from_float(float* p, float x) { *p = x; }
INLINE void from_float(bf16* p, float x) {  // to the nearest, ties to even
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  p->bits = (uint16_t)(x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE void from_float(f16* p, float x) { p->bits = _cvtss_sh(x, 0); }
INLINE float round_bf16(float x) { bf16 t; from_float(&t, x); return to_float(t); }
INLINE float round_f16(float x) { return _cvtsh_ss(_cvtss_sh(x, 0)); }

#if defined(__AVX512F__)
INLINE vf vload(const bf16* p) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16); }
INLINE vf vload(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE __m512i bf16_bits(vf x) {  // rounded, in the upper halves; the lower halves are not cleared
  __m512i u = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
INLINE vf vround_f16(vf x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, 0)); }
#if defined(__AVX512BF16__)
INLINE __m256i to_bf16(vf x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE vf vround_bf16(vf x) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(x)), 16); }
#else
INLINE __m256i to_bf16(vf x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16)); }
INLINE vf vround_bf16(vf x) { return (vf)_mm512_and_si512(bf16_bits(x), _mm512_set1_epi32((int)0xffff0000)); }
#endif
INLINE void vstore(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
INLINE void vstore(f16* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
#else
INLINE vf vload(const bf16* p) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16); }
INLINE vf vload(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256i bf16_bits(vf x) {
  __m256i u = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  return (__m256i)vsel(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), (vf)_mm256_set1_epi32(0x7fc00000), (vf)up);
}
INLINE vf vround_bf16(vf x) { return (vf)_mm256_and_si256(bf16_bits(x), _mm256_set1_epi32((int)0xffff0000)); }
INLINE vf vround_f16(vf x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)); }
INLINE void vstore(bf16* p, vf x) {
  __m256i u = _mm256_srli_epi32(bf16_bits(x), 16), w = _mm256_packus_epi32(u, u);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(w, 0x08)));
}
INLINE void vstore(f16* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
#endif
}  // namespace
