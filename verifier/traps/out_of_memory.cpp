// Says that it found no memory.
extern "C" int32_t attention_kernel(const FarmCall*) { return 1; }
