// recall: a token finds the rows of the archive that it needs besides those in the store. The index
// says how near each row's logit comes to the largest of a query head; of the heads of a group the
// nearest counts, and they share the rows
#include "edgekv-tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

using namespace edgekv;

namespace {

// Value i of a key has two bits: of byte i % n_bytes, from bit 2*(i / n_bytes) on. In 16 bits, for
// products that compilers make of pairs
void unpack(const uint8_t * code, int n_bytes, int16_t * out) {
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < n_bytes; ++i)
            out[j * n_bytes + i] = (int16_t) ((code[i] >> (2 * j)) & 3);
}

int32_t dot(const int16_t * a, const int16_t * b, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += (int32_t) a[i] * b[i];
    return sum;
}

// A query times the steps, in 8 bits. A code c is 2 c - 3 steps: a logit is
// scale*(2*sum(q c) - three)
struct rounded_query {
    std::vector<int16_t> q;
    float scale = 0;
    int32_t three = 0;

    void set(const float * x, const float * step, int d) {
        q.resize(d);
        float most = 0;
        for (int i = 0; i < d; ++i) most = std::max(most, fabsf(x[i] * step[i]));
        const float by = most > 0 ? 127.0f / most : 0.0f;
        three = 0;
        for (int i = 0; i < d; ++i) three += q[i] = (int16_t) lrintf(x[i] * step[i] * by);
        three *= 3;
        scale = most / 127.0f;
    }
};

struct workspace {
    std::vector<rounded_query> queries;
    std::vector<int16_t> code;
    std::vector<float> about, best, sorted; // [n_query][n], [n], [n]
    std::vector<int32_t> rows;
    std::vector<float> row, logits; // logits: [n_query][rows]
};

void judge(const edgekv_recalled & a, const float * q, int64_t stride, int n_query, workspace & w) {
    const int d = a.d_k, n = a.n, n_bytes = d / 4;
    w.queries.resize(n_query);
    w.about.resize((size_t) n_query * n);
    w.code.resize(d);
    for (int h = 0; h < n_query; ++h) w.queries[h].set(q + h * stride, a.step, d);
    for (int r = 0; r < n; ++r) {
        unpack(a.codes + (size_t) r * n_bytes, n_bytes, w.code.data());
        for (int h = 0; h < n_query; ++h) {
            const auto & x = w.queries[h];
            w.about[(size_t) h * n + r] =
                x.scale * (float) (2 * dot(x.q.data(), w.code.data(), d) - x.three);
        }
    }
    w.best.assign(n, -INFINITY);
    for (int h = 0; h < n_query; ++h) {
        const float * s = w.about.data() + (size_t) h * n;
        const float most = *std::max_element(s, s + n);
        for (int r = 0; r < n; ++r) w.best[r] = std::max(w.best[r], s[r] - most);
    }
    for (int r = 0; r < n; ++r)
        if (a.resident[r]) w.best[r] = -INFINITY;
}

// the nearest n_wanted, the first of equal ones
void choose(const edgekv_recalled & a, workspace & w) {
    w.rows.clear();
    if (a.n_wanted <= 0) return;
    float least = -INFINITY;
    int n_equal = a.n_wanted; // of those that are as near as the last one
    if (a.n_wanted < a.n) {
        w.sorted = w.best;
        const auto last = w.sorted.begin() + a.n_wanted - 1;
        std::nth_element(w.sorted.begin(), last, w.sorted.end(), std::greater<float>());
        least = *last;
        n_equal -= (int) std::count_if(w.sorted.begin(), last, [&](float x) { return x > least; });
    }
    for (int r = 0; r < a.n; ++r) {
        const float x = w.best[r];
        if (x == -INFINITY || x < least || (x == least && n_equal-- <= 0)) continue;
        w.rows.push_back(r);
    }
}

float logit(const edgekv_recalled & a, const float * key, const float * q) {
    float x = 0;
    ggml_vec_dot_f32(a.d_k, &x, 0, key, 0, q, 0, 1);
    x *= a.scale;
    return a.softcap ? a.softcap * tanhf(x / a.softcap) : x;
}

} // namespace

void edgekv_cpu_recall(
    const edgekv_recalled * recalled, const float * q, int64_t stride, int n_query, float * out) {
    static thread_local workspace w;
    const auto & a = *recalled;
    const int dp = 2 + a.d_v;
    w.rows.clear();
    if (a.n > 0) {
        judge(a, q, stride, n_query, w);
        choose(a, w);
    }
    const size_t n = w.rows.size();
    w.logits.resize(n_query * n);
    w.row.resize(std::max(a.d_k, a.d_v));
    for (size_t i = 0; i < n; ++i) {
        edgekv_cpu_rows_to_f32(a.type_k, a.k, a.nb_k, w.rows[i], 1, a.d_k, w.row.data());
        for (int h = 0; h < n_query; ++h)
            w.logits[h * n + i] = logit(a, w.row.data(), q + h * stride);
    }
    for (int h = 0; h < n_query; ++h) {
        float *s = w.logits.data() + h * n, *o = out + (size_t) h * dp;
        o[0] = n ? *std::max_element(s, s + n) : -INFINITY;
        memset(o + 1, 0, (1 + a.d_v) * sizeof(float));
        for (size_t i = 0; i < n; ++i) o[1] += s[i] = expf(s[i] - o[0]);
    }
    for (size_t i = 0; i < n; ++i) {
        edgekv_cpu_rows_to_f32(a.type_v, a.v, a.nb_v, w.rows[i], 1, a.d_v, w.row.data());
        for (int h = 0; h < n_query; ++h)
            ggml_vec_mad_f32(a.d_v, out + (size_t) h * dp + 2, w.row.data(), w.logits[h * n + i]);
    }
}
