// ggml's FWHT, for the registers that this file is compiled for
#include "edgekv-cpu.h"
#include "edgekv-hadamard.h"

#include <cmath>

bool edgekv_cpu_fwht(
    [[maybe_unused]] ggml_tensor * dst, [[maybe_unused]] int ith, [[maybe_unused]] int nth) {
#if defined(__AVX__)
    const ggml_tensor * x = dst->src[1];
    const int64_t n = x->ne[0];
    if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || n < edgekv::hadamard_register::N ||
        n > edgekv::HADAMARD_MOST || (n & (n - 1)))
        return false;
    // in parts as ggml's own: who has which row changes nothing
    const int64_t n_rows = ggml_nrows(x), each = (n_rows + nth - 1) / nth;
    const int64_t last = each * (ith + 1) < n_rows ? each * (ith + 1) : n_rows;
    const float scale = 1.0f / sqrtf((float) n);
    for (int64_t r = each * ith; r < last; ++r) {
        const int64_t i3 = r / (x->ne[1] * x->ne[2]), rest = r - i3 * x->ne[1] * x->ne[2],
                      i2 = rest / x->ne[1], i1 = rest - i2 * x->ne[1];
        const auto * from = (const char *) x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
        auto * to = (char *) dst->data + i1 * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3];
        edgekv::hadamard((const float *) from, (float *) to, (int) n, scale);
    }
    return true;
#else
    return false;
#endif
}

void edgekv_cpu_turn(float * x, int64_t n, int size) {
    if (size == 0) return;
    const float scale = 1 / std::sqrt((float) size);
#if defined(__AVX__)
    if (size >= edgekv::hadamard_register::N && size <= edgekv::HADAMARD_MOST) {
        for (int64_t i = 0; i < n; i += size) edgekv::hadamard(x + i, x + i, size, scale);
        return;
    }
#endif
    for (int half = 1; half < size; half *= 2)
        for (int64_t i = 0; i < n; i += 2 * half)
            for (int64_t j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}
