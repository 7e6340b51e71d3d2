// CUDA's thread model on a CPU, for tests: every thread of a block is a fiber, instructions of a warp and barriers are meetings of
// fibers. Stands in for the compiler's built-ins and for the runtime's `ptx*.cuh`; everything else of a kernel is compiled as it is.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE inline
#define UNROLL
#define INF __builtin_inff()
enum Type { F16, BF16, F32, I32 };

struct Dim { unsigned x = 0, y = 0, z = 0; };
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

alignas(1024) u8 smem_raw[256 * 1024];

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Dim tid;
  bool done = false;
};
struct Meeting {  // of `size` fibers; generation counts how often it took place
  int size = 0, here = 0, generation = 0;
  std::vector<u64> slots;
  u64 shared[64] = {};
};
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting block_barrier;
static Fiber* current;
static ucontext_t scheduler;
static Dim emulated_block, emulated_grid, emulated_threads;
static long switches, budget;
#define threadIdx (current->tid)
#define blockIdx emulated_block
#define gridDim emulated_grid
#define blockDim emulated_threads

inline void yield() {
  if (++switches > budget) { fprintf(stderr, "emulator: deadlock or endless loop in block %u\n", emulated_block.x); abort(); }
  swapcontext(&current->context, &scheduler);
}
// Waits for all fibers of a meeting; the last one to come calls `last` before the others go on.
template <class F> inline void meet(Meeting& m, F last) {
  const int generation = m.generation;
  if (++m.here == m.size) {
    last();
    m.here = 0;
    ++m.generation;
  } else {
    while (m.generation == generation) yield();
  }
}
inline int lane_id() { return current->tid.x & 31; }
inline Meeting& warp_meeting() { return warps[current->tid.x >> 5]; }
// Every lane gives a value and gets all 32.
template <class T> struct Exchange {
  T all[32];
  explicit Exchange(T mine) {
    static_assert(sizeof(T) <= 64, "value");
    Meeting& m = warp_meeting();
    m.slots.resize(32 * 8);
    memcpy(&m.slots[lane_id() * 8], &mine, sizeof mine);
    meet(m, [] {});
    for (int i = 0; i < 32; ++i) memcpy(&all[i], &m.slots[i * 8], sizeof mine);
    meet(m, [] {});
  }
};
inline void __syncthreads() { meet(block_barrier, [] {}); }
inline void __threadfence() {}
template <class T> inline T __shfl_xor_sync(u32, T x, int d) { return Exchange<T>(x).all[lane_id() ^ d]; }
template <class T> inline T __shfl_sync(u32, T x, int from) { return Exchange<T>(x).all[from]; }
inline bool __any_sync(u32, bool x) {
  Exchange<int> e(x);
  for (int v : e.all) if (v) return true;
  return false;
}
template <class T> inline T __ldg(const T* p) { return *p; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline int atomicAdd(int* p, int x) { const int old = *p; *p += x; return old; }
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)((const u8*)p - smem_raw); }

// ---------------------------------------------------------------- ptx.cuh
inline int block_number() { return (int)emulated_block.x; }
inline int opaque(int x) { return x; }
inline i64 opaque(i64 x) { return x; }
inline float ex2(float x) { return exp2f(x); }
inline float rcp(float x) { return 1.0f / x; }
inline float divide(float a, float b) { return a / b; }
inline float tanh_fast(float x) { return tanhf(x); }
template <Type T> inline u16 narrow(float x) {
  u16 y;
  if (T == BF16) {
    u32 b;
    memcpy(&b, &x, 4);
    if (x != x) return 0x7fff;
    return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  }
  const _Float16 h = (_Float16)x;
  memcpy(&y, &h, 2);
  return y;
}
template <Type T> inline float widen(u16 x) {
  if (T == BF16) return __uint_as_float((u32)x << 16);
  _Float16 h;
  memcpy(&h, &x, 2);
  return (float)h;
}
template <Type T> inline u32 pack2(float lo, float hi) { return narrow<T>(lo) | (u32)narrow<T>(hi) << 16; }
template <class X> inline void pin(X&) {}
inline u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
inline u8* shared_at(u32 a, u32 bytes) {
  if (a % bytes || a + bytes > sizeof smem_raw) { fprintf(stderr, "emulator: shared address %u for %u bytes\n", a, bytes); abort(); }
  return smem_raw + a;
}
inline u16 load_shared2(u32 a) { u16 x; memcpy(&x, shared_at(a, 2), 2); return x; }
template <int BYTES> inline const char* piece_at(const char* p) {
  if ((size_t)p % BYTES) { fprintf(stderr, "emulator: %d bytes at %p\n", BYTES, (const void*)p); abort(); }
  return p;
}
inline void store_global16(char* p, uint4 v, bool yes) { if (yes) memcpy((char*)piece_at<16>(p), &v, 16); }
inline void store_global4(char* p, u32 v, bool yes) { if (yes) memcpy((char*)piece_at<4>(p), &v, 4); }
inline void store_global2(char* p, u16 v, bool yes) { if (yes) memcpy((char*)piece_at<2>(p), &v, 2); }
inline void store_shared16(u32 a, uint4 v) { memcpy(shared_at(a, 16), &v, 16); }
inline uint4 load_global16(const char* p) {
  if ((size_t)p % 16) { fprintf(stderr, "emulator: 16 byte load at %p\n", (const void*)p); abort(); }
  uint4 x;
  memcpy(&x, p, 16);
  return x;
}

// ---------------------------------------------------------------- ptx_mma.cuh
inline u32 pair_at(u32 row_address, int pair) { u32 x; memcpy(&x, shared_at(row_address, 16) + 4 * pair, 4); return x; }
inline void ldsm4(u32 (&r)[4], u32 a) {  // lane 8 m + i names row i of matrix m; lane l gets words l % 4 of row l / 4
  Exchange<u32> e(a);
  for (int m = 0; m < 4; ++m) r[m] = pair_at(e.all[8 * m + lane_id() / 4], lane_id() % 4);
}
inline void ldsm4t(u32 (&r)[4], u32 a) {  // elements (2 (l % 4) + {0, 1}, l / 4)
  Exchange<u32> e(a);
  for (int m = 0; m < 4; ++m) {
    u16 x[2];
    for (int i = 0; i < 2; ++i) memcpy(&x[i], shared_at(e.all[8 * m + 2 * (lane_id() % 4) + i], 16) + 2 * (lane_id() / 4), 2);
    r[m] = x[0] | (u32)x[1] << 16;
  }
}
struct Fragments { u32 a[4], b[2]; };
template <Type T> inline void mma16(float* c, const u32* a, u32 b0, u32 b1) {
  Exchange<Fragments> e(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int g = lane_id() / 4, q = lane_id() % 4;
  auto half = [](u32 x, int h) { return widen<T>((u16)(x >> (16 * h))); };
  for (int r = 0; r < 2; ++r) for (int j = 0; j < 2; ++j) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) {  // A: row g + 8 r, column k; B: row k, column 2 q + j
      const float x = half(e.all[4 * g + (k % 8) / 2].a[r + 2 * (k / 8)], k % 2);
      const float y = half(e.all[4 * (2 * q + j) + (k % 8) / 2].b[k / 8], k % 2);
      sum += x * y;
    }
    c[2 * r + j] += sum;
  }
}
struct Pending { u32 to; const char* from; int bytes, size = 16; };
static std::vector<std::vector<std::vector<Pending>>> groups;  // thread -> committed groups, the last one open
inline void copy_async16(u32 to, const char* from, int bytes) {
  shared_at(to, 16);
  if (bytes && (size_t)from % 16) { fprintf(stderr, "emulator: cp.async from %p\n", (const void*)from); abort(); }
  groups[current->tid.x].back().push_back({to, from, bytes});
}
inline void prefetch_l2(const char* p) { (void)*(volatile const char*)p; }  // an address that is not there ends the run
inline void copy_commit() { groups[current->tid.x].emplace_back(); }
template <int N> inline void copy_wait() {  // data land only here: a reader that does not wait sees what was there before
  auto& mine = groups[current->tid.x];
  while ((int)mine.size() - 1 > N) {
    for (const Pending& p : mine.front()) {
      memset(shared_at(p.to, p.size), 0, p.size);
      memcpy(shared_at(p.to, p.size), p.from, p.bytes);
    }
    mine.erase(mine.begin());
  }
}

// ---------------------------------------------------------------- ptx_narrow.cuh
template <int BYTES> inline void copy_async(u32 to, const char* from, int bytes) {
  shared_at(to, BYTES);
  groups[current->tid.x].back().push_back({to, bytes ? piece_at<BYTES>(from) : from, bytes, BYTES});
}
inline void copy_async_done() { copy_commit(); copy_wait<0>(); }
inline uint4 load_global8(const char* p, const char* q) {
  uint4 x;
  memcpy(&x, piece_at<8>(p), 8);
  memcpy((char*)&x + 8, piece_at<8>(q), 8);
  return x;
}
inline u32 load_global4(const char* p) { u32 x; memcpy(&x, piece_at<4>(p), 4); return x; }
inline u16 load_global2(const char* p) { u16 x; memcpy(&x, piece_at<2>(p), 2); return x; }
inline void store_global8(char* p, u32 x, u32 y, bool yes) {
  if (!yes) return;
  memcpy((char*)piece_at<8>(p), &x, 4);
  memcpy(p + 4, &y, 4);
}

// ---------------------------------------------------------------- ptx_wgmma.cuh
struct alignas(64) TensorMap {  // as cuda_emulation.py writes it: innermost axis first
  u64 address, extents[5], strides[4];
  u32 box[5], unused;
};
struct Barrier {
  int count = 0, arrived = 0, bytes = 0, phase = 0;
  void settle() {
    if (arrived == count && bytes == 0) { phase ^= 1; arrived = 0; }
    if (arrived > count) { fprintf(stderr, "emulator: a barrier for %d got %d arrivals\n", count, arrived); abort(); }
  }
};
struct Transfer { u32 to; const TensorMap* map; u32 bar; int x[5]; };
static std::vector<Barrier> barriers;
static std::vector<Transfer> transfers;  // under way: they arrive while somebody waits
inline Barrier& barrier_at(u32 a) { shared_at(a, 8); return barriers[a / 8]; }
inline void mbar_init(u32 bar, u32 count) { barrier_at(bar) = Barrier(); barrier_at(bar).count = (int)count; }
inline void mbar_arrive(u32 bar) { ++barrier_at(bar).arrived; barrier_at(bar).settle(); }
inline void mbar_expect(u32 bar, u32 bytes) { barrier_at(bar).bytes += (int)bytes; mbar_arrive(bar); }
inline u32 swizzled(u32 a) { return a ^ ((a >> 3) & 0x70); }
inline void deliver(const Transfer& t) {
  const TensorMap& m = *t.map;
  u32 k = 0;
  int i[5];
  for (i[4] = 0; i[4] < (int)m.box[4]; ++i[4]) for (i[3] = 0; i[3] < (int)m.box[3]; ++i[3]) for (i[2] = 0; i[2] < (int)m.box[2]; ++i[2])
    for (i[1] = 0; i[1] < (int)m.box[1]; ++i[1]) for (i[0] = 0; i[0] < (int)m.box[0]; ++i[0], ++k) {
      bool in = true;
      u64 at = m.address;
      for (int a = 0; a < 5; ++a) {
        const i64 x = (i64)t.x[a] + i[a];
        in = in && x >= 0 && x < (i64)m.extents[a];
        at += (u64)x * (a ? m.strides[a - 1] : 2);
      }
      u16 v = 0;
      if (in) memcpy(&v, (const void*)at, 2);
      memcpy(shared_at(swizzled(t.to + 2 * k), 2), &v, 2);
    }
  Barrier& b = barrier_at(t.bar);
  b.bytes -= (int)(2 * k);
  b.settle();
}
inline void mbar_wait(u32 bar, u32 parity) {
  Barrier& b = barrier_at(bar);
  while (b.phase == (int)parity) {
    if (!transfers.empty() && switches % 3 == 0) {
      const Transfer t = transfers.front();
      transfers.erase(transfers.begin());
      deliver(t);
    } else {
      yield();
    }
  }
}
inline void fence_barrier_init() {}
inline void fence_shared_writes() {}
inline void tma_prefetch(const TensorMap*) {}
inline void tma_tile(u32 to, const TensorMap* map, u32 bar, int x0, int x1, int x2, int x3, int x4) {
  if (to % 1024) { fprintf(stderr, "emulator: tile at %u\n", to); abort(); }
  transfers.push_back({to, map, bar, {x0, x1, x2, x3, x4}});
}
template <int R> inline void registers_more() {}
template <int R> inline void registers_less() {}
inline int uniform(int x) {
  const Exchange<int> e(x);
  for (int y : e.all) if (y != x) { fprintf(stderr, "emulator: %d and %d are not uniform\n", x, y); abort(); }
  return x;
}
inline void anchor(float, u32) {}
inline void store_word(u32 a, int x) { memcpy(shared_at(a, 4), &x, 4); }
inline int load_word(u32 a) { int x; memcpy(&x, shared_at(a, 4), 4); return x; }
// Named barriers: arrivals of syncing and of merely arriving threads count alike.
struct Named { int here = 0, generation = 0; };
static Named named[16];
inline bool named_arrive(int id, int n) {
  if (++named[id].here < n) return false;
  named[id].here = 0;
  ++named[id].generation;
  return true;
}
inline void bar_arrive(int id, int n) { named_arrive(id, n); }
inline void bar_sync(int id, int n) {
  const int g = named[id].generation;
  if (!named_arrive(id, n)) while (named[id].generation == g) yield();
}
// Products run when they are waited for: operands that change before that, in registers or in shared memory, give wrong results.
struct Product64 { float* d; const u32* a; u64 a_descriptor, b; int n, add, k_major; u32 type; };
struct Group { std::vector<Product64> products; };
static std::vector<std::vector<Group>> wgmma_groups;  // thread -> groups, the last one open
inline float operand_value(u64 descriptor, bool k_major, int outer, int k, u32 type) {
  const u32 start = (u32)(descriptor & 0x3fff) << 4, lbo = (u32)((descriptor >> 16) & 0x3fff) << 4, sbo = (u32)((descriptor >> 32) & 0x3fff) << 4;
  const u32 a = k_major ? start + outer / 8 * sbo + outer % 8 * 128 + 2 * k
                        : start + outer / 64 * lbo + k / 8 * sbo + k % 8 * 128 + 2 * (outer % 64);
  u16 x;
  memcpy(&x, shared_at(swizzled(a), 2), 2);
  return type == BF16 ? widen<BF16>(x) : widen<F16>(x);
}
inline void run_product(const Product64& p) {  // this lane's elements: rows of its warp, see mma16
  Fragments mine = {};
  if (p.a) memcpy(mine.a, p.a, sizeof mine.a);
  Exchange<Fragments> e(mine);
  const int g = lane_id() / 4, q = lane_id() % 4, warp = (current->tid.x >> 5) % 4;
  for (int r = 0; r < 2; ++r) {
    float row[16];
    for (int k = 0; k < 16; ++k) {
      if (p.a) {
        const u32 x = e.all[4 * g + (k % 8) / 2].a[r + 2 * (k / 8)];
        const u16 h = (u16)(x >> (16 * (k % 2)));
        row[k] = p.type == BF16 ? widen<BF16>(h) : widen<F16>(h);
      } else {
        row[k] = operand_value(p.a_descriptor, true, 16 * warp + g + 8 * r, k, p.type);
      }
    }
    for (int i = 0; i < p.n / 8; ++i) for (int c = 0; c < 2; ++c) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += row[k] * operand_value(p.b, p.k_major, 8 * i + 2 * q + c, k, p.type);
      float& d = p.d[4 * i + 2 * r + c];
      d = (p.add ? d : 0.0f) + sum;
    }
  }
}
template <int N, bool K_MAJOR, Type T> inline void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int add) {
  wgmma_groups[current->tid.x].back().products.push_back({d, nullptr, a, b, N, add, K_MAJOR, T});
}
template <int N, bool K_MAJOR, Type T> inline void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int add) {
  wgmma_groups[current->tid.x].back().products.push_back({d, a, 0, b, N, add, K_MAJOR, T});
}
inline void wgmma_fence() {}
inline void wgmma_commit() { wgmma_groups[current->tid.x].emplace_back(); }
template <int N> inline void wgmma_wait() {
  auto& mine = wgmma_groups[current->tid.x];
  while ((int)mine.size() - 1 > N) {
    for (const Product64& p : mine.front().products) run_product(p);
    mine.erase(mine.begin());
  }
}

static std::function<void()> kernel_body;
static void fiber_main() {
  kernel_body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}
// Runs a grid, block after block. Fibers of a block take turns in an order that changes with `seed`.
static void emulate_grid(unsigned blocks, unsigned threads, unsigned seed, std::function<void()> body) {
  kernel_body = body;
  emulated_grid.x = blocks;
  emulated_threads.x = threads;
  for (unsigned b = 0; b < blocks; ++b) {
    emulated_block.x = b;
    switches = 0;
    budget = 400l * 1000 * 1000;
    memset(smem_raw, 0xff, sizeof smem_raw);  // NaN in every dtype
    fibers.assign(threads, Fiber());
    warps.assign((threads + 31) / 32, Meeting());
    for (auto& w : warps) w.size = 32;
    block_barrier = Meeting();
    block_barrier.size = (int)threads;
    groups.assign(threads, std::vector<std::vector<Pending>>(1));
    barriers.assign(sizeof smem_raw / 8, Barrier());
    transfers.clear();
    for (auto& n : named) n = Named();
    wgmma_groups.assign(threads, std::vector<Group>(1));
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = fibers[t];
      f.stack.resize(256 * 1024);
      f.tid.x = t;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      f.context.uc_link = nullptr;
      makecontext(&f.context, fiber_main, 0);
    }
    for (unsigned left = threads, turn = seed; left;) {
      turn = turn * 1664525u + 1013904223u;
      const unsigned warp = (turn >> 8) % ((threads + 31) / 32);  // a warp at a time, all its lanes
      for (unsigned l = 0; l < 32 && 32 * warp + l < threads; ++l) {
        Fiber& f = fibers[32 * warp + l];
        if (f.done) continue;
        current = &f;
        swapcontext(&scheduler, &f.context);
        if (f.done) --left;
      }
    }
  }
}
