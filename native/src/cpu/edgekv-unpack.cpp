#include "edgekv-unpack.h"
#include "edgekv-cpu.h"

#include "ggml-backend.h"
#include "repack.h"

#include <cmath>
#include <mutex>
#include <vector>

namespace edgekv {

namespace {

constexpr int SIDES = weight_rows::AT_ONCE;

// eight rows that begin at data; false: a form that is not known
bool unpack_sides(ggml_type type, const char * data, int n_in, float * out) {
    static thread_local std::vector<weight_block> blocks;
    blocks.resize((size_t) SIDES * n_in / 32);
    if (!read_levels_of_eight(type, data, n_in, blocks.data())) return false;
    const level_form form = form_of(type);
    const bool in_span = form.of_eight && form.low;
    for (size_t i = 0; i < blocks.size(); ++i) {
        const float low = in_span ? low_of(&blocks[i / 8 * 8], (int) i % 8) : blocks[i].low;
        for (int8_t u : blocks[i].u) *out++ = blocks[i].scale * (float) u + low;
    }
    return true;
}

// whether rows that the backend repacks come back as they were
bool comes_back(ggml_type type) {
    constexpr int n_in = 512;
    std::vector<float> x(SIDES * n_in), plain(x.size()), sides(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * i) * (1 + i % 7);
    std::vector<char> rows(SIDES * ggml_row_size(type, n_in));
    ggml_quantize_chunk(type, x.data(), rows.data(), 0, SIDES, n_in, nullptr);
    ggml_get_type_traits(type)->to_float(rows.data(), plain.data(), (int64_t) x.size());

    ggml_context * ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    if (!ctx) return false;
    ggml_tensor * t = ggml_new_tensor_2d(ctx, type, n_in, SIDES);
    auto * buffer =
        ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_repack_buffer_type());
    bool same = buffer && t->extra;
    if (same) {
        ggml_backend_tensor_set(t, rows.data(), 0, rows.size());
        same = unpack_sides(type, (const char *) t->data, n_in, sides.data());
        for (size_t i = 0; same && i < x.size(); ++i)
            same = std::fabs(sides[i] - plain[i]) <= 1e-6f * (1 + std::fabs(plain[i]));
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return same;
}

} // namespace

bool knows_side_by_side(ggml_type type) {
    static std::once_flag once;
    static bool q4_0, q4_K;
    std::call_once(once, [] {
        q4_0 = comes_back(GGML_TYPE_Q4_0);
        q4_K = comes_back(GGML_TYPE_Q4_K);
    });
    return type == GGML_TYPE_Q4_0 ? q4_0 : type == GGML_TYPE_Q4_K && q4_K;
}

void weight_rows::levels(int r0, int n, int n_in, weight_block * to) const {
    if (side_by_side) read_levels_of_eight(type, data + (size_t) r0 * nb, n_in, to);
    else
        for (int i = 0; i < n; ++i)
            read_levels(type, data + (r0 + i) * nb, n_in, to + (size_t) i * n_in / 32);
}

void weight_rows::unpack(int r0, int n, int n_in, float * out) const {
    if (side_by_side) {
        unpack_sides(type, data + (size_t) r0 * nb, n_in, out);
        return;
    }
    edgekv_cpu_rows_to_f32(type, data, nb, r0, n, n_in, out);
}

} // namespace edgekv
