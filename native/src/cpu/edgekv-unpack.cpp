#include "edgekv-unpack.h"

#include "ggml-backend.h"
#include "repack.h"
#include "simd-mappings.h"

#include <cmath>
#include <mutex>
#include <vector>

namespace edgekv {

namespace {

constexpr int SIDES = weight_rows::AT_ONCE;

float f32(ggml_fp16_t x) { return GGML_CPU_FP16_TO_FP32(x); }

// 4 bits, 8 bytes of each row in turn; repacking turned each value's highest bit
void unpack_q4_0(const block_q4_0x8 & b, int n_in, float * out) {
    for (int part = 0; part < 2; ++part)
        for (int row = 0; row < SIDES; ++row) {
            const float d = f32(b.d[row]);
            const int8_t * q = b.qs + (part * SIDES + row) * 8;
            float * to = out + (size_t) row * n_in + part * 8;
            for (int i = 0; i < 8; ++i) {
                const uint8_t x = (uint8_t) q[i] ^ 0x88;
                to[i] = ((x & 15) - 8) * d;
                to[i + 16] = ((x >> 4) - 8) * d;
            }
        }
}

// the scales of eight rows, packed as Q4_K packs those of its eight blocks
void unpack_q4_K(const block_q4_Kx8 & b, int n_in, float * out) {
    for (int part = 0; part < 8; ++part) {
        const uint8_t * s = b.scales + part * 12;
        for (int row = 0; row < SIDES; ++row) {
            const int i = row & 3;
            const int scale = row < 4 ? s[i] & 63 : (s[8 + i] & 15) | (s[i] >> 6) << 4;
            const int low = row < 4 ? s[4 + i] & 63 : s[8 + i] >> 4 | (s[4 + i] >> 6) << 4;
            const float d = f32(b.d[row]) * scale, m = f32(b.dmin[row]) * low;
            float * to = out + (size_t) row * n_in + part * 32;
            const int shift = part % 2 * 4;
            for (int eight = 0; eight < 4; ++eight) {
                const uint8_t * q = b.qs + ((part / 2 * 4 + eight) * SIDES + row) * 8;
                for (int j = 0; j < 8; ++j) to[eight * 8 + j] = (q[j] >> shift & 15) * d - m;
            }
        }
    }
}

template <class Block, class F>
void unpack_blocks(const char * data, int n_in, int size, float * out, F && unpack) {
    const auto * b = (const Block *) data;
    for (int i = 0; i < n_in / size; ++i) unpack(b[i], n_in, out + (size_t) i * size);
}

// eight rows that begin at data; false: a form that is not known
bool unpack_sides(ggml_type type, const char * data, int n_in, float * out) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            unpack_blocks<block_q4_0x8>(data, n_in, 32, out, unpack_q4_0);
            return true;
        case GGML_TYPE_Q4_K:
            unpack_blocks<block_q4_Kx8>(data, n_in, 256, out, unpack_q4_K);
            return true;
        default: return false;
    }
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
            same = std::fabs(sides[i] - plain[i]) <= 1e-6f * std::fabs(plain[i]);
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

void weight_rows::unpack(int r0, int n, int n_in, float * out) const {
    if (side_by_side) {
        unpack_sides(type, data + (size_t) r0 * nb, n_in, out);
        return;
    }
    const auto to_float = ggml_get_type_traits(type)->to_float;
    for (int i = 0; i < n; ++i) to_float(data + (r0 + i) * nb, out + (size_t) i * n_in, n_in);
}

} // namespace edgekv
