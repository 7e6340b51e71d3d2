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
struct NoScope {};
struct FlushDenormals {
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

// Memory that outlives a call: a call takes what the last one left, if it is large enough, so that pages are not given back to the system and
// zeroed again each time. Calls at the same time each have their own. What is larger than `kept` is given back; all of it with the library.
template <int WHICH> struct Reserve {
  static constexpr int64_t header = 4096, kept = 64 << 20;
  static inline char* spare = nullptr;
  static char* take(int64_t bytes) {
    char* p = __atomic_exchange_n(&spare, (char*)nullptr, __ATOMIC_ACQ_REL);
    if (p && *(int64_t*)p >= bytes) return p + header;
    free(p);
    void* fresh = nullptr;
    if (posix_memalign(&fresh, 4096, (size_t)(bytes + header)) != 0) return nullptr;
    *(int64_t*)fresh = bytes;
    return (char*)fresh + header;
  }
  static void give(char* p) {
    if (!p) return;
    p -= header;
    if (*(int64_t*)p <= kept) p = __atomic_exchange_n(&spare, p, __ATOMIC_ACQ_REL);
    free(p);
  }
};
typedef Reserve<0> ScratchReserve;
typedef Reserve<1> PackReserve;
__attribute__((destructor)) static void give_reserves_back() { free(ScratchReserve::spare), free(PackReserve::spare); }

// Threads draw item numbers until none is left; each has its own scratch. First what all blocks share is packed, then the blocks run.
// Safe with fewer threads than asked for: whoever waits, waits for packing that a running thread has begun.
template <class Work> struct Crew {
  const FarmCall& call;
  int64_t num_packs, num_blocks;
  const void* shared;
  int64_t next_pack = 0, packed = 0, next_block = 0, arrived = 0;
  char* scratch = nullptr;

  static constexpr int64_t bytes() { return (int64_t)(sizeof(Work) + 4095) / 4096 * 4096; }

  static void join(void* data) {
    Crew& crew = *(Crew*)data;
    FlushDenormals flush;
    typename Work::Scope scope;
    Work& work = *(Work*)(crew.scratch + __atomic_fetch_add(&crew.arrived, 1, __ATOMIC_RELAXED) * bytes());
    work.begin(crew.call);
    work.shared = (decltype(work.shared))crew.shared;
    for (int64_t i; (i = __atomic_fetch_add(&crew.next_pack, 1, __ATOMIC_RELAXED)) < crew.num_packs; __atomic_fetch_add(&crew.packed, 1, __ATOMIC_RELEASE)) work.pack(i);
    while (__atomic_load_n(&crew.packed, __ATOMIC_ACQUIRE) < crew.num_packs) _mm_pause();
    for (int64_t i; (i = __atomic_fetch_add(&crew.next_block, 1, __ATOMIC_RELAXED)) < crew.num_blocks;) work.run(i);
  }

  int32_t run() {  // 0: done; 1: no memory for scratch
    if (num_blocks <= 0) return 0;
    const int64_t threads = call.parallel ? imax(1, imin(call.num_threads, imax(num_packs, num_blocks))) : 1;
    scratch = ScratchReserve::take(bytes() * threads);
    if (!scratch) return 1;
    if (threads == 1) join(this);
    else call.parallel(join, this, (unsigned)threads, 0);
    ScratchReserve::give(scratch);
    return 0;
  }
};

// Copies that do not change along the first axis of the grid, made once for all blocks that share them. A slot holds what one place on the other
// axes needs: `tiles` tiles of `bytes` each, and one of zeros behind all slots for tiles past the end.
struct Packs {
  int64_t* slot_of = nullptr;  // by place on the other axes
  int64_t* place_of = nullptr; // by slot
  int64_t slots = 0, tiles = 0, bytes = 0;
  char* memory = nullptr;

  // same(i): whether place i shares its matrices with place i - 1; tiles(i): how many tiles it has.
  // Where no two blocks share a slot there is nothing to gain, and memory stays null.
  template <class Same, class Tiles> bool prepare(int64_t places, int64_t blocks, int64_t bytes_of_tile, Same same, Tiles tiles_of) {
    slot_of = (int64_t*)malloc((size_t)(places + 1) * 16);
    if (!slot_of) return false;
    place_of = slot_of + places;
    bytes = (bytes_of_tile + 63) / 64 * 64;
    for (int64_t i = 0; i < places; ++i) {
      if (!same(i)) place_of[slots++] = i;
      slot_of[i] = slots - 1;
      tiles = imax(tiles, tiles_of(i));
    }
    if (slots >= blocks || tiles == 0) return slots = 0, true;
    memory = PackReserve::take(bytes * (slots * tiles + 1));
    if (!memory) return false;
    __builtin_memset(memory + bytes * slots * tiles, 0, (size_t)bytes);
    return true;
  }
  MEMBER char* tile(int64_t slot, int64_t index) const { return memory + bytes * ((uint64_t)index < (uint64_t)tiles ? slot * tiles + index : slots * tiles); }
  ~Packs() { PackReserve::give(memory), free(slot_of); }
};
}  // namespace
