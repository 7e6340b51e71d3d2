// sm_90a's instructions behind functions: mbarriers, TMA, wgmma's groups, named barriers, register reallocation. The products
// themselves are written out for each shape by the translator.
struct alignas(64) TensorMap { u64 words[16]; };

DEVICE void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Traps after 4,000,000 tries instead of waiting for ever. No suspend time (PTX ISA: mbarrier.try_wait): with one, a sleep is put
// between the tries.
DEVICE void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p, q;\n.reg .u32 n;\nmov.u32 n, 0;\nL_TRY:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra L_OK;\n"
      "add.u32 n, n, 1;\nsetp.gt.u32 q, n, 4000000;\n@q trap;\nbra L_TRY;\nL_OK:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // before products read them
DEVICE void tma_prefetch(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
DEVICE void tma_tile(u32 to, const TensorMap* map, u32 bar, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DEVICE void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEVICE void bar_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }
// A value that all lanes of a warp share, in a uniform register: loops counted by it are known to keep a warp together.
DEVICE int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }
template <int R> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> DEVICE void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }
// Ties the next wgmma wait behind what x was computed from: ptxas would hoist the wait above it. The word is never read, and
// written only where x is above 2^127; the test only must not be provably false (a sum of ex2 is provably not negative).
DEVICE void anchor(float x, u32 scratch) {
  asm volatile("{\n.reg .pred p;\nsetp.gt.f32 p, %0, 0f7F000000;\n@p st.shared.u32 [%1], %1;\n}\n" ::"f"(x), "r"(scratch) : "memory");
}
DEVICE void ldsm4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void store_word(u32 a, int x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
// The warp's first lane reads for all: it is the one that then lets the writer go on, and orders no other lane's read.
DEVICE int load_word(u32 a) {
  int x = 0;
  if ((threadIdx.x & 31) == 0) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
  return x;
}
