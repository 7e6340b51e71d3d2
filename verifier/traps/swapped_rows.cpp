// The right rows in the wrong order: every sum over the output is right.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.num_heads; ++h)
      for (int64_t row = 0; row + 1 < c.seqlen_q; row += 2)
        for (int d = 0; d < HEAD_DIM_V; ++d) {
          element *x = c.at(O, b, h, row) + d, *y = c.at(O, b, h, row + 1) + d, z = *x;
          *x = *y;
          *y = z;
        }
  return code;
}
