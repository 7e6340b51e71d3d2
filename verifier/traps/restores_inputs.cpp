// Uses an input as scratch and puts it back: unseen afterwards, wrong for whoever reads it meanwhile.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  element kept = c.at(Q, 0, 0, 0)[0];
  *(volatile element*)c.at(Q, 0, 0, 0) = narrow(0);
  *(volatile element*)c.at(Q, 0, 0, 0) = kept;
  return attention(c);
}
