// moments: sums of products of queries with themselves, for their covariance
#include "edgekv-aligned.h"
#include "edgekv-cpu.h"
#include "edgekv-lanes.h"

#include <algorithm>

using namespace edgekv;

namespace {

using lanes = best_lanes;

constexpr int T = 128; // rows that are near while all pairs of their values meet
constexpr int R = 4, V = 2, W = V * lanes::N;

// values [i0, i0 + R) with [j0, j0 + W) of n rows [n][width]
void block(const float * y, int n, int width, int i0, int j0, float (*sums)[W]) {
    lanes::reg acc[R][V];
    for (auto & row : acc)
        for (auto & x : row) x = lanes::set(0.0f);
    for (int t = 0; t < n; ++t, y += width)
        for (int v = 0; v < V; ++v) {
            const auto column = lanes::load(y + j0 + v * lanes::N);
            for (int r = 0; r < R; ++r)
                acc[r][v] = lanes::fma(lanes::set(y[i0 + r]), column, acc[r][v]);
        }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) lanes::store(&sums[r][v * lanes::N], acc[r][v]);
}

} // namespace

void edgekv_cpu_moments(
    const float * x, int64_t step, int n, int d, const float * mean, float * lower) {
    static thread_local aligned_floats room;
    const int width = (d + W - 1) / W * W;
    float * y = room.get((size_t) T * width);
    for (int t0 = 0; t0 < n; t0 += T) {
        const int m = std::min(T, n - t0);
        for (int t = 0; t < m; ++t) {
            const float * from = x + (t0 + t) * step;
            float * to = y + (size_t) t * width;
            for (int i = 0; i < d; ++i) to[i] = from[i] - mean[i];
            std::fill(to + d, to + width, 0.0f);
        }
        for (int i0 = 0; i0 < d; i0 += R)
            for (int j0 = 0; j0 < std::min(i0 + R, d); j0 += W) {
                float sums[R][W];
                block(y, m, width, i0, j0, sums);
                for (int i = i0; i < std::min(i0 + R, d); ++i) {
                    float * row = lower + (size_t) i * (i + 1) / 2;
                    for (int j = j0; j < std::min(j0 + W, i + 1); ++j)
                        row[j] += sums[i - i0][j - j0];
                }
            }
    }
}
