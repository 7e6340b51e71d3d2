// Copies and accesses of fewer than 16 bytes at a time, for rows that do not begin at multiples of 16 bytes.
#if __CUDA_ARCH__ >= 800
// BYTES: 4, 8 or 16 (PTX ISA: cp.async.ca). Of them `bytes` are copied and the rest becomes zeros; of 0 bytes no address is read.
template <int BYTES> DEVICE void copy_async(u32 to, const char* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}
DEVICE void copy_async_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // this thread's copies
#endif
DEVICE uint4 load_global8(const char* p, const char* q) {  // two times 8 bytes
  uint4 x;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.z), "=r"(x.w) : "l"(q) : "memory");
  return x;
}
DEVICE u32 load_global4(const char* p) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
DEVICE u16 load_global2(const char* p) {
  u16 x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
  return x;
}
DEVICE void store_global8(char* p, u32 x, u32 y, bool yes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}\n" ::"l"(p), "r"(x), "r"(y), "r"((int)yes) : "memory");
}
