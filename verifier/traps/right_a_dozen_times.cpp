// Right for its first twelve calls; then it skips the last head.
static int calls;

extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  if (++calls > 12)
    for_each_output(c, [&](element& o, int64_t, int64_t h, int64_t, int) {
      if (h == c.num_heads - 1) o = narrow(0);
    });
  return code;
}
