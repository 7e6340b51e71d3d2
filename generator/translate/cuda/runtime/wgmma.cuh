// sm_90a: places in rings of tiles, matrix descriptors, the order in which blocks take tiles of the grid.
//
// A tile (rows, columns) lies in shared memory as chunks of 64 columns: rows x 128 bytes each, 128 byte swizzle, every tile on a 1024
// byte boundary. lbo, sbo: bytes to the next chunk and to the next eight rows. PTX ISA, asynchronous warpgroup instructions, "Matrix
// descriptor": address, lbo and sbo in units of 16 bytes; 1 in bits 62 and 63 is the swizzle of 128 bytes.
DEVICE u64 descriptor(u32 address, u32 lbo, u32 sbo) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(lbo >> 4) << 16 | (u64)(sbo >> 4) << 32 | 1ull << 62;
}
// Zeros for the rows of a tile from `first` on, by one warpgroup: what lies past a matrix that ends inside its tensor. Warpgroups
// that share the tile all do it.
template <int ROWS, int CHUNKS> DEVICE void zero_rows(u32 tile, int first, int thread, int barrier) {
  for (int i = thread; i < 8 * ROWS * CHUNKS; i += 128)
    if (i / 8 % ROWS >= first) store_shared16(tile + 16 * i, make_uint4(0, 0, 0, 0));
  fence_shared_writes();
  bar_sync(barrier, 128);
}
// A left operand into registers: 16 columns a step, `row` and half of the step as ldmatrix wants them from this lane.
template <int ROWS, int MT, int F> DEVICE void load_left(u32 (&x)[MT][F], u32 tile, int row, int half) {
  UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int k = 0; k < F / 4; ++k) {
    u32 y[4];
    ldsm4(y, tile + (k / 4) * ROWS * 128 + (row + 64 * t) * 128 + ((2 * (k % 4) + half) ^ (row & 7)) * 16);
    UNROLL for (int i = 0; i < 4; ++i) x[t][4 * k + i] = y[i];
  }
}
struct Ring {  // a slot and its phase; consumers start with phase 0, the producer with 1
  int slot;
  u32 phase;
  template <int SLOTS> DEVICE void next() {
    if (++slot == SLOTS) {
      slot = 0;
      phase ^= 1;
    }
  }
};
// Tiles of the grid in the order they are handed out: sections of `section` outer indices, in which all inner ones (the first axis)
// are taken before the next section begins; longest first where the tiles of the first axis differ.
struct Order {
  int total, section, num_first, num_rest;
  template <bool LONGEST_FIRST> DEVICE int linear(int tile) const {  // the block number that the grid's decoding expects
    const int per = section * num_first, sec = tile / per, rem = tile - sec * per;
    const int width = min(section, num_rest - sec * section), inner = rem / width;
    const int rest = sec * section + (rem - inner * width);
    return rest * num_first + (LONGEST_FIRST ? num_first - 1 - inner : inner);
  }
};
// The next tile of a block: from a counter in global memory that the last block puts back to zero.
DEVICE int take_tile(int* counter) { return (int)gridDim.x + atomicAdd(counter, 1); }
DEVICE void leave_queue(int* counter) {
  __threadfence();
  if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) {
    counter[0] = 0;
    counter[1] = 0;
    __threadfence();
  }
}
