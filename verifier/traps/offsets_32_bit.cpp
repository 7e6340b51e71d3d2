// Multiplies row and stride in 32 bits.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  float sum = 0;
  for (int64_t key = 0; key < c.seqlen_k; ++key) {
    int32_t offset = (int32_t)((uint32_t)key * (uint32_t)raw->strides[6]);
    sum += widen(((const element*)raw->tensors[K])[offset]);
  }
  return attention(c) + (sum == 0.123f ? 1 : 0);
}
