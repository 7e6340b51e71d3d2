// Tiles of 16 bit elements in shared memory for ldmatrix: rows of COLS elements (a multiple of 16), no two of eight rows on the
// same banks. Rows of whole 128 byte lines have their 16 byte chunks XORed with the row's low bits; others get an odd pitch.
template <int COLS> struct Shared {
  static constexpr bool SWIZZLED = COLS % 64 == 0;
  static constexpr int PITCH = SWIZZLED ? COLS * 2 : ((COLS / 8) | 1) * 16;
  DEVICE static u32 at(int r, int c) { return (u32)(r * PITCH + ((SWIZZLED ? c ^ (r & 7) : c) << 4)); }  // chunk c of row r
  // From the address of chunk 0 or 1 of a row, the chunk 2 k further on: one XOR, or an immediate offset.
  DEVICE static u32 step(u32 a, int k) { return SWIZZLED ? (a ^ ((k & 3) << 5)) + (k >> 2) * 128 : a + 32 * k; }
  DEVICE static u32 element(u32 tile, int r, int c) { return tile + at(r, c >> 3) + 2 * (c & 7); }
};
template <Type T, int COLS> DEVICE float shared_element(u32 tile, int r, int c) { return widen<T>(load_shared2(Shared<COLS>::element(tile, r, c))); }

// Which chunks of a tile a thread moves: LANES threads side by side along a row, STEP rows apart.
template <int COLS, int THREADS> struct Spread {
  static constexpr int CHUNKS = COLS / 8;
  static constexpr int LANES = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS <= 2 ? 2 : CHUNKS <= 4 ? 4 : CHUNKS <= 8 ? 8 : 16;
  static constexpr int GROUPS = (CHUNKS + LANES - 1) / LANES, STEP = THREADS / LANES;
};
