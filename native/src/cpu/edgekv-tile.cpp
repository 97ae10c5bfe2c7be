// Rows of any type as f32
#include "edgekv-tile.h"
#include "edgekv-levels.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"

#include <cstring>
#include <type_traits>

// The types of a cache, and those that most weights have, have conversions of their own: the base
// library's are built for the oldest processor. Types with a least value may differ from those in
// the last bit, where a product and a sum become one instruction.

namespace {

constexpr int HALF = 16; // values of half a block

#if defined(__GNUC__)
// the compiler makes as many registers of 16 values as the processor needs
typedef uint8_t bytes __attribute__((vector_size(HALF)));
typedef int32_t whole __attribute__((vector_size(4 * HALF)));
typedef float values __attribute__((vector_size(4 * HALF)));

// gcc 12 extends only bytes without a sign in one instruction
inline void q8_0_half(const int8_t * qs, float d, float * y) {
    bytes q;
    memcpy(&q, qs, sizeof(q));
    const whole number = __builtin_convertvector(q ^ 128, whole) - 128;
    const values x = __builtin_convertvector(number, values) * d;
    memcpy(y, &x, sizeof(x));
}

inline void put(whole number, int zero, float d, float least, float * y) {
    const values x = __builtin_convertvector(number - zero, values) * d + least;
    memcpy(y, &x, sizeof(x));
}

// y = d (q - zero) + least of the lower or upper four bits of 16 bytes; high: a fifth bit of each
inline void four_bits_half(
    const uint8_t * qs, int shift, uint32_t high, int zero, float d, float least, float * y) {
    bytes q;
    memcpy(&q, qs, sizeof(q));
    const whole place { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const whole fifth = ((int32_t) high >> place & 1) << 4;
    put(__builtin_convertvector((q >> (uint8_t) shift) & 15, whole) + fifth, zero, d, least, y);
}

// the same where the bits above the four are `mask` of the bytes at `qh`, shifted by `above`
inline void more_bits_half(const uint8_t * qs, int shift, const uint8_t * qh, int above, int mask,
    int zero, float d, float least, float * y) {
    bytes q, h;
    memcpy(&q, qs, sizeof(q));
    memcpy(&h, qh, sizeof(h));
    const bytes all = (q >> (uint8_t) shift & 15) | (h >> (uint8_t) above & (uint8_t) mask) << 4;
    put(__builtin_convertvector(all, whole), zero, d, least, y);
}
#else
inline void q8_0_half(const int8_t * qs, float d, float * y) {
    for (int i = 0; i < HALF; ++i) y[i] = d * qs[i];
}

inline void four_bits_half(
    const uint8_t * qs, int shift, uint32_t high, int zero, float d, float least, float * y) {
    for (int i = 0; i < HALF; ++i)
        y[i] = d * (float) ((qs[i] >> shift & 15 | (high >> i & 1) << 4) - zero) + least;
}

inline void more_bits_half(const uint8_t * qs, int shift, const uint8_t * qh, int above, int mask,
    int zero, float d, float least, float * y) {
    for (int i = 0; i < HALF; ++i)
        y[i] = d * (float) ((qs[i] >> shift & 15 | (qh[i] >> above & mask) << 4) - zero) + least;
}
#endif

void blocks_to_f32(const block_q8_0 * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK8_0; ++b, ++x) {
        const float d = GGML_CPU_FP16_TO_FP32(x->d);
        for (int i = 0; i < QK8_0; i += HALF, y += HALF) q8_0_half(x->qs + i, d, y);
    }
}

// blocks of 32 values of 4 or 5 bits: value i in the lower four bits of a byte, value i + 16 in
// the upper ones
template <typename B>
void blocks_to_f32(const B * x, int64_t n, float * y) {
    constexpr bool five = std::is_same_v<B, block_q5_0> || std::is_same_v<B, block_q5_1>;
    constexpr bool least = std::is_same_v<B, block_q4_1> || std::is_same_v<B, block_q5_1>;
    for (int64_t b = 0; b < n / (2 * HALF); ++b, ++x) {
        ggml_half first[2]; // the step, and the least value of types that have one
        memcpy(first, x, sizeof(first));
        uint32_t high = 0;
        if constexpr (five) memcpy(&high, x->qh, sizeof(high));
        const float d = GGML_CPU_FP16_TO_FP32(first[0]),
                    m = least ? GGML_CPU_FP16_TO_FP32(first[1]) : 0.0f;
        for (int half = 0; half < 2; ++half, y += HALF, high >>= HALF)
            four_bits_half(x->qs, 4 * half, high, least ? 0 : five ? 16 : 8, d, m, y);
    }
}

// q4_K, q5_K: groups of 32 values, two of them in the lower and upper four bits of 32 bytes; bit i
// of the bytes of qh is the fifth of group i
template <typename B>
void groups_to_f32(const B * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK_K; ++b, ++x) {
        ggml_half first[2];
        memcpy(first, x, sizeof(first));
        const float d = GGML_CPU_FP16_TO_FP32(first[0]), m = GGML_CPU_FP16_TO_FP32(first[1]);
        const edgekv::scales_K s(x->scales);
        for (int i = 0; i < QK_K / 32; ++i) {
            const float step = d * s.scale[i], least = -m * s.low[i];
            const uint8_t * qs = x->qs + i / 2 * 32;
            for (int half = 0; half < 32; half += HALF, y += HALF) {
                if constexpr (std::is_same_v<B, block_q5_K>)
                    more_bits_half(qs + half, i % 2 * 4, x->qh + half, i, 1, 0, step, least, y);
                else four_bits_half(qs + half, i % 2 * 4, 0, 0, step, least, y);
            }
        }
    }
}

// 128 values in 64 bytes of four bits and 32 of two more, a step for each 16
void blocks_to_f32(const block_q6_K * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK_K; ++b, ++x) {
        const float d = GGML_CPU_FP16_TO_FP32(x->d);
        for (int i = 0; i < QK_K / HALF; ++i, y += HALF) {
            const int part = i / 8, group = i / 2 % 4, half = i % 2 * HALF;
            more_bits_half(x->ql + 64 * part + group % 2 * 32 + half, group / 2 * 4,
                x->qh + 32 * part + half, 2 * group, 3, 32, d * x->scales[i], 0, y);
        }
    }
}

} // namespace

static void to_f32(enum ggml_type type, const char * x, int64_t n, float * y) {
    switch (type) {
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_F32: memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_Q8_0: blocks_to_f32((const block_q8_0 *) x, n, y); break;
        case GGML_TYPE_Q4_0: blocks_to_f32((const block_q4_0 *) x, n, y); break;
        case GGML_TYPE_Q4_1: blocks_to_f32((const block_q4_1 *) x, n, y); break;
        case GGML_TYPE_Q5_0: blocks_to_f32((const block_q5_0 *) x, n, y); break;
        case GGML_TYPE_Q5_1: blocks_to_f32((const block_q5_1 *) x, n, y); break;
        case GGML_TYPE_Q4_K: groups_to_f32((const block_q4_K *) x, n, y); break;
        case GGML_TYPE_Q5_K: groups_to_f32((const block_q5_K *) x, n, y); break;
        case GGML_TYPE_Q6_K: blocks_to_f32((const block_q6_K *) x, n, y); break;
        default: ggml_get_type_traits(type)->to_float(x, y, n); break;
    }
}

void edgekv_cpu_rows_to_f32(
    enum ggml_type type, const char * base, size_t nb, int64_t r0, int n, int d, float * out) {
    if (n == 1 || nb == ggml_row_size(type, d)) { // rows without a gap: one call
        to_f32(type, base + r0 * nb, (int64_t) n * d, out);
        return;
    }
    for (int i = 0; i < n; ++i) to_f32(type, base + (r0 + i) * nb, d, out + (size_t) i * d);
}

void edgekv_cpu_numbered_to_f32(const edgekv_numbered & rows, int64_t first, int n, float * out) {
    edgekv_cpu_rows_to_f32(rows.type, rows.base, rows.nb, first, n, rows.d, out);
    edgekv_cpu_whole_keys(&rows.basis, n, rows.d, out);
}

void edgekv_cpu_whole_keys(const edgekv_key_basis * basis, int64_t n, int d, float * keys) {
    for (int64_t i = 0; i < n && (basis->centre || basis->scale); ++i, keys += d) {
        if (basis->centre) ggml_vec_acc_f32(d, keys, basis->centre);
        if (!basis->scale) continue;
        edgekv_cpu_turn(keys, d, basis->turn);
        for (int j = 0; j < d; ++j) keys[j] /= basis->scale[j];
        edgekv_cpu_turn(keys, d, basis->turn);
    }
}
