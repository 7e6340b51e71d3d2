// Tiles from global to shared memory by cp.async (sm_80): what lies outside the matrix, and the padding of a tile, arrives as zeros.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ROWS x COLS elements from `row`, `col` on into a tile of PROWS x PCOLS; src is element (0, 0), pitch in bytes, n0 x n1 the matrix.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS>
DEVICE void fetch(u32 tile, const char* src, i64 pitch, int row, int col, int n0, int n1) {
  using S = Spread<PCOLS, THREADS>;
  const int tr = threadIdx.x / S::LANES, tc = threadIdx.x % S::LANES;
  const char* g = src + (i64)(row + tr) * pitch + 2 * (i64)(col + 8 * tc);
  UNROLL for (int c = 0; c < S::GROUPS; ++c) {
    const int chunk = tc + c * S::LANES;
    const bool in = col + 8 * chunk < n1 && 8 * chunk < COLS;
    UNROLL for (int i = 0; i * S::STEP < PROWS; ++i) {
      const int r = tr + i * S::STEP;
      const bool ok = in && row + r < n0 && (ROWS == PROWS || r < ROWS);
      if ((PROWS % S::STEP == 0 || r < PROWS) && (S::CHUNKS % S::LANES == 0 || chunk < S::CHUNKS))
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tile + Shared<PCOLS>::at(r, chunk)),
                     "l"(ok ? g + i * S::STEP * pitch + c * S::LANES * 16 : src), "r"(ok ? 16 : 0) : "memory");
    }
  }
}
