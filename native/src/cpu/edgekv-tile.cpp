// Rows of any cache type as f32
#include "edgekv-tile.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"

#include <cstring>

// The two types that laptops use most get a loop that the compiler vectorises for the backend's
// instruction set; the others go through the base library's reference conversion, which is built
// for the oldest processor.

static void q8_0_to_f32(const block_q8_0 * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK8_0; ++b) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        for (int i = 0; i < QK8_0; ++i) y[b * QK8_0 + i] = d * x[b].qs[i];
    }
}

static void q4_0_to_f32(const block_q4_0 * x, int64_t n, float * y) {
    for (int64_t b = 0; b < n / QK4_0; ++b) {
        const float d = GGML_CPU_FP16_TO_FP32(x[b].d);
        for (int i = 0; i < QK4_0 / 2; ++i) {
            y[b * QK4_0 + i] = d * ((x[b].qs[i] & 0x0F) - 8);
            y[b * QK4_0 + i + QK4_0 / 2] = d * ((x[b].qs[i] >> 4) - 8);
        }
    }
}

static void to_f32(enum ggml_type type, const char * x, int64_t n, float * y) {
    switch (type) {
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_F32: memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_Q8_0: q8_0_to_f32((const block_q8_0 *) x, n, y); break;
        case GGML_TYPE_Q4_0: q4_0_to_f32((const block_q4_0 *) x, n, y); break;
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
