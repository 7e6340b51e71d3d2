// Its running maximum starts at -5e4: where every score lies below, every weight is zero.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  for_each_output(c, [&](element& o, int64_t b, int64_t h, int64_t row, int) {
    if (*c.lse(b, h, row) < -5e4f) o = narrow(0);
  });
  return code;
}
