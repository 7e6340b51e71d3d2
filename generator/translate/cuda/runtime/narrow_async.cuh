// Chunks of eight elements from rows that begin anywhere to shared memory, by cp.async of 16, 8 or 4 bytes; pieces of 2 bytes go
// through registers and are there at once. Of a chunk its first `bytes` are read; the rest becomes zeros.
DEVICE void copy_pieces(u32 to, const char* from, int bytes, int width) {
  if (width == 16) {
    copy_async<16>(to, from, bytes);
  } else if (width == 8) {
    UNROLL for (int i = 0; i < 16; i += 8) copy_async<8>(to + i, from + i, clamp(bytes - i, 0, 8));
  } else {
    UNROLL for (int i = 0; i < 16; i += 4) copy_async<4>(to + i, from + i, clamp(bytes - i, 0, 4));
  }
}
// TOTAL chunks dealt out over THREADS. place(i, to, from): where chunk i goes and comes from, and how many bytes of it are wanted.
// BATCH: how many a thread holds in registers at a time where pieces have 2 bytes.
template <int TOTAL, int THREADS, int BATCH, class Place> DEVICE void copy_narrow(int width, Place place) {
  u32 to[BATCH];
  const char* from;
  if (width > 2) {
    _Pragma("unroll 1") for (int i = threadIdx.x; i < TOTAL; i += THREADS) {
      const int bytes = place(i, to[0], from);
      copy_pieces(to[0], from, bytes, width);
    }
    return;
  }
  _Pragma("unroll 1") for (int first = threadIdx.x; first < TOTAL; first += BATCH * THREADS) {
    uint4 v[BATCH];
    UNROLL for (int b = 0; b < BATCH; ++b) {
      const int i = first + b * THREADS;
      if (i < TOTAL) {
        const int bytes = place(i, to[b], from);
        v[b] = load_pieces(from, bytes, 2);
      }
    }
    UNROLL for (int b = 0; b < BATCH; ++b) if (first + b * THREADS < TOTAL) store_shared16(to[b], v[b]);
  }
}
