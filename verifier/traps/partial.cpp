// Leaves the last query row of the last head unwritten.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  float* scores = (float*)malloc(sizeof(float) * (size_t)(c.seqlen_k + 1));
  for (int64_t i = 0; i + 1 < c.rows() || (i == 0 && c.rows() == 1); ++i) {
    int64_t row = i % c.seqlen_q, h = i / c.seqlen_q % c.num_heads, b = i / c.seqlen_q / c.num_heads;
    attend_row(c, b, h, row, c.last_key(row), scores);
  }
  free(scores);
  return 0;
}
