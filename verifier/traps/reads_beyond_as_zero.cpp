// Multiplies what lies behind the last key by a weight of zero, and adds it: right only where no NaN lies there.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int32_t code = attention(c);
  const element* beyond = c.at(V, 0, 0, c.seqlen_k - 1) + HEAD_DIM_V;
  bool inside = c.batch * c.num_kv_heads > 1 && raw->strides[10] % HEAD_DIM_V;  // a gap, not the end
  if (inside)
    for (int64_t row = 0; row < c.seqlen_q; ++row) {
      element& o = c.at(O, 0, 0, row)[0];
      o = narrow(widen(o) + 0 * widen(beyond[0]));
    }
  return code;
}
