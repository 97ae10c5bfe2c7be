// Rows of any cache type as f32
#include "edgekv-tile.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"

#include <cstring>
#include <type_traits>

// The types of a cache get loops that the compiler vectorises for the backend's instruction set;
// the base library's reference conversions are built for the oldest processor. Those with a least
// value may differ from them in the last bit, where a product and a sum become one instruction.

static void q8_0_to_f32(const block_q8_0 * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK8_0; ++b) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        for (int i = 0; i < QK8_0; ++i) y[b * QK8_0 + i] = d * x[b].qs[i];
    }
}

// a block of 32 values of 4 bits, value i beside value i + 16, or of 5 bits, of which the highest
// are in qh, one after another; what becomes of each number of 0 to 15 or 31, is `value`
template <typename F>
inline void nibbles_to_f32(const uint8_t * qs, const uint8_t * qh, float * y, F && value) {
    uint32_t high = 0;
    if (qh) memcpy(&high, qh, sizeof(high));
    for (uint32_t i = 0; i < 16; ++i) {
        y[i] = value((int) ((qs[i] & 0x0F) | (high >> i & 1) << 4));
        y[i + 16] = value((int) (qs[i] >> 4 | (high >> (i + 16) & 1) << 4));
    }
}

template <typename B>
inline void blocks_to_f32(const B * x, int64_t n, float * y) {
    constexpr bool five = std::is_same_v<B, block_q5_0> || std::is_same_v<B, block_q5_1>;
    for (int64_t b = 0; b < n / 32; ++b, ++x, y += 32) {
        ggml_half first[2]; // the step, and the least value of types that have one
        memcpy(first, x, sizeof(first));
        const float d = GGML_CPU_FP16_TO_FP32(first[0]);
        const uint8_t * qh = nullptr;
        if constexpr (five) qh = x->qh;
        if constexpr (std::is_same_v<B, block_q4_1> || std::is_same_v<B, block_q5_1>) {
            const float least = GGML_CPU_FP16_TO_FP32(first[1]);
            nibbles_to_f32(x->qs, qh, y, [=](int q) { return d * (float) q + least; });
        } else {
            nibbles_to_f32(x->qs, qh, y, [=](int q) { return d * (float) (q - (five ? 16 : 8)); });
        }
    }
}

static void to_f32(enum ggml_type type, const char * x, int64_t n, float * y) {
    switch (type) {
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_F32: memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_Q8_0: q8_0_to_f32((const block_q8_0 *) x, n, y); break;
        case GGML_TYPE_Q4_0: blocks_to_f32((const block_q4_0 *) x, n, y); break;
        case GGML_TYPE_Q4_1: blocks_to_f32((const block_q4_1 *) x, n, y); break;
        case GGML_TYPE_Q5_0: blocks_to_f32((const block_q5_0 *) x, n, y); break;
        case GGML_TYPE_Q5_1: blocks_to_f32((const block_q5_1 *) x, n, y); break;
        default: ggml_get_type_traits(type)->to_float(x, y, n); break;
    }
}

void edgekv_cpu_rows_to_f32(
    enum ggml_type type, const char * base, size_t nb, int64_t r0, int n, int d, float * out) {
    if (nb == ggml_row_size(type, d)) { // rows without a gap: one call
        to_f32(type, base + r0 * nb, (int64_t) n * d, out);
        return;
    }
    for (int i = 0; i < n; ++i) to_f32(type, base + (r0 + i) * nb, d, out + (size_t) i * d);
}

void edgekv_cpu_numbered_to_f32(const edgekv_numbered & rows, int64_t first, int n, float * out) {
    edgekv_cpu_rows_to_f32(rows.type, rows.base, rows.nb, first, n, rows.d, out);
    for (int i = 0; rows.centre && i < n; ++i)
        ggml_vec_acc_f32(rows.d, out + (size_t) i * rows.d, rows.centre);
}
