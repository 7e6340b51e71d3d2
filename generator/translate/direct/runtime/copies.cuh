// Tensors into compact copies and back, for kernels whose tensors have to be compact or aligned. Axes from the outermost; n: extents,
// s: strides of the tensor in elements, x: its address, y: that of the copy.
struct farm_Copy {
  void* x;
  void* y;
  long long n[4], s[4];
};
template <class T, bool BACK> __device__ __forceinline__ void farm_copy(const farm_Copy& p) {
  const long long total = p.n[0] * p.n[1] * p.n[2] * p.n[3], step = (long long)gridDim.x * blockDim.x;
  for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < total; k += step) {
    long long left = k, at = 0;
    for (int a = 3; a >= 0; --a) {
      at += left % p.n[a] * p.s[a];
      left /= p.n[a];
    }
    if (BACK) ((T*)p.x)[at] = ((const T*)p.y)[k];
    else ((T*)p.y)[k] = ((const T*)p.x)[at];
  }
}
extern "C" __global__ void farm_repack(const __grid_constant__ farm_Copy p) { farm_copy<unsigned short, false>(p); }
extern "C" __global__ void farm_unpack(const __grid_constant__ farm_Copy p) { farm_copy<unsigned short, true>(p); }
extern "C" __global__ void farm_repack_32(const __grid_constant__ farm_Copy p) { farm_copy<unsigned, false>(p); }
extern "C" __global__ void farm_unpack_32(const __grid_constant__ farm_Copy p) { farm_copy<unsigned, true>(p); }
