// Right: the known good kernel.
extern "C" int32_t attention_kernel(const FarmCall* raw) { return attention(Call(raw)); }
