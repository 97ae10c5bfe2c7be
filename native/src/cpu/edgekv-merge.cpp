// merge: which kept row an evicted one resembles most, and folding it in. Keys are compared block
// by block: [n_gone, n_kept] never exists.
#include "edgekv-aligned.h"
#include "edgekv-tile.h"

using namespace edgekv;

namespace {

constexpr int BLOCK = 256; // evicted rows that meet a tile of kept ones
// of them at a time, so that their products stay in the first-level cache
constexpr int GROUP = 16;
// wide registers come in greater number
constexpr int AT_ONCE = LANE_QUERIES == 4 ? 8 : LANE_QUERIES;

struct workspace {
    aligned_floats block, tile, tile_t;
};

// rows as f32 with length 1; a row of length 0 stays
void load_unit(const edgekv_numbered & keys, const int32_t * rows, int n, float * out) {
    for (int i = 0; i < n; ++i, out += keys.d) {
        edgekv_cpu_numbered_to_f32(keys, rows[i], 1, out);
        float square;
        ggml_vec_dot_f32(keys.d, &square, 0, out, 0, out, 0, 1);
        if (square > 0) ggml_vec_scale_f32(keys.d, out, 1.0f / sqrtf(square));
    }
}

// the highest of n products, if it is higher than what was found before: that happens rarely, so it
// is asked for the tile as a whole
inline void raise(const float * products, int n, int32_t at, float & best, int32_t & where) {
    int n_higher = 0;
    for (int j = 0; j < n; ++j) n_higher += products[j] > best;
    if (!n_higher) return;
    for (int j = 0; j < n; ++j)
        if (products[j] > best) {
            best = products[j];
            where = at + j;
        }
}

// up to BLOCK unit rows against one transposed tile of n rows, which begins at index `at` of the
// kept ones
void meet(const float * block, int n_block, const float * tile_t, int n, int d, int32_t at,
    float * cosine, int32_t * nearest) {
    float products[GROUP][EDGEKV_TILE];
    const float * q[GROUP];
    float * s[GROUP];
    for (int i = 0; i < n_block; i += GROUP) {
        const int n_group = std::min(GROUP, n_block - i);
        for (int b = 0; b < n_group; ++b) {
            q[b] = block + (size_t) (i + b) * d;
            s[b] = products[b];
        }
        int a = 0;
        for (; a + AT_ONCE <= n_group; a += AT_ONCE) dot_lanes<AT_ONCE>(tile_t, q + a, d, s + a);
        tile_dot_transposed(tile_t, q + a, n_group - a, d, s + a);
        for (int b = 0; b < n_group; ++b) raise(products[b], n, at, cosine[i + b], nearest[i + b]);
    }
}

} // namespace

void edgekv_cpu_merge_nearest(const edgekv_numbered * keys, const int32_t * gone, int n_gone,
    const int32_t * kept, int n_kept, float * cosine, int32_t * nearest, int part, int n_parts) {
    static thread_local workspace w;
    const int d = keys->d, end = (int) ((int64_t) n_gone * (part + 1) / n_parts);
    float *block = w.block.get((size_t) BLOCK * d), *tile = w.tile.get((size_t) EDGEKV_TILE * d),
          *tile_t = w.tile_t.get((size_t) EDGEKV_TILE * d);
    for (int i = (int) ((int64_t) n_gone * part / n_parts); i < end; i += BLOCK) {
        const int n_block = std::min(BLOCK, end - i);
        load_unit(*keys, gone + i, n_block, block);
        std::fill_n(cosine + i, n_block, -INFINITY);
        std::fill_n(nearest + i, n_block, 0);
        for (int j = 0; j < n_kept; j += EDGEKV_TILE) {
            const int n = std::min(EDGEKV_TILE, n_kept - j);
            load_unit(*keys, kept + j, n, tile);
            tile_transpose(tile, n, d, tile_t);
            meet(block, n_block, tile_t, n, d, j, cosine + i, nearest + i);
        }
    }
}

void edgekv_cpu_merge_fold(const edgekv_numbered * to, const edgekv_shares * shares) {
    std::vector<float> sum(to->d), row(to->d);
    const int32_t * source = shares->sources;
    const float * weight = shares->weights;
    for (int i = 0; i < shares->n; ++i) {
        edgekv_cpu_numbered_to_f32(*to, shares->rows[i], 1, sum.data());
        ggml_vec_scale_f32(to->d, sum.data(), shares->own[i]);
        for (int j = 0; j < shares->counts[i]; ++j) {
            edgekv_cpu_numbered_to_f32(*to, *source++, 1, row.data());
            ggml_vec_mad_f32(to->d, sum.data(), row.data(), *weight++);
        }
        if (to->basis.centre) ggml_vec_mad_f32(to->d, sum.data(), to->basis.centre, -1.0f);
        ggml_quantize_chunk(
            to->type, sum.data(), to->base + shares->rows[i] * to->nb, 0, 1, to->d, nullptr);
    }
}
