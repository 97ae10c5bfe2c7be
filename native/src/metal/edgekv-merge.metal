// merge on Metal: which kept row an evicted one resembles most, and folding it in. The definition
// of correct is cpu/edgekv-merge.cpp. Search: a threadgroup holds 16 evicted rows as f32 and walks
// over all kept ones, a row per lane. Fold: a simd-group sums 32 values of one row, one per lane,
// which is a block of any quantised type, and writes them in that type.
#include "edgekv-values.h"

enum { GONE = EDGEKV_METAL_GONE };

inline float inverse_length(float square) { return square > 0 ? 1.0f / sqrt(square) : 1.0f; }

// rows of this threadgroup as f32 with length 1: [GONE][d]; the last one again behind the last
inline void load_gone(constant edgekv_metal_nearest & a, int i0, device const char * rows,
    device const int * gone, threadgroup float * to, int lane, int simd) {
    for (int i = simd; i < GONE; i += SIMDGROUPS) {
        device const char * row = rows + (uint64_t) gone[min(i0 + i, a.n_gone - 1)] * a.nb;
        float square = 0;
        for (int c = lane; c < a.d; c += LANES) {
            const float x = read_value(a.type, row + c / CHUNK * chunk_bytes(a.type), c % CHUNK);
            square += x * x;
            to[i * a.d + c] = x;
        }
        const float inverse = inverse_length(simd_sum(square));
        for (int c = lane; c < a.d; c += LANES) to[i * a.d + c] *= inverse;
    }
}

// grid [evicted rows/16]; cosine and nearest [n_gone], the first of equal ones
kernel void edgekv_merge_nearest(EDGEKV_PLACE, constant edgekv_metal_nearest & a [[buffer(0)]],
    device const char * rows [[buffer(1)]], device const int * gone [[buffer(2)]],
    device const int * kept [[buffer(3)]], device float * cosine [[buffer(4)]],
    device int * nearest [[buffer(5)]]) {
    const int lane = (int) tid % LANES, simd = (int) tid / LANES, i0 = (int) group.x * GONE;
    // [SIMDGROUPS][GONE] the highest of each simd-group, and where
    threadgroup float * values = shared + GONE * a.d;
    threadgroup int * places = (threadgroup int *) (values + SIMDGROUPS * GONE);
    load_gone(a, i0, rows, gone, shared, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float best[GONE];
    int at[GONE];
    for (int i = 0; i < GONE; ++i) {
        best[i] = LOWEST;
        at[i] = a.n_kept;
    }
    for (int j = (int) tid; j < a.n_kept; j += THREADS) {
        float s[GONE];
        const float inverse = inverse_length(
            multiply_row<GONE>(a.type, rows + (uint64_t) kept[j] * a.nb, a.d, shared, s));
        for (int i = 0; i < GONE; ++i)
            if (s[i] * inverse > best[i]) {
                best[i] = s[i] * inverse;
                at[i] = j;
            }
    }
    for (int i = 0; i < GONE; ++i) {
        const float top = simd_max(best[i]);
        const int place = simd_min(best[i] == top ? at[i] : a.n_kept);
        if (lane == 0) {
            values[simd * GONE + i] = top;
            places[simd * GONE + i] = place;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int i = (int) tid;
    if (i >= GONE || i0 + i >= a.n_gone) return;
    float top = LOWEST;
    int place = a.n_kept;
    for (int w = 0; w < SIMDGROUPS; ++w) {
        const float x = values[w * GONE + i];
        if (x > top || (x == top && places[w * GONE + i] < place)) {
            top = x;
            place = places[w * GONE + i];
        }
    }
    cosine[i0 + i] = top;
    nearest[i0 + i] = place < a.n_kept ? place : 0;
}

// grid [rows/4, chunks]; begin [n]: where each row's list begins among the sources. No row that is
// read by another simd-group is written.
kernel void edgekv_merge_fold(EDGEKV_PLACE, constant edgekv_metal_fold & a [[buffer(0)]],
    device char * rows [[buffer(1)]], device const int * targets [[buffer(2)]],
    device const float * own [[buffer(3)]], device const int * counts [[buffer(4)]],
    device const int * begin [[buffer(5)]], device const int * sources [[buffer(6)]],
    device const float * weights [[buffer(7)]]) {
    (void) shared;
    const int lane = (int) tid % LANES, i = (int) group.x * SIMDGROUPS + (int) tid / LANES;
    if (i >= a.n) return;
    device char * chunk = rows + group.y * chunk_bytes(a.type);
    const bool there = (int) group.y * CHUNK + lane < a.d;
    device char * target = chunk + (uint64_t) targets[i] * a.nb;
    float sum = there ? own[i] * read_value(a.type, target, lane) : 0.0f;
    for (int j = begin[i]; j < begin[i] + counts[i] && there; ++j)
        sum += weights[j] * read_value(a.type, chunk + (uint64_t) sources[j] * a.nb, lane);
    write_value(a.type, target, (uint) lane, sum, there);
}
