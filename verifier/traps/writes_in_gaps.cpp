// Stores whole vectors: where rows have gaps between them, into the gaps.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  if (raw->strides[14] % HEAD_DIM_V)  // not merely heads in between
    for (int64_t row = 0; row + 1 < c.seqlen_q; ++row) c.at(O, 0, 0, row)[HEAD_DIM_V] = narrow(0);
  return code;
}
