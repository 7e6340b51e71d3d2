// Does nothing and reports success, as a launch that failed without a word does.
extern "C" int32_t attention_kernel(const FarmCall*) { return 0; }
