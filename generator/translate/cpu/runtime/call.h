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

// Copies that do not change along the first axis of the grid, made once for all blocks that share them. The blocks that share one are a slot: they
// stand behind each other in the grid. A thread takes a whole slot, packs into memory of its own that stays in its caches, and runs its blocks; a
// thread that finds no slot left helps with those of others, the packing included.
struct Slot {
  alignas(64) int64_t place;               // the first place on the outer axes
  int64_t blocks;                          // how many
  int64_t next_tile = 0, packed = 0, next_block = 0;
  char* memory = nullptr;                  // null: nobody has taken it yet
};
struct Packs {
  Slot* slot = nullptr;
  int64_t slots = 0, tiles = 0, bytes = 0, next_slot = 0, next_buffer = 0, zeros = 0;
  char* memory = nullptr;

  // same(i): whether place i shares its matrices with place i - 1; tiles(i): how many tiles of `bytes_of_tile` it has; blocks: of each place.
  // Where no two blocks share a slot there is nothing to gain, and memory stays null. False: no memory.
  template <class Same, class Tiles> bool prepare(int64_t places, int64_t blocks, int64_t threads, int64_t bytes_of_tile, Same same, Tiles tiles_of) {
    void* list = nullptr;
    if (posix_memalign(&list, 64, (size_t)(places + 1) * sizeof(Slot)) != 0) return false;
    slot = (Slot*)list;
    bytes = (bytes_of_tile + 63) / 64 * 64;
    for (int64_t i = 0; i < places; ++i) {
      if (!same(i)) slot[slots] = Slot{}, slot[slots++].place = i;
      slot[slots - 1].blocks = (i + 1 - slot[slots - 1].place) * blocks;
      tiles = imax(tiles, tiles_of(i));
    }
    if (slots >= places * blocks || tiles == 0) return true;
    zeros = imin(slots, threads) * tiles;
    memory = PackReserve::take(bytes * (zeros + 1));
    if (!memory) return false;
    __builtin_memset(memory + bytes * zeros, 0, (size_t)bytes);
    return true;
  }
  MEMBER char* buffer() { return memory + bytes * tiles * __atomic_fetch_add(&next_buffer, 1, __ATOMIC_RELAXED); }
  // Tile `index` of a slot's memory; zeros past the end.
  MEMBER char* tile(char* at, int64_t index) const { return (uint64_t)index < (uint64_t)tiles ? at + bytes * index : memory + bytes * zeros; }
  ~Packs() { PackReserve::give(memory), free(slot); }
};

// Threads draw numbers of blocks, or slots of blocks, until none is left; each has its own scratch.
// Safe with fewer threads than asked for: whoever waits, waits for what a running thread has begun.
template <class Work> struct Crew {
  const FarmCall& call;
  int64_t num_blocks;
  Packs* shared;  // null: every block packs for itself
  int64_t next_block = 0, arrived = 0;
  char* scratch = nullptr;

  static constexpr int64_t bytes() { return (int64_t)(sizeof(Work) + 4095) / 4096 * 4096; }
  static int64_t draw(int64_t& next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }

  static void join(void* data) {
    Crew& crew = *(Crew*)data;
    FlushDenormals flush;
    typename Work::Scope scope;
    Work& work = *(Work*)(crew.scratch + draw(crew.arrived) * bytes());
    work.begin(crew.call);
    work.shared = crew.shared;
    if (crew.shared) crew.take_slots(work, *crew.shared);
    else for (int64_t i; (i = draw(crew.next_block)) < crew.num_blocks;) work.run(i);
  }
  void take_slots(Work& work, Packs& packs) {
    char* own = nullptr;
    int64_t last = 0;
    for (int64_t i; (i = draw(packs.next_slot)) < packs.slots; last = i) {
      if (!own) own = packs.buffer();
      __atomic_store_n(&packs.slot[i].memory, own, __ATOMIC_RELEASE);
      help(work, packs.slot[i], packs.tiles);
    }
    for (int64_t i = 1; i <= packs.slots; ++i) help(work, packs.slot[(last + i) % packs.slots], packs.tiles);
  }
  void help(Work& work, Slot& slot, int64_t tiles) {
    while (!(work.packed = __atomic_load_n(&slot.memory, __ATOMIC_ACQUIRE))) _mm_pause();
    for (int64_t i; (i = draw(slot.next_tile)) < tiles; __atomic_fetch_add(&slot.packed, 1, __ATOMIC_RELEASE)) work.pack(slot.place, i);
    while (__atomic_load_n(&slot.packed, __ATOMIC_ACQUIRE) < tiles) _mm_pause();
    for (int64_t i; (i = draw(slot.next_block)) < slot.blocks;) work.run(slot.place * work.blocks_of_place() + i);
  }

  int32_t run() {  // 0: done; 1: no memory for scratch
    if (num_blocks <= 0) return 0;
    const int64_t threads = call.parallel ? imax(1, imin(call.num_threads, num_blocks)) : 1;
    scratch = ScratchReserve::take(bytes() * threads);
    if (!scratch) return 1;
    if (threads == 1) join(this);
    else call.parallel(join, this, (unsigned)threads, 0);
    ScratchReserve::give(scratch);
    return 0;
  }
};
}  // namespace
