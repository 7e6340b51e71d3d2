// Single instructions behind functions, named as NVIDIA's PTX ISA has them: PTX stands in the files `ptx*.cuh` of the runtime only, and in
// the products that the translator writes out for wgmma. Addresses, pitches and widths are in bytes, rows and columns in elements.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define INF __int_as_float(0x7f800000)

enum Type { F16, BF16, F32, I32 };

DEVICE int block_number() {  // read anew at each call, so that nothing of it stays in registers
  int b;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
  return b;
}
// A value that the compiler cannot see through: what is computed from it is computed where it stands, and holds no registers before.
DEVICE int opaque(int x) { asm volatile("" : "+r"(x)); return x; }
DEVICE i64 opaque(i64 x) { asm volatile("" : "+l"(x)); return x; }

// Subnormal arguments and results of these two count as 0 (.ftz); relative error about 2^-22 and 2^-23 (PTX ISA: ex2, rcp).
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// At most 2 ulp where 2^-126 <= |b| <= 2^126 (PTX ISA: div.full); relative error of tanh about 2^-11 (tanh.approx.f32).
DEVICE float divide(float a, float b) { float y; asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
DEVICE float tanh_fast(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

template <Type T> DEVICE u16 narrow(float x) {
  u16 y;
#if __CUDA_ARCH__ >= 800
  if (T == BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  else
#endif
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
template <Type T> DEVICE float widen(u16 x) {
  if (T == BF16) return __uint_as_float((u32)x << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
template <Type T> DEVICE u32 pack2(float lo, float hi) {  // lo in the low half
  u32 y;
#if __CUDA_ARCH__ >= 800
  if (T == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
#else
  asm("mov.b32 %0, {%1, %2};" : "=r"(y) : "h"(narrow<T>(lo)), "h"(narrow<T>(hi)));
#endif
  return y;
}
template <int MT, int N> DEVICE void pin(float (&x)[MT][N]) {  // emits nothing; keeps uses on their side of it
  UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[t][i])::"memory");
}
template <int MT, int N> DEVICE void pin(u32 (&x)[MT][N]) {
  UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[t][i])::"memory");
}

// ---------------------------------------------------------------- shared memory, by 32 bit address
DEVICE u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u16 load_shared2(u32 a) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(a) : "memory");
  return x;
}
DEVICE void store_shared16(u32 a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Stores under a predicate rather than in a branch: where outputs are stored in branches, ptxas no longer knows a warp to be
// together and keeps what the main loop counts in vector registers, a move to a uniform register before every product.
DEVICE void store_global16(char* p, uint4 v, bool yes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}\n"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)yes) : "memory");
}
DEVICE void store_global4(char* p, u32 v, bool yes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u32 [%0], %1;\n}\n" ::"l"(p), "r"(v), "r"((int)yes) : "memory");
}
DEVICE void store_global2(char* p, u16 v, bool yes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}\n" ::"l"(p), "h"(v), "r"((int)yes) : "memory");
}
DEVICE uint4 load_global16(const char* p) {  // not moved by the compiler
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}
