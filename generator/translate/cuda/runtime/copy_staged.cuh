// Tiles from global to shared memory through registers (sm_75): fetch() starts the loads, land() stores what has come.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS> struct Staged {
  using S = Spread<PCOLS, THREADS>;
  static constexpr int STEPS = (PROWS + S::STEP - 1) / S::STEP;
  uint4 v[STEPS * S::GROUPS];

  DEVICE void fetch(const char* src, i64 pitch, int row, int col, int n0, int n1) {
    const int tr = threadIdx.x / S::LANES, tc = threadIdx.x % S::LANES;
    const char* g = src + (i64)(row + tr) * pitch + 2 * (i64)(col + 8 * tc);
    UNROLL for (int c = 0; c < S::GROUPS; ++c) UNROLL for (int i = 0; i < STEPS; ++i) {
      const int chunk = tc + c * S::LANES, r = tr + i * S::STEP;
      const bool ok = col + 8 * chunk < n1 && 8 * chunk < COLS && row + r < n0 && r < ROWS;
      uint4& x = v[c * STEPS + i];
      x = make_uint4(0, 0, 0, 0);
      if (ok)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(g + i * S::STEP * pitch + c * S::LANES * 16) : "memory");
    }
  }
  DEVICE void land(u32 tile) const {
    const int tr = threadIdx.x / S::LANES, tc = threadIdx.x % S::LANES;
    UNROLL for (int c = 0; c < S::GROUPS; ++c) UNROLL for (int i = 0; i < STEPS; ++i) {
      const int chunk = tc + c * S::LANES, r = tr + i * S::STEP;
      if (r < PROWS && chunk < S::CHUNKS) store_shared16(tile + Shared<PCOLS>::at(r, chunk), v[c * STEPS + i]);
    }
  }
};
