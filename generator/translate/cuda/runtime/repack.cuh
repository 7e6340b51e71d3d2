// A tensor of 16 bit elements into a compact copy, for operands whose pointer or pitch is not a multiple of 16 bytes. Axes from the
// outermost; n: extents, s: strides of the source in elements.
struct Repack {
  const u16* src;
  u16* dst;
  i64 n[4], s[4];
};
struct Axis {
  i64 n, from, to;  // extent, strides of source and copy
};
// Blocks of 256 threads take tiles of 4 KiB (2 where pieces V are single elements): rows along the longest of the outer axes, pieces
// side by side. Tiles have 32 bit numbers: 2^32 full ones would be 16 TiB (8 where V is one element); where the longest axis fills none,
// it has under 1,024 rows, and there are at most its square of them.
template <class V> DEVICE void repack_tiles(const Repack& p, Axis rows, Axis x, Axis y) {
  constexpr int WIDTH = sizeof(V) / 2, PIECES = sizeof(V) == 2 ? 4 : 16 / sizeof(V), TILE = 256 * PIECES;
  const i64 wide = p.n[3] / WIDTH, step = WIDTH == 1 ? p.s[3] : 1;
  const u32 cols = (u32)min(wide, (i64)TILE), high = TILE / cols, along = (u32)((rows.n + high - 1) / high), inner = (u32)y.n;
  u32 r[PIECES], c[PIECES];
  UNROLL for (int i = 0; i < PIECES; ++i) {
    r[i] = (threadIdx.x + 256 * i) / cols;
    c[i] = threadIdx.x + 256 * i - r[i] * cols;
  }
  for (u32 tile = blockIdx.x; tile < along * inner * (u32)x.n; tile += gridDim.x) {
    const u32 plane = tile / along, i = plane / inner, j = plane - i * inner;
    const i64 first = (i64)(tile - plane * along) * high, last = rows.n - first;
    const u16* src = p.src + i * x.from + j * y.from + first * rows.from;
    u16* dst = p.dst + i * x.to + j * y.to + first * rows.to;
    for (i64 left = wide; left > 0; left -= cols, src += cols * WIDTH * step, dst += cols * WIDTH) {
      V v[PIECES];
      UNROLL for (int k = 0; k < PIECES; ++k)
        if (r[k] < high && r[k] < last && c[k] < left) v[k] = *(const V*)(src + r[k] * rows.from + c[k] * WIDTH * step);
      UNROLL for (int k = 0; k < PIECES; ++k)
        if (r[k] < high && r[k] < last && c[k] < left) *(V*)(dst + r[k] * rows.to + c[k] * WIDTH) = v[k];
    }
  }
}
extern "C" __global__ void farm_repack(const __grid_constant__ Repack p) {
  if (!p.n[0] || !p.n[1] || !p.n[2] || !p.n[3]) return;
  u64 bits = (u64)p.src | (u64)p.dst | 2 * p.n[3];  // the largest pieces that every row allows
  UNROLL for (int a = 0; a < 3; ++a)
    if (p.n[a] > 1) bits |= 2 * p.s[a];
  if (p.n[3] > 1 && p.s[3] != 1) bits |= 2;
  Axis x = {p.n[0], p.s[0], p.n[1] * p.n[2] * p.n[3]}, y = {p.n[1], p.s[1], p.n[2] * p.n[3]}, rows = {p.n[2], p.s[2], p.n[3]};
  if (x.n > rows.n && x.n >= y.n) {
    const Axis longest = x;
    x = rows, rows = longest;
  } else if (y.n > rows.n) {
    const Axis longest = y;
    y = rows, rows = longest;
  }
  if (bits % 16 == 0) repack_tiles<uint4>(p, rows, x, y);
  else if (bits % 8 == 0) repack_tiles<u64>(p, rows, x, y);
  else if (bits % 4 == 0) repack_tiles<u32>(p, rows, x, y);
  else repack_tiles<u16>(p, rows, x, y);
}
