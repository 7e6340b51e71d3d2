// Matrix products on mma.sync: operands from shared memory by ldmatrix or from registers, one warp's 16 MT rows of the result.
// One operand in shared memory. T: it is used transposed. COLS: the tile's columns, as stored.
template <int COLS, bool T> struct OperandA {  // 16 rows of the result, 16 of the contraction
  u32 base;
  DEVICE OperandA(u32 tile, int row, int lane)
      : base(T ? tile + Shared<COLS>::at((lane & 7) + ((lane >> 4) << 3), (row >> 3) + ((lane >> 3) & 1))
               : tile + Shared<COLS>::at(row + (lane & 15), lane >> 4)) {}
  DEVICE void get(u32 (&a)[4], int t, int k) const {
    if (T) ldsm4t(a, Shared<COLS>::step(base, t) + 16 * k * Shared<COLS>::PITCH);
    else ldsm4(a, Shared<COLS>::step(base, k) + 16 * t * Shared<COLS>::PITCH);
  }
};
template <int COLS, bool T> struct OperandB {  // 16 columns of the result, 16 of the contraction
  u32 base;
  DEVICE OperandB(u32 tile, int lane)
      : base(tile + (T ? Shared<COLS>::at(((lane >> 4) << 3) + (lane & 7), (lane >> 3) & 1) : Shared<COLS>::at(lane & 15, lane >> 4))) {}
  DEVICE void get(u32 (&b)[4], int j, int k) const {  // {columns 0-7, k 0-7}, {0-7, k 8-15}, {8-15, k 0-7}, {8-15, k 8-15}
    if (T) ldsm4(b, Shared<COLS>::step(base, k) + 16 * j * Shared<COLS>::PITCH);
    else ldsm4t(b, Shared<COLS>::step(base, j) + 16 * k * Shared<COLS>::PITCH);
  }
};
// C += A B with both in shared memory, N and K multiples of 16.
template <Type T, int K, int N, int MT, int M, class A, class B> DEVICE void gemm(float (&c)[MT][M], const A& a, const B& b) {
  UNROLL for (int k = 0; k < K / 16; ++k) {
    u32 x[MT][4];
    UNROLL for (int t = 0; t < MT; ++t) a.get(x[t], t, k);
    UNROLL for (int j = 0; j < N / 16; ++j) {
      u32 y[4];
      b.get(y, j, k);
      UNROLL for (int t = 0; t < MT; ++t) {
        mma16<T>(&c[t][8 * j], x[t], y[0], y[1]);
        mma16<T>(&c[t][8 * j + 4], x[t], y[2], y[3]);
      }
    }
  }
}
// C += A B with A in registers.
template <Type T, int K, int N, int MT, int M, int F, class B> DEVICE void gemm(float (&c)[MT][M], const u32 (&a)[MT][F], const B& b) {
  UNROLL for (int k = 0; k < K / 16; ++k) UNROLL for (int j = 0; j < N / 16; ++j) {
    u32 y[4];
    b.get(y, j, k);
    UNROLL for (int t = 0; t < MT; ++t) {
      mma16<T>(&c[t][8 * j], &a[t][4 * k], y[0], y[1]);
      mma16<T>(&c[t][8 * j + 4], &a[t][4 * k], y[2], y[3]);
    }
  }
}
// An operand that a loop reads in every iteration, loaded once.
template <int K, int MT, int F, class A> DEVICE void load_operand(u32 (&x)[MT][F], const A& a) {
  UNROLL for (int k = 0; k < K / 16; ++k) UNROLL for (int t = 0; t < MT; ++t) {
    u32 y[4];
    a.get(y, t, k);
    UNROLL for (int i = 0; i < 4; ++i) x[t][4 * k + i] = y[i];
  }
}
// Row sums of an operand in registers, in each of eight columns.
template <Type T, int K, int MT, int M, int F> DEVICE void add_row_sums(float (&c)[MT][M], const u32 (&a)[MT][F]) {
  constexpr u32 ONES = T == BF16 ? 0x3f803f80u : 0x3c003c00u;
  UNROLL for (int k = 0; k < K / 16; ++k) UNROLL for (int t = 0; t < MT; ++t) mma16<T>(c[t], &a[t][4 * k], ONES, ONES);
}
// Whether a thread's part of an operand of numbers from 0 on holds one of 2 or more, infinity or NaN: F16 and BF16 alike, these have
// the exponent's highest bit.
template <int MT, int F> DEVICE bool reaches_two(const u32 (&a)[MT][F]) {
  u32 seen = 0;
  UNROLL for (int t = 0; t < MT; ++t) UNROLL for (int i = 0; i < F; ++i) seen |= a[t][i];
  return (seen & 0x40004000u) != 0;
}
