// Crashes.
extern "C" int32_t attention_kernel(const FarmCall*) { return *(volatile int32_t*)8; }
