// Tiles from global to shared memory through registers (sm_75): fetch() starts the loads, land() stores what has come.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS> struct Staged {
  using S = Spread<PCOLS, THREADS>;
  static constexpr int STEPS = (PROWS + S::STEP - 1) / S::STEP;
  uint4 v[STEPS * S::GROUPS];

  DEVICE void fetch(const char* src, i64 pitch, int row, int col, int n0, int n1) {
    const int thread = opaque((int)threadIdx.x), tr = thread / S::LANES, tc = thread % S::LANES;
    const int left = n0 - row - tr, across = n1 - col - 8 * tc;  // to the ends of the matrix
    pitch = opaque(pitch);
    const char* g = src + (i64)(row + tr) * pitch + 2 * (i64)(col + 8 * tc);
    UNROLL for (int i = 0; i < STEPS; ++i) {
      UNROLL for (int c = 0; c < S::GROUPS; ++c) {
        const int chunk = tc + c * S::LANES, r = tr + i * S::STEP;
        const bool ok = i * S::STEP < left && 8 * c * S::LANES < across && (8 * S::CHUNKS == COLS || 8 * chunk < COLS) && (ROWS == PROWS || r < ROWS);
        v[i * S::GROUPS + c] = make_uint4(0, 0, 0, 0);
        if (ok) v[i * S::GROUPS + c] = load_global16(g + c * S::LANES * 16);
      }
      g += S::STEP * pitch;
    }
  }
  DEVICE void land(u32 tile) const {
    const int thread = opaque((int)threadIdx.x), tr = thread / S::LANES, tc = thread % S::LANES;
    UNROLL for (int i = 0; i < STEPS; ++i) UNROLL for (int c = 0; c < S::GROUPS; ++c) {
      const int chunk = tc + c * S::LANES, r = tr + i * S::STEP;
      if (r < PROWS && chunk < S::CHUNKS) store_shared16(tile + Shared<PCOLS>::at(r, chunk), v[i * S::GROUPS + c]);
    }
  }
};
