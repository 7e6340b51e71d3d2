// Divides zero by zero where a row sees nothing.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  for_each_output(c, [&](element& o, int64_t, int64_t, int64_t row, int) {
    if (c.last_key(row) == 0) o = narrow(NAN);
  });
  return code;
}
