// As `fetch`, for rows that begin anywhere: `width` is what address and pitch allow.
template <int ROWS, int COLS, int PROWS, int PCOLS, int THREADS, bool WHOLE>
DEVICE void fetch_narrow(u32 tile, int width, const char* src, i64 pitch, int row, int col, int n0, int n1) {
  constexpr int CHUNKS = PCOLS / 8;
  copy_narrow<PROWS * CHUNKS, THREADS, 4>(width, [&](int i, u32& to, const char*& from) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    to = tile + Shared<PCOLS>::at(r, c);
    from = src + (i64)(row + r) * pitch + 2 * (i64)(col + 8 * c);
    return chunk_bytes<WHOLE>(r < ROWS && 8 * c < COLS && row + r < n0, n1 - col - 8 * c);
  });
}
