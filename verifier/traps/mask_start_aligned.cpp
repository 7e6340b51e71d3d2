// Counts positions from the start of both sequences: the right mask for another convention.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  float* scores = (float*)malloc(sizeof(float) * (size_t)(c.seqlen_k + 1));
  for (int64_t i = 0; i < c.rows(); ++i) {
    int64_t row = i % c.seqlen_q, h = i / c.seqlen_q % c.num_heads, b = i / c.seqlen_q / c.num_heads;
    attend_row(c, b, h, row, row + 1 < c.seqlen_k ? row + 1 : c.seqlen_k, scores);
  }
  free(scores);
  return 0;
}
