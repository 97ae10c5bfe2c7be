// evict on Metal: rows move as bytes, whatever their type. Row i of `to` is row index[i] of `from`;
// the two do not overlap.
#include "edgekv-metal.h"

#include <metal_stdlib>

using namespace metal;

// grid [rows/4]: a simd-group per row. U: as many bytes at once as all addresses allow
template <typename U>
inline void gather_row(uint3 group, uint tid, constant edgekv_metal_gather & a,
    device const char * from, device char * to, device const int * index) {
    const int i = (int) (group.x * EDGEKV_METAL_SIMDGROUPS + tid / EDGEKV_METAL_LANES);
    if (i >= a.n_rows) return;
    device const U * source =
        (device const U *) (from + (uint64_t) (a.has_index ? index[i] : i) * a.n_bytes);
    device U * target = (device U *) (to + (uint64_t) i * a.n_bytes);
    for (uint j = tid % EDGEKV_METAL_LANES; j < a.n_bytes / sizeof(U); j += EDGEKV_METAL_LANES)
        target[j] = source[j];
}

#define EDGEKV_GATHER(N, U)                                                                     \
    kernel void edgekv_gather_##N(EDGEKV_PLACE, constant edgekv_metal_gather & a [[buffer(0)]], \
        device const char * from [[buffer(1)]], device char * to [[buffer(2)]],                 \
        device const int * index [[buffer(3)]]) {                                               \
        (void) shared;                                                                          \
        gather_row<U>(group, tid, a, from, to, index);                                          \
    }

EDGEKV_GATHER(16, uint4)
EDGEKV_GATHER(4, uint)
EDGEKV_GATHER(2, ushort)
