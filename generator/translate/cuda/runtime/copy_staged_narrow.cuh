// As `Staged`, for rows that begin anywhere: `width` is what address and pitch allow.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS, bool WHOLE> struct StagedNarrow {
  static constexpr int CHUNKS = PCOLS / 8, STEPS = (PROWS * CHUNKS + THREADS - 1) / THREADS;
  uint4 v[STEPS];

  DEVICE void fetch(int width, const char* src, i64 pitch, int row, int col, int n0, int n1) {
    const int thread = opaque((int)threadIdx.x);
    UNROLL for (int s = 0; s < STEPS; ++s) {
      const int i = thread + s * THREADS, r = i / CHUNKS, c = i % CHUNKS;
      const int bytes = chunk_bytes<WHOLE>(r < ROWS && 8 * c < COLS && row + r < n0, n1 - col - 8 * c);
      v[s] = load_pieces(src + (i64)(row + r) * pitch + 2 * (i64)(col + 8 * c), bytes, width);
    }
  }
  DEVICE void land(u32 tile) const {
    const int thread = opaque((int)threadIdx.x);
    UNROLL for (int s = 0; s < STEPS; ++s) {
      const int i = thread + s * THREADS, r = i / CHUNKS, c = i % CHUNKS;
      if (r < PROWS) store_shared16(tile + Shared<PCOLS>::at(r, c), v[s]);
    }
  }
};
