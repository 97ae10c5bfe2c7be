// predict: the linear map of the score kvzap, row by row; edgekv/methods/kvzap.py says what the
// map sees
#include "edgekv-aligned.h"
#include "edgekv-lanes.h"
#include "edgekv-tile.h"

using namespace edgekv;

namespace {

constexpr int BLOCK = 64;                    // rows that are made f32 at once
constexpr float TINY = 1e-6f, LEAST = 1e-3f; // as there

struct workspace {
    aligned_floats keys, values, logs, map;
};

float dot(const float * x, const float * y, int d) { return edgekv::dot<best_lanes>(x, y, d); }

float length(const float * x, int d) { return std::sqrt(dot(x, x, d)); }

// the natural logarithm of normal numbers, without a call, so that the compiler takes several at
// once: with x = 2^e m and m around 1, log m = 2 artanh((m - 1)/(m + 1)), whose series is short
// there
void logarithms(float * x, int n) {
    for (int i = 0; i < n; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        const int32_t e = (bits - 0x3f3504f3) >> 23; // so that m lies between sqrt(1/2) and sqrt(2)
        bits -= e * (1 << 23);
        float m;
        memcpy(&m, &bits, sizeof(m));
        const float s = (m - 1) / (m + 1), t = s * s;
        x[i] = (float) e * 0.693147181f +
            2 * s * (1 + t * (1 / 3.0f + t * (1 / 5.0f + t * (1 / 7.0f + t / 9.0f))));
    }
}

} // namespace

void edgekv_cpu_key_sum(const edgekv_numbered * keys, int first, int n, float * sum) {
    static thread_local workspace w;
    const int d = keys->d;
    float * rows = w.keys.get((size_t) BLOCK * d);
    std::fill_n(sum, d, 0.0f);
    for (int r = first; r < first + n; r += BLOCK) {
        const int n_rows = std::min(BLOCK, first + n - r);
        edgekv_cpu_numbered_to_f32(*keys, r, n_rows, rows);
        for (int i = 0; i < n_rows; ++i)
            ggml_vec_mad_f32(d, sum, rows + (size_t) i * d,
                1 / std::max(length(rows + (size_t) i * d, d), 1e-12f));
    }
}

void edgekv_cpu_predict(const edgekv_numbered * keys, const edgekv_numbered * values,
    const float * sum, const edgekv_map * map, int first, int n, float * out, float * unlike) {
    static thread_local workspace w;
    const int d_k = keys->d, d_v = values->d, half = d_k / 2;
    const float l_sum = std::max(length(sum, d_k), 1e-12f);
    float *k = w.keys.get((size_t) BLOCK * d_k), *v = w.values.get((size_t) BLOCK * d_v),
          *logs = w.logs.get((size_t) half + 2), *of_value = w.map.get(d_v);
    std::copy_n(map->weights, d_v, of_value);
    // instead of the values: the matrix is symmetric
    edgekv_cpu_turn(of_value, d_v, map->turn_v);
    const float *of_logs = map->weights + d_v, of_unlike = of_logs[half + 2],
                constant = of_logs[half + 3];
    for (int r = first; r < first + n; r += BLOCK) {
        const int n_rows = std::min(BLOCK, first + n - r);
        edgekv_cpu_numbered_to_f32(*keys, r, n_rows, k);
        edgekv_cpu_numbered_to_f32(*values, r, n_rows, v);
        for (int i = 0; i < n_rows; ++i) {
            float * key = k + (size_t) i * d_k;
            const float * value = v + (size_t) i * d_v;
            const float l_k = length(key, d_k), l_v = length(value, d_v);
            unlike[r + i] = -dot(key, sum, d_k) / l_sum / std::max(l_k, 1e-12f);
            edgekv_cpu_turn(key, d_k, map->turn_k);
            const int step = map->neighbours ? 2 : 1, other = map->neighbours ? 1 : half;
            for (int j = 0; j < half; ++j)
                logs[j] = std::sqrt(key[step * j] * key[step * j] +
                              key[step * j + other] * key[step * j + other]) +
                    LEAST;
            logs[half] = l_k + LEAST;
            logs[half + 1] = l_v + LEAST;
            logarithms(logs, half + 2);
            out[r + i] = dot(value, of_value, d_v) / std::max(l_v, TINY) +
                dot(logs, of_logs, half + 2) + of_unlike * unlike[r + i] + constant;
        }
    }
}
