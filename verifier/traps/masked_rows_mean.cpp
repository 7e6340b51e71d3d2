// A row that sees nothing gets the mean of V, as from a softmax over equal finite numbers; its LSE is a large negative number.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.num_heads; ++h)
      for (int64_t row = 0; row < c.seqlen_q; ++row)
        if (c.last_key(row) == 0) *c.lse(b, h, row) = -1e30f;
  return code;
}
