// Tiles from global to shared memory by cp.async (sm_80 and later): what lies outside the matrix, and the padding of a tile, arrives as zeros.
//
// ROWS x COLS elements from `row`, `col` on into a tile of PROWS x PCOLS; src is element (0, 0), pitch in bytes, n0 x n1 the matrix.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS>
DEVICE void fetch(u32 tile, const char* src, i64 pitch, int row, int col, int n0, int n1, bool on = true) {
  using S = Spread<PCOLS, THREADS>;
  const u32 thread = (u32)opaque((int)threadIdx.x), tr = thread / S::LANES, tc = thread % S::LANES;
  pitch = opaque(pitch);
  const int left = n0 - row - (int)tr, width = n1 - col;  // to the ends of the matrix
  const char* g = src + 2 * (i64)(col + 8 * (int)tc) + (u64)((u32)row + tr) * (u64)pitch;
  // Where rows are whole lines and a step of rows is whole swizzles, a chunk's place is the first one's and a constant.
  constexpr bool EVEN = Shared<PCOLS>::SWIZZLED && S::LANES == 8 && S::STEP % 8 == 0;
  const u32 first = tile + Shared<PCOLS>::at(tr, tc);
  UNROLL for (int i = 0; i * S::STEP < PROWS; ++i) {
    const int r = tr + i * S::STEP;
    UNROLL for (int c = 0; c < S::GROUPS; ++c) {
      const int chunk = tc + c * S::LANES;
      const bool in_columns = (8 * S::CHUNKS == COLS || 8 * chunk < COLS) && (width >= COLS || 8 * chunk < width);
      const bool ok = on && i * S::STEP < left && in_columns && (ROWS == PROWS || r < ROWS);
      if ((PROWS % S::STEP == 0 || r < PROWS) && (S::CHUNKS % S::LANES == 0 || chunk < S::CHUNKS)) {
        const u32 to = EVEN ? first + i * S::STEP * Shared<PCOLS>::PITCH + c * S::LANES * 16 : tile + Shared<PCOLS>::at(r, chunk);
        copy_async16(to, g + c * S::LANES * 16, ok ? 16 : 0);  // of 0 bytes: no address is read
      }
    }
    g += S::STEP * pitch;
  }
}
// The part of a tile that lies inside the matrix to L2, by lines of 128 bytes.
template <int ROWS, int COLS, int THREADS> DEVICE void announce(const char* src, i64 pitch, int row, int col, int n0, int n1) {
  constexpr int LINES = (COLS + 63) / 64;
  UNROLL for (int i = 0; i < ROWS * LINES; i += THREADS) {
    const int r = (i + (int)threadIdx.x) / LINES, c = 64 * ((i + (int)threadIdx.x) % LINES);
    if (r < ROWS && row + r < n0 && col + c < n1) prefetch_l2(src + (i64)(row + r) * pitch + 2 * (i64)(col + c));
  }
}
