#pragma once
// One value of a row per lane, exact, and back: a warp reads or writes 32 values, a block of any
// quantised type. Rounding is that of ggml's reference functions (quantize_row_*_ref,
// ggml-quants.c); layouts: ggml-common.h

#include "edgekv-rows.cuh"

namespace edgekv_cuda {

// bytes of 32 values
__host__ __device__ constexpr int chunk_bytes(int type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? 64
        : type == GGML_TYPE_Q8_0                           ? 34
        : type == GGML_TYPE_Q5_1                           ? 24
        : type == GGML_TYPE_Q5_0                           ? 22
        : type == GGML_TYPE_Q4_1                           ? 20
                                                           : 18;
}

// bytes of a block before its nibbles
__host__ __device__ constexpr int nibbles_at(int type) {
    return type == GGML_TYPE_Q5_1 ? 8 : type == GGML_TYPE_Q5_0 ? 6 : type == GGML_TYPE_Q4_1 ? 4 : 2;
}

__device__ __forceinline__ float read_half(const char * p) {
    return __half2float(halves(read2(p)).x);
}
__device__ __forceinline__ void write2(char * p, uint32_t x) { *(uint16_t *) p = (uint16_t) x; }
__device__ __forceinline__ void write_half(char * p, float x) { write2(p, pack(x, 0.0f) & 0xffff); }

// entry n (0..15) of iq4_nl's table
__device__ __forceinline__ float iq4_nl_value(int n) {
    return (float) (iq4_nl_values((uint32_t) n) & 0xff) - 128.0f;
}

// value j (0..31) of the chunk at p
__device__ __forceinline__ float read_value(int type, const char * p, int j) {
    if (type == GGML_TYPE_F16) return read_half(p + 2 * j);
    if (type == GGML_TYPE_BF16) {
        const uint32_t x = read2(p + 2 * j) << 16;
        float y;
        memcpy(&y, &x, sizeof(y));
        return y;
    }
    const float scale = read_half(p);
    if (type == GGML_TYPE_Q8_0) return scale * (signed char) p[2 + j];
    const int n = (unsigned char) p[nibbles_at(type) + j % 16] >> j / 16 * 4 & 15;
    switch (type) {
        case GGML_TYPE_Q4_0: return scale * (n - 8);
        case GGML_TYPE_Q4_1: return scale * n + read_half(p + 2);
        case GGML_TYPE_Q5_0: return scale * ((n | (int) (read4(p + 2) >> j & 1) << 4) - 16);
        case GGML_TYPE_Q5_1:
            return scale * (n | (int) (read4(p + 4) >> j & 1) << 4) + read_half(p + 2);
        default: return scale * iq4_nl_value(n);
    }
}

// of the lanes' values the one furthest from zero, the first of equal ones
__device__ __forceinline__ float furthest(float x) {
    const float top = max_over(fabsf(x), WARP);
    const uint32_t who = __ballot_sync(ALL_LANES, fabsf(x) == top);
    return __shfl_sync(ALL_LANES, x, who ? __ffs((int) who) - 1 : 0);
}

// the entry of iq4_nl's table that is nearest to x: the last whose lower neighbour is not nearer
__device__ __forceinline__ int nearest_iq4_nl(float x) {
    int n = 0;
    for (int step = 8; step > 0; step /= 2)
        if (x - iq4_nl_value(n + step - 1) >= iq4_nl_value(n + step) - x) n += step;
    return n;
}

// the scale with which the table comes nearest to the lanes' values, squares of errors weighted by
// squares of values: of 16 tried, the best
__device__ __forceinline__ float scale_iq4_nl(float x) {
    const float top = furthest(x);
    if (fabsf(top) < 1e-15f) return 0.0f;
    float scale = 0, best = 0;
    for (int i = -8; i <= 7; ++i) { // first with the sign turned
        const float q = iq4_nl_value(nearest_iq4_nl(x * ((i < -7 ? 127.0f : i - 127.0f) / top)));
        const float qx = sum_over(x * x * q * x, WARP), qq = sum_over(x * x * q * q, WARP);
        if (qq > 0 && (i == -8 || qx * qx > best * qq)) {
            scale = qx / qq;
            best = scale * qx;
        }
    }
    return scale;
}

__device__ __forceinline__ float inverse_or_0(float x) { return x == 0 ? 0.0f : 1.0f / x; }

// the lanes' numbers below 16 or 32 as nibbles and fifth bits; all lanes call it
__device__ __forceinline__ void write_numbers(int type, char * p, int j, int n) {
    const int other = __shfl_xor_sync(ALL_LANES, n, 16);
    if (j < 16) p[nibbles_at(type) + j] = (char) ((n & 15) | (other & 15) << 4);
    if (type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q5_1) return;
    const uint32_t fifth = __ballot_sync(ALL_LANES, n & 16);
    char * to = p + nibbles_at(type) - 4;
    if (j == 0) write2(to, fifth & 0xffff);
    if (j == 1) write2(to + 2, fifth >> 16);
}

// lane j gives value j of the chunk at p; those that are not there give none (types without blocks
// only). All lanes call it.
__device__ __forceinline__ void write_value(int type, char * p, int j, float x, bool there) {
    float scale = 0;
    switch (type) {
        case GGML_TYPE_F16:
            if (there) write_half(p + 2 * j, x);
            return;
        case GGML_TYPE_BF16: { // to the nearest, of two to the even one
            uint32_t y;
            memcpy(&y, &x, sizeof(y));
            if (there)
                write2(p + 2 * j, x != x ? y >> 16 | 64 : (y + 0x7fff + (y >> 16 & 1)) >> 16);
            return;
        }
        case GGML_TYPE_Q8_0:
            scale = max_over(fabsf(x), WARP) / 127.0f;
            p[2 + j] = (char) (int) roundf(x * inverse_or_0(scale));
            break;
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q5_0: {
            const float half = type == GGML_TYPE_Q4_0 ? 8.0f : 16.0f;
            scale = furthest(x) / -half;
            write_numbers(type, p, j,
                min((int) (2 * half) - 1, (int) (x * inverse_or_0(scale) + half + 0.5f)));
            break;
        }
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_1: {
            const int most = type == GGML_TYPE_Q4_1 ? 15 : 31;
            const float lo = -max_over(-x, WARP);
            scale = (max_over(x, WARP) - lo) / most;
            write_numbers(type, p, j, min(most, (int) ((x - lo) * inverse_or_0(scale) + 0.5f)));
            if (j == 2) write_half(p + 2, lo);
            break;
        }
        default:
            scale = scale_iq4_nl(x);
            write_numbers(type, p, j, nearest_iq4_nl(x * inverse_or_0(scale)));
    }
    if (j == 0) write_half(p, scale);
}

} // namespace edgekv_cuda
