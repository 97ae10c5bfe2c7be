#pragma once
// Products of f32 rows with others that many rows meet

#include "edgekv-product.h"

#include <vector>

namespace edgekv {

using floats = std::vector<float>;

struct f32_rows {
    static constexpr int AT_ONCE = 8;
    const float * x;
    void unpack(int r0, int n, int n_in, float * out) const {
        memcpy(out, x + (size_t) r0 * n_in, (size_t) n * n_in * sizeof(*x));
    }
};

struct arranged_words : f32_words<best_lanes> {
    static constexpr int VECTORS = 2; // what rows meet is a multiple of so many registers
};

// [n][d] others, arranged once for products of rows with them
class arranged {
    using kernel = product<arranged_words, f32_rows>;

public:
    static constexpr int STEP = kernel::P; // others that are multiplied together

    arranged(const float * others, int n, int d)
        : others(others), n(n), d(d),
          panels(kernel::n_panels(n) * kernel::panel_size(d) + LINE / sizeof(uint32_t)) {
        again();
    }

    void again() { // the others have changed
        kernel::workspace workspace;
        run(nullptr, 0, nullptr, nullptr, workspace, false);
    }

    // out [n_rows][n]: the products of x [n_rows][d]; room: to work in
    void multiply(const float * x, int n_rows, float * out, std::vector<uint32_t> & room) const {
        kernel::workspace unused;
        room.resize(kernel::n_all_words(d, n_rows) + LINE / sizeof(uint32_t));
        run(x, n_rows, out, aligned(room.data()), unused, true);
    }

private:
    const float * others;
    const int n, d;
    mutable std::vector<uint32_t> panels; // written by `again` alone

    void run(const float * x, int n_rows, float * out, uint32_t * words,
        kernel::workspace & workspace, bool ready) const {
        const kernel p = { { others }, d, n, n_rows, x, out, words };
        p.make_words(0, 1);
        std::atomic<int32_t> next { 0 };
        p.run(workspace, next, 1, aligned(panels.data()), ready);
    }
};

inline float dot(const float * x, const float * y, int n) { return dot<best_lanes>(x, y, n); }

inline void add(float * to, const float * x, float weight, int n) {
    for (int i = 0; i < n; ++i) to[i] += weight * x[i];
}

// [n][d] to [d][n]
inline floats turned(const float * x, int n, int d) {
    floats to((size_t) n * d);
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < d; ++j) to[(size_t) j * n + i] = x[(size_t) i * d + j];
    return to;
}

} // namespace edgekv
