// Hides the key at the query's own position too (or, without a mask, the last key).
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  float* scores = (float*)malloc(sizeof(float) * (size_t)(c.seqlen_k + 1));
  for (int64_t i = 0; i < c.rows(); ++i) {
    int64_t row = i % c.seqlen_q, h = i / c.seqlen_q % c.num_heads, b = i / c.seqlen_q / c.num_heads;
    int64_t end = c.last_key(row);
    attend_row(c, b, h, row, end > 1 ? end - 1 : end, scores);
  }
  free(scores);
  return 0;
}
