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
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, (size_t)(bytes() * threads)) != 0) return 1;
    scratch = (char*)memory;
    if (threads == 1) join(this);
    else call.parallel(join, this, (unsigned)threads, 0);
    free(memory);
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
    void* p = nullptr;
    if (posix_memalign(&p, 4096, (size_t)(bytes * (slots * tiles + 1))) != 0) return false;
    memory = (char*)p;
    __builtin_memset(memory + bytes * slots * tiles, 0, (size_t)bytes);
    return true;
  }
  MEMBER char* tile(int64_t slot, int64_t index) const { return memory + bytes * ((uint64_t)index < (uint64_t)tiles ? slot * tiles + index : slots * tiles); }
  ~Packs() { free(memory), free(slot_of); }
};
}  // namespace
