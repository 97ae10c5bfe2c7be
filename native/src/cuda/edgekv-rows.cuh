#pragma once
// Rows of any cache type as halves in registers, eight values at a time: what a lane feeds to the
// tensor cores. A row is cut into chunks of 32 values (a quantised block); lane t of 4 takes the
// eight values of chunk i that lie together in the block's bytes. Which ones those are is
// value_column's to say: K's dot products and V's columns may come in any order if both sides
// agree.

#include "edgekv-device.cuh"

#include "ggml.h"

namespace edgekv_cuda {

constexpr int ANY_TYPE = -1; // a kernel that is told the type when it runs
constexpr int CHUNK = 32;

struct half8 {
    uint32_t w[4];
}; // values 2i and 2i + 1 in w[i]

__host__ __device__ constexpr bool has_blocks(int type) {
    return type != GGML_TYPE_F16 && type != GGML_TYPE_BF16;
}

// of a row of d values, of the types that kernels are made for
__host__ __device__ constexpr size_t row_bytes(int type, int d) {
    return type == GGML_TYPE_Q8_0 ? d / CHUNK * 34
        : type == GGML_TYPE_Q4_0  ? d / CHUNK * 18
                                  : 2 * d;
}

// column within its chunk of value e (0..7) of lane t (0..3). Blocks: where the lanes' nibbles lie
// together; of q8_0 too, whose lanes would else read words of few banks
__host__ __device__ constexpr int value_column(int type, int t, int e) {
    return !has_blocks(type) ? 8 * t + e : e < 4 ? 4 * t + e : 16 + 4 * t + e - 4;
}

__device__ __forceinline__ uint32_t bits(__half2 x) {
    uint32_t y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
__device__ __forceinline__ __half2 halves(uint32_t x) {
    __half2 y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    return bits(__floats2half2_rn(lo, hi));
}

// blocks of most types begin at even addresses only
__device__ __forceinline__ uint32_t read2(const char * p) { return *(const uint16_t *) p; }
__device__ __forceinline__ uint32_t read4(const char * p) { return read2(p) | read2(p + 2) << 16; }
__device__ __forceinline__ __half2 read_scale(const char * p) {
    return halves(read2(p) * 0x10001u);
}

// four unsigned bytes u as two half2: factor*(u - zero) + offset. 0x6400 | u is the half 1024 + u,
// so the difference is exact.
__device__ __forceinline__ void scaled(
    uint32_t u, float zero, __half2 factor, __half2 offset, uint32_t & lo, uint32_t & hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 530
    (void) u;
    (void) zero;
    (void) factor;
    (void) offset;
    lo = hi = 0; // they cannot calculate with halves; edgekv_cuda_ready keeps them out
#else
    const __half2 base = __floats2half2_rn(1024.0f + zero, 1024.0f + zero);
    lo = bits(__hfma2(__hsub2(halves(__byte_perm(u, 0x64646464, 0x4140)), base), factor, offset));
    hi = bits(__hfma2(__hsub2(halves(__byte_perm(u, 0x64646464, 0x4342)), base), factor, offset));
#endif
}

// u0: the first four values, u1: the second
__device__ __forceinline__ half8 scaled8(
    uint32_t u0, uint32_t u1, float zero, __half2 factor, __half2 offset) {
    half8 x;
    scaled(u0, zero, factor, offset, x.w[0], x.w[1]);
    scaled(u1, zero, factor, offset, x.w[2], x.w[3]);
    return x;
}

__device__ __forceinline__ half8 read_f16(const char * p) {
    const uint4 x = *(const uint4 *) p;
    return { { x.x, x.y, x.z, x.w } };
}

// larger than a half holds: the largest half
__device__ __forceinline__ half8 read_bf16(const char * p) {
    const half8 x = read_f16(p);
    half8 y;
    for (int i = 0; i < 4; ++i) {
        float lo, hi;
        const uint32_t a = x.w[i] << 16, b = x.w[i] & 0xffff0000u;
        memcpy(&lo, &a, sizeof(lo));
        memcpy(&hi, &b, sizeof(hi));
        y.w[i] = pack(fminf(fmaxf(lo, -65504.0f), 65504.0f), fminf(fmaxf(hi, -65504.0f), 65504.0f));
    }
    return y;
}

// bits 0..3 of x to bit 4 of four bytes
__device__ __forceinline__ uint32_t fifth_bits(uint32_t x) {
    return (x << 4 & 0x10) | (x << 11 & 0x1000) | (x << 18 & 0x100000) | (x << 25 & 0x10000000);
}

// the values of four nibbles (those of the low half of x) in iq4_nl's table, plus 128: a byte each
__device__ __forceinline__ uint32_t iq4_nl_values(uint32_t x) {
    // ggml's kvalues_iq4nl, -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    const uint32_t low = __byte_perm(0x3f2d1801, 0x766a5d4f, x & 0x7777),
                   high = __byte_perm(0xa6998d81, 0xf1d9c5b5, x & 0x7777);
    return __byte_perm(low, high, 0x3210 | (x & 0x8888) >> 1);
}

__device__ __forceinline__ half8 read_iq4_nl(const char * block, int t) {
    const uint32_t x = read4(block + 2 + 4 * t), a = iq4_nl_values(x & 0xffff),
                   b = iq4_nl_values(x >> 16);
    return scaled8(
        __byte_perm(a, b, 0x6420), __byte_perm(a, b, 0x7531), 128, read_scale(block), halves(0));
}

// eight values of lane t in chunk i of the row at p; zeros behind the d values of the row. Layouts:
// ggml-common.h swizzle: pieces of 16 bytes lie at their number ^ swizzle (types without blocks
// only)
__device__ __forceinline__ half8 read8(
    int type, const char * p, int i, int t, int d, int swizzle = 0) {
    if (i * CHUNK + (has_blocks(type) ? 0 : 8 * t) >= d) return { { 0, 0, 0, 0 } };
    const __half2 none = halves(0);
    const int piece = (i / 2 * 8 + ((i % 2 * 4 + t) ^ swizzle)) * 16; // a swizzle is less than 8
    constexpr uint32_t LOW = 0x0f0f0f0f;
    switch (type) {
        case GGML_TYPE_F16: return read_f16(p + piece);
        case GGML_TYPE_BF16: return read_bf16(p + piece);
        case GGML_TYPE_Q8_0: {
            p += i * 34;
            return scaled8(read4(p + 2 + 4 * t) ^ 0x80808080, read4(p + 18 + 4 * t) ^ 0x80808080,
                128, read_scale(p), none);
        }
        case GGML_TYPE_Q4_0: {
            p += i * 18;
            const uint32_t x = read4(p + 2 + 4 * t);
            return scaled8(x & LOW, x >> 4 & LOW, 8, read_scale(p), none);
        }
        case GGML_TYPE_Q4_1: {
            p += i * 20;
            const uint32_t x = read4(p + 4 + 4 * t);
            return scaled8(x & LOW, x >> 4 & LOW, 0, read_scale(p), read_scale(p + 2));
        }
        case GGML_TYPE_Q5_0: {
            p += i * 22;
            const uint32_t x = read4(p + 6 + 4 * t), h = read4(p + 2) >> 4 * t;
            return scaled8((x & LOW) | fifth_bits(h), (x >> 4 & LOW) | fifth_bits(h >> 16), 16,
                read_scale(p), none);
        }
        case GGML_TYPE_Q5_1: {
            p += i * 24;
            const uint32_t x = read4(p + 8 + 4 * t), h = read4(p + 4) >> 4 * t;
            return scaled8((x & LOW) | fifth_bits(h), (x >> 4 & LOW) | fifth_bits(h >> 16), 0,
                read_scale(p), read_scale(p + 2));
        }
        default: return read_iq4_nl(p + i * 18, t);
    }
}

// Fragment i = (2*chunk + half)*32 + lane of 16 queries, against which the rows of `type` are
// multiplied: q0 and q1 are queries lane/4 and lane/4 + 8, null = zeros. half h goes with w[2h] and
// w[2h + 1] of read8.
__device__ __forceinline__ uint4 query_fragment(
    int type, int d, int i, const float * q0, const float * q1) {
    const int t = i % 4, half = i / WARP % 2, chunk = i / (2 * WARP);
    uint32_t x[4];
    for (int j = 0; j < 4; ++j) {
        const float * q = j % 2 ? q1 : q0;
        // its neighbour is the next value
        const int column = chunk * CHUNK + value_column(type, t, 4 * half + j / 2 * 2);
        x[j] = !q || column >= d ? 0 : pack(q[column], q[column + 1]);
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
}

inline bool type_supported(enum ggml_type type, int d) {
    switch (type) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return d > 0 && d <= 256 && d % 8 == 0;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL: return d > 0 && d <= 256 && d % CHUNK == 0;
        default: return false;
    }
}

} // namespace edgekv_cuda
