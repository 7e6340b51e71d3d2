// Loads keys with instructions that fault on addresses that are no multiple of 32.
#include <immintrin.h>

extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  for (int64_t key = 0; key < c.seqlen_k; ++key) {
    __m256 x;
    __asm__ volatile("vmovaps %1, %0" : "=x"(x) : "m"(*(const __m256*)c.at(K, 0, 0, key)));
  }
  return attention(c);
}
