// Chunks of eight elements from rows that begin anywhere to shared memory, by cp.async of 16, 8 or 4 bytes; pieces of 2 bytes go
// through registers and are there at once. Zeros where a chunk is not wanted.
DEVICE void copy_pieces(u32 to, const char* from, bool wanted, int width) {
  if (width == 16) {
    copy_async<16>(to, from, wanted ? 16 : 0);
  } else if (width == 8) {
    UNROLL for (int i = 0; i < 16; i += 8) copy_async<8>(to + i, from + i, wanted ? 8 : 0);
  } else {
    UNROLL for (int i = 0; i < 16; i += 4) copy_async<4>(to + i, from + i, wanted ? 4 : 0);
  }
}
// TOTAL chunks dealt out over THREADS. place(i, to, from): where chunk i goes and comes from, and whether it is wanted. BATCH: how many
// a thread holds in registers at a time where pieces have 2 bytes.
template <int TOTAL, int THREADS, int BATCH, class Place> DEVICE void copy_narrow(int width, Place place) {
  u32 to[BATCH];
  const char* from;
  if (width > 2) {
    _Pragma("unroll 2") for (int i = threadIdx.x; i < TOTAL; i += THREADS) {
      const bool wanted = place(i, to[0], from);
      copy_pieces(to[0], from, wanted, width);
    }
    return;
  }
  _Pragma("unroll 1") for (int first = threadIdx.x; first < TOTAL; first += BATCH * THREADS) {
    uint4 v[BATCH];
    UNROLL for (int b = 0; b < BATCH; ++b) {
      const int i = first + b * THREADS;
      v[b] = make_uint4(0, 0, 0, 0);
      if (i < TOTAL && place(i, to[b], from)) v[b] = load_pieces(from, 2);
    }
    UNROLL for (int b = 0; b < BATCH; ++b) if (first + b * THREADS < TOTAL) store_shared16(to[b], v[b]);
  }
}
