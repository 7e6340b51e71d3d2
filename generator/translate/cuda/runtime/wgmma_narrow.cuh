// A tile for wgmma as TMA would lay it down, by the 128 threads of the producer's warpgroup, from rows that begin anywhere: chunks of
// 64 columns with the 128 byte swizzle. It is there, and products can read it, when all have returned.
template <int ROWS, int COLS, bool WHOLE>
DEVICE void copy_tile(u32 tile, int width, const char* src, i64 pitch, int row, int column, int n0, int n1, int barrier) {
  constexpr int CHUNKS = COLS / 8;
  copy_narrow<ROWS * CHUNKS, 128, 2>(width, [&](int i, u32& to, const char*& from) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    to = tile + c / 8 * ROWS * 128 + r * 128 + ((c ^ r) & 7) * 16;
    from = src + (i64)(row + r) * pitch + 2 * (i64)(column + 8 * c);
    return chunk_bytes<WHOLE>(row + r < n0, n1 - column - 8 * c);
  });
  copy_async_done();
  fence_shared_writes();
  bar_sync(barrier, 128);
}
