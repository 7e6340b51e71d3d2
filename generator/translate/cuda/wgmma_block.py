"""The block of a wgmma kernel: shared memory, barriers, and the two roles. What each role does is written by its own file."""

from __future__ import annotations

from generator.translate.cuda import names
from generator.translate.cuda.grid import longest_first
from generator.translate.cuda.wgmma_consumer import Consumer
from generator.translate.cuda.wgmma_kernel import Frame, write_barriers
from generator.translate.cuda.wgmma_producer import NarrowProducer, Producer


def write_wgmma_kernel(frame: Frame, entry: str) -> None:
    """The kernel, after the runtime's headers and the parameter block."""
    u, w = frame.u, frame.u.w
    w("", "#define BAR(i) (bars + 8 * (i))", f"DEVICE int block_of(const {frame.block_type}& p, int tile) {{")
    w(
        f"return Order{{p.q_total, p.q_section, p.q_num_first, p.q_num_rest}}.linear<{str(longest_first(u)).lower()}>(tile);",
        "}",
        "",
    )
    bounds = f"__launch_bounds__({frame.threads}, 1)"
    w(f'extern "C" __global__ void {bounds} {entry}(const __grid_constant__ {frame.block_type} p) {{')
    w("extern __shared__ __align__(1024) u8 smem_raw[];", "const u32 smem = (smem_u32(smem_raw) + 1023u) & ~1023u;")
    w(*(f"const u32 {names.shared(t.name)} = smem + {t.offset};" for t in u.tiles.values()))
    last = frame.placement.num_barriers
    w(f"const u32 bars = smem + {frame.placement.barrier_offset}, tile_word = BAR({last}), scratch = BAR({last + 1});")
    w("const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), role = warp >> 2, lane = threadIdx.x & 31;")
    if not u.narrow:
        w("if (threadIdx.x == 0) {", *(f"tma_prefetch(&p.map_{t.name});" for t in u.tiles.values()), "}")
    write_barriers(frame)
    w("", "if (role == 0) {")
    (NarrowProducer if u.narrow else Producer)(frame).write()
    w("} else {")
    Consumer(frame).write()
    w("}", "}")
