#pragma once
// Values of rows of any cache type, exact, and back, in Metal's language. Rounding is that of
// ggml's reference functions (quantize_row_*_ref, ggml-quants.c), but for what fast arithmetic
// makes of a quotient; layouts: ggml-common.h. A chunk is 32 values: a block of any quantised type.
// Metal's fast arithmetic knows no infinity: what is not there is LOWEST.

#include "edgekv-metal.h"

#include <metal_stdlib>

using namespace metal;

enum {
    LANES = EDGEKV_METAL_LANES,
    SIMDGROUPS = EDGEKV_METAL_SIMDGROUPS,
    THREADS = EDGEKV_METAL_THREADS,
    QUERIES = EDGEKV_METAL_QUERIES,
    CHUNK = 32
};

constant float LOWEST = -1e38f; // twice it, or times log2(e), is still a number

// ggml's kvalues_iq4nl
constant float IQ4_NL_VALUES[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53,
    69, 89, 113 };

// bytes of a chunk, and of a block before its nibbles
inline int chunk_bytes(int type) {
    switch (type) {
        case EDGEKV_METAL_F16:
        case EDGEKV_METAL_BF16: return 64;
        case EDGEKV_METAL_Q8_0: return 34;
        case EDGEKV_METAL_Q5_1: return 24;
        case EDGEKV_METAL_Q5_0: return 22;
        case EDGEKV_METAL_Q4_1: return 20;
        default: return 18;
    }
}

inline int nibbles_at(int type) {
    return type == EDGEKV_METAL_Q5_1 ? 8
        : type == EDGEKV_METAL_Q5_0  ? 6
        : type == EDGEKV_METAL_Q4_1  ? 4
                                     : 2;
}

inline float read_half(device const char * p) { return (float) *(device const half *) p; }
inline uint read4(device const char * p) {
    return (uint) * (device const ushort *) p | (uint) * (device const ushort *) (p + 2) << 16;
}
inline void write_half(device char * p, float x) { *(device half *) p = (half) x; }

// value j (0..31) of the chunk at p
inline float read_value(int type, device const char * p, int j) {
    if (type == EDGEKV_METAL_F16) return read_half(p + 2 * j);
    if (type == EDGEKV_METAL_BF16)
        return as_type<float>((uint) * (device const ushort *) (p + 2 * j) << 16);
    const float scale = read_half(p);
    if (type == EDGEKV_METAL_Q8_0) return scale * (float) *(device const int8_t *) (p + 2 + j);
    const int n = *(device const uchar *) (p + nibbles_at(type) + j % 16) >> j / 16 * 4 & 15;
    switch (type) {
        case EDGEKV_METAL_Q4_0: return scale * (float) (n - 8);
        case EDGEKV_METAL_Q4_1: return scale * (float) n + read_half(p + 2);
        case EDGEKV_METAL_Q5_0:
            return scale * (float) ((n | (int) (read4(p + 2) >> j & 1) << 4) - 16);
        case EDGEKV_METAL_Q5_1:
            return scale * (float) (n | (int) (read4(p + 4) >> j & 1) << 4) + read_half(p + 2);
        default: return scale * IQ4_NL_VALUES[n];
    }
}

// Loops over a chunk are written out, lest its values lie in memory and not in registers: those
// have no index that is only known later
#ifdef __METAL_VERSION__
#define WRITTEN_OUT(loop) _Pragma("clang loop unroll(full)") loop
#else
#define WRITTEN_OUT(loop) loop
#endif

// a chunk by one lane, as read_value reads it; zeros behind the first n values, of types without
// blocks
inline void read_chunk(int type, device const char * p, int n, thread float (&x)[CHUNK]) {
    if (type == EDGEKV_METAL_F16 || type == EDGEKV_METAL_BF16) {
        const bool brain = type == EDGEKV_METAL_BF16;
        WRITTEN_OUT(for (int j = 0; j < CHUNK; ++j))
        x[j] = j >= n ? 0.0f
            : brain   ? as_type<float>((uint) * (device const ushort *) (p + 2 * j) << 16)
                      : read_half(p + 2 * j);
        return;
    }
    const float scale = read_half(p);
    device const uchar * bytes = (device const uchar *) (p + nibbles_at(type));
    if (type == EDGEKV_METAL_Q8_0) {
        WRITTEN_OUT(for (int j = 0; j < CHUNK; ++j))
        x[j] = scale * (float) *(device const int8_t *) (p + 2 + j);
    } else if (type == EDGEKV_METAL_IQ4_NL) {
        WRITTEN_OUT(for (int j = 0; j < CHUNK; ++j))
        x[j] = scale * IQ4_NL_VALUES[bytes[j % 16] >> j / 16 * 4 & 15];
    } else {
        const bool five = type == EDGEKV_METAL_Q5_0 || type == EDGEKV_METAL_Q5_1,
                   has_least = type == EDGEKV_METAL_Q4_1 || type == EDGEKV_METAL_Q5_1;
        const uint fifth = five ? read4(p + nibbles_at(type) - 4) : 0;
        const int middle = has_least ? 0 : five ? 16 : 8;
        const float least = has_least ? read_half(p + 2) : 0.0f;
        WRITTEN_OUT(for (int j = 0; j < CHUNK; ++j)) {
            const uint low = (uint) bytes[j % 16] >> j / 16 * 4 & 15;
            x[j] = scale * (float) ((int) (low | (fifth >> j & 1) << 4) - middle) + least;
        }
    }
}

// adds the products of a chunk's first n values with those of N vectors, d apart, and with
// themselves
template <int N>
inline void multiply_chunk(int type, device const char * p, int n,
    threadgroup const float * vectors, int d, thread float (&s)[N], thread float & square) {
    float x[CHUNK];
    read_chunk(type, p, n, x);
    WRITTEN_OUT(for (int j = 0; j < CHUNK; ++j)) {
        if (j < n) { // behind the last vector's last value there may be anything
            square += x[j] * x[j];
            for (int i = 0; i < N; ++i) s[i] += x[j] * vectors[i * d + j];
        }
    }
}

// products of a row with N vectors of d values each; and with itself
template <int N>
inline float multiply_row(int type, device const char * row, int d,
    threadgroup const float * vectors, thread float (&s)[N]) {
    float square = 0;
    for (int i = 0; i < N; ++i) s[i] = 0;
    for (int c = 0; c < d; c += CHUNK)
        multiply_chunk<N>(type, row + c / CHUNK * chunk_bytes(type), min((int) CHUNK, d - c),
            vectors + c, d, s, square);
    return square;
}

// ---- back, by a simd-group: a value per lane

// of the lanes' values the one furthest from zero, the first of equal ones
inline float furthest(float x, uint lane) {
    const float top = simd_max(fabs(x));
    const uint who = simd_min(fabs(x) == top ? lane : (uint) LANES - 1);
    return simd_shuffle(x, (ushort) who);
}

// the entry of iq4_nl's table that is nearest to x: the last whose lower neighbour is not nearer
inline int nearest_iq4_nl(float x) {
    int n = 0;
    for (int step = 8; step > 0; step /= 2)
        if (x - IQ4_NL_VALUES[n + step - 1] >= IQ4_NL_VALUES[n + step] - x) n += step;
    return n;
}

// the scale with which the table comes nearest to the lanes' values, squares of errors weighted by
// squares of values: of 16 tried, the best
inline float scale_iq4_nl(float x, uint lane) {
    const float top = furthest(x, lane);
    if (fabs(top) < 1e-15f) return 0.0f;
    float scale = 0, best = 0;
    for (int i = -8; i <= 7; ++i) { // first with the sign turned
        const float q =
            IQ4_NL_VALUES[nearest_iq4_nl(x * ((i < -7 ? 127.0f : (float) i - 127.0f) / top))];
        const float qx = simd_sum(x * x * q * x), qq = simd_sum(x * x * q * q);
        if (qq > 0 && (i == -8 || qx * qx > best * qq)) {
            scale = qx / qq;
            best = scale * qx;
        }
    }
    return scale;
}

inline float inverse_or_0(float x) { return x == 0 ? 0.0f : 1.0f / x; }

// the lanes' numbers below 16 or 32 as nibbles and fifth bits; all lanes call it
inline void write_numbers(int type, device char * p, uint j, int n) {
    const int other = simd_shuffle_xor(n, (ushort) 16);
    if (j < 16) p[nibbles_at(type) + j] = (char) ((n & 15) | (other & 15) << 4);
    if (type != EDGEKV_METAL_Q5_0 && type != EDGEKV_METAL_Q5_1) return;
    const uint fifth = simd_or((uint) (n >> 4 & 1) << j);
    device char * to = p + nibbles_at(type) - 4;
    if (j < 2) *(device ushort *) (to + 2 * j) = (ushort) (fifth >> 16 * j & 0xffff);
}

inline ushort to_bf16(float x) { // to the nearest, of two to the even one
    const uint y = as_type<uint>(x);
    return (
        ushort) ((y & 0x7fffffff) > 0x7f800000 ? y >> 16 | 64 : (y + 0x7fff + (y >> 16 & 1)) >> 16);
}

// lane j gives value j of the chunk at p; those that are not there give none (types without blocks
// only). All lanes call it.
inline void write_value(int type, device char * p, uint j, float x, bool there) {
    float scale = 0;
    switch (type) {
        case EDGEKV_METAL_F16:
            if (there) write_half(p + 2 * j, x);
            return;
        case EDGEKV_METAL_BF16:
            if (there) *(device ushort *) (p + 2 * j) = to_bf16(x);
            return;
        case EDGEKV_METAL_Q8_0:
            scale = simd_max(fabs(x)) / 127.0f;
            p[2 + j] = (char) (int) round(x * inverse_or_0(scale));
            break;
        case EDGEKV_METAL_Q4_0:
        case EDGEKV_METAL_Q5_0: {
            const float middle = type == EDGEKV_METAL_Q4_0 ? 8.0f : 16.0f;
            scale = furthest(x, j) / -middle;
            write_numbers(type, p, j,
                min((int) (2 * middle) - 1, (int) (x * inverse_or_0(scale) + middle + 0.5f)));
            break;
        }
        case EDGEKV_METAL_Q4_1:
        case EDGEKV_METAL_Q5_1: {
            const int most = type == EDGEKV_METAL_Q4_1 ? 15 : 31;
            const float lo = simd_min(x);
            scale = (simd_max(x) - lo) / (float) most;
            write_numbers(type, p, j, min(most, (int) ((x - lo) * inverse_or_0(scale) + 0.5f)));
            if (j == 2) write_half(p + 2, lo);
            break;
        }
        default:
            scale = scale_iq4_nl(x, j);
            write_numbers(type, p, j, nearest_iq4_nl(x * inverse_or_0(scale)));
    }
    if (j == 0) write_half(p, scale);
}
