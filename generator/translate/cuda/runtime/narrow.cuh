// Rows that begin anywhere: chunks of eight elements in pieces of 8, 4 or 2 bytes, as wide as address and pitch allow. Only the second
// entry point of a kernel, NAME__unaligned, uses them.

// The widest access, at most 16 bytes, at addresses that have these bits between them.
DEVICE int vector_width(u64 bits) { return bits & 3 ? 2 : bits & 7 ? 4 : bits & 15 ? 8 : 16; }

// Bytes of a chunk that belong to the matrix: `left` elements are left of the row. WHOLE: rows end where chunks do.
template <bool WHOLE> DEVICE int chunk_bytes(bool row, int left) { return row && left > 0 ? (WHOLE ? 16 : min(2 * left, 16)) : 0; }
// The first `bytes` of a chunk, then zeros. One that the row ends in is read by elements.
DEVICE uint4 load_pieces(const char* p, int bytes, int width) {
  if (bytes == 16 && width == 16) return load_global16(p);
  if (bytes == 16 && width == 8) return load_global8(p, p + 8);
  if (bytes == 16 && width == 4) return make_uint4(load_global4(p), load_global4(p + 4), load_global4(p + 8), load_global4(p + 12));
  u32 w[8];
  UNROLL for (int i = 0; i < 8; ++i) {
    w[i] = 0;
    if (2 * i < bytes) w[i] = load_global2(p + 2 * i);
  }
  return make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16, w[6] | w[7] << 16);
}
DEVICE void store_pieces(char* p, uint4 v, bool yes, int width) {
  store_global16(p, v, yes && width == 16);
  store_global8(p, v.x, v.y, yes && width == 8);
  store_global8(p + 8, v.z, v.w, yes && width == 8);
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  UNROLL for (int i = 0; i < 4; ++i) store_global4(p + 4 * i, w[i], yes && width == 4);
  UNROLL for (int i = 0; i < 8; ++i) store_global2(p + 2 * i, (u16)(w[i / 2] >> (16 * (i & 1))), yes && width == 2);
}
// As `store_rows`, for rows that begin anywhere: `width` is what address and pitch allow.
template <Type T, int N, int M> DEVICE void store_rows_narrow(char* p, i64 pitch, int width, int left, int cols, int lane, const float (&x)[M]) {
  constexpr int GROUPS = (N + 31) / 32;
  u32 w[2][GROUPS][4];
  quad_rows<T, N>(w, lane, x);
  UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) {
    const int c = 32 * g + 8 * (lane & 3);
    const bool in = 8 * r < left && c < N && c + 8 <= cols;
    store_pieces(p + 8 * r * pitch + 2 * c, make_uint4(w[r][g][0], w[r][g][1], w[r][g][2], w[r][g][3]), in, width);
  }
  if (cols % 8)
    UNROLL for (int r = 0; r < 2; ++r) UNROLL for (int g = 0; g < GROUPS; ++g) UNROLL for (int k = 0; k < 7; ++k) {
      const int c = 32 * g + 8 * (lane & 3);
      const bool in = 8 * r < left && c < N && c + k < cols && c + 8 > cols;
      store_global2(p + 8 * r * pitch + 2 * (c + k), (u16)(w[r][g][k / 2] >> (16 * (k & 1))), in);
    }
}
