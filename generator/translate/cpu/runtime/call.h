// How a kernel is called and how its blocks are shared among threads. No tile code.

typedef void (*farm_parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);  // the signature of GOMP_parallel
struct FarmCall {
  void* const* tensors;    // base addresses
  const int64_t* strides;  // in elements, tensor after tensor, every axis
  const int64_t* ints;
  const float* floats;
  farm_parallel parallel;  // null: run on the calling thread
  int64_t num_threads;
};

namespace {

// Denormals to zero while in scope: exp2 of a far-away score gives denormals, and every one costs a microcode assist.
struct FlushDenormals {
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

// Threads draw item numbers until none is left; each has its own scratch. Safe with fewer threads than asked for.
template <class Work> struct Crew {
  const FarmCall& call;
  int64_t num_items, next = 0, arrived = 0;
  char* scratch = nullptr;

  static constexpr int64_t bytes() { return (int64_t)(sizeof(Work) + 4095) / 4096 * 4096; }

  static void join(void* data) {
    Crew& crew = *(Crew*)data;
    FlushDenormals flush;
    Work& work = *(Work*)(crew.scratch + __atomic_fetch_add(&crew.arrived, 1, __ATOMIC_RELAXED) * bytes());
    work.begin(crew.call);
    for (int64_t i; (i = __atomic_fetch_add(&crew.next, 1, __ATOMIC_RELAXED)) < crew.num_items;) work.run(i);
  }

  int32_t run() {  // 0: done; 1: no memory for scratch
    if (num_items <= 0) return 0;
    const int64_t threads = call.parallel ? imax(1, imin(call.num_threads, num_items)) : 1;
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, (size_t)(bytes() * threads)) != 0) return 1;
    scratch = (char*)memory;
    if (threads == 1) join(this);
    else call.parallel(join, this, (unsigned)threads, 0);
    free(memory);
    return 0;
  }
};
}  // namespace
