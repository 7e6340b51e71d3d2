// A tensor of 16 bit elements into a compact copy with 16 byte rows, for operands whose pointer or pitch is not a multiple of 16
// bytes. Axes from the outermost; n: extents, s: strides of the source in elements.
struct Repack {
  const u16* src;
  u16* dst;
  i64 n[4], s[4];
};
extern "C" __global__ void farm_repack(const __grid_constant__ Repack p) {
  const i64 total = p.n[0] * p.n[1] * p.n[2] * p.n[3], step = (i64)gridDim.x * blockDim.x;
  for (i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x; k < total; k += step) {
    i64 x = k, at = 0;
    for (int a = 3; a >= 0; --a) {
      at += x % p.n[a] * p.s[a];
      x /= p.n[a];
    }
    p.dst[k] = p.src[at];
  }
}
