// recall: a token finds the rows of the archive that it needs besides those in the store. The index
// says roughly how probable each row is for each query head; the largest of a group's heads counts,
// and they share the rows. Groups stand for the rest: each for as many rows as it has left, which
// adds a logarithm to its logit
#include "edgekv-tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

using namespace edgekv;

namespace {

struct workspace {
    std::vector<uint16_t> steps;       // [n_query][n in whole blocks]
    std::vector<float> step;           // [n_query]
    std::vector<float> best, about;    // [n]
    std::vector<int32_t> rows, left;   // left: of each group
    std::vector<float> row, logits;    // logits: [n_query][rows, then groups]
};

bool is_resident(const edgekv_recalled & a, int r) { return a.resident[r / 32] >> r % 32 & 1; }

// of each row the largest probability that a query head gives it
void judge(const edgekv_recalled & a, const float * q, int64_t stride, int n_query, workspace & w) {
    const int n = a.n, n_padded = (n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * EDGEKV_BLOCK;
    w.steps.resize((size_t) n_query * n_padded);
    w.step.resize(n_query);
    w.about.resize(n);
    w.best.assign(n, 0.0f);
    edgekv_cpu_codes_score(
        &a.book, a.codes, n_padded, q, stride, n_query, w.steps.data(), w.step.data());
    for (int h = 0; h < n_query; ++h) {
        const uint16_t * steps = w.steps.data() + (size_t) h * n_padded;
        const float step = a.scale * w.step[h];
        float *x = w.about.data(), *best = w.best.data();
        uint16_t most = 0;
        for (int r = 0; r < n; ++r) most = std::max(most, steps[r]);
        for (int r = 0; r < n; ++r) x[r] = step * (float) steps[r];
        const double sum = ggml_vec_soft_max_f32(n, x, x, step * (float) most);
        const float by = (float) (1 / sum);
        for (int r = 0; r < n; ++r) best[r] = std::max(best[r], by * x[r]);
    }
}

// those that are probable enough, the most probable n_most, the first of equal ones
void choose(const edgekv_recalled & a, workspace & w) {
    w.rows.clear();
    for (int r = 0; r < a.n; ++r)
        if (w.best[r] > a.least && !is_resident(a, r)) w.rows.push_back(r);
    if ((int) w.rows.size() <= a.n_most) return;
    const auto before = [&](int x, int y) {
        return w.best[x] > w.best[y] || (w.best[x] == w.best[y] && x < y);
    };
    std::nth_element(w.rows.begin(), w.rows.begin() + a.n_most, w.rows.end(), before);
    w.rows.resize(a.n_most);
    std::sort(w.rows.begin(), w.rows.end());
}

float logit(const edgekv_recalled & a, const float * key, const float * q) {
    float x = 0;
    ggml_vec_dot_f32(a.d_k, &x, 0, key, 0, q, 0, 1);
    x *= a.scale;
    return a.softcap ? a.softcap * tanhf(x / a.softcap) : x;
}

// the rows that were chosen, then the groups
void read(const edgekv_recalled & a, bool keys, size_t i, workspace & w) {
    const size_t n = w.rows.size();
    const int d = keys ? a.d_k : a.d_v;
    const ggml_fp16_t * groups = keys ? a.group_k : a.group_v;
    if (i < n)
        edgekv_cpu_rows_to_f32(keys ? a.type_k : a.type_v, keys ? a.k : a.v, keys ? a.nb_k : a.nb_v,
            w.rows[i], 1, d, w.row.data());
    else
        edgekv_cpu_rows_to_f32(GGML_TYPE_F16, (const char *) groups, d * sizeof(ggml_fp16_t),
            (int64_t) (i - n), 1, d, w.row.data());
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
    w.left.assign(a.members, a.members + a.n_groups);
    for (int r : w.rows)
        if (a.n_groups) --w.left[a.label[r]];
    const size_t n_rows = w.rows.size(), n = n_rows + a.n_groups;
    w.logits.resize(n_query * n);
    w.row.resize(std::max(a.d_k, a.d_v));
    for (size_t i = 0; i < n; ++i) {
        const float more =
            i < n_rows ? 0.0f : logf((float) w.left[i - n_rows]); // -inf: none is left
        read(a, true, i, w);
        for (int h = 0; h < n_query; ++h)
            w.logits[h * n + i] = logit(a, w.row.data(), q + h * stride) + more;
    }
    for (int h = 0; h < n_query; ++h) {
        float *s = w.logits.data() + h * n, *o = out + (size_t) h * dp;
        o[0] = n ? *std::max_element(s, s + n) : -INFINITY;
        memset(o + 1, 0, (1 + a.d_v) * sizeof(float));
        for (size_t i = 0; i < n && o[0] > -INFINITY; ++i) o[1] += s[i] = expf(s[i] - o[0]);
    }
    for (size_t i = 0; i < n; ++i) {
        read(a, false, i, w);
        for (int h = 0; h < n_query; ++h)
            if (out[(size_t) h * dp + 1] > 0)
                ggml_vec_mad_f32(
                    a.d_v, out + (size_t) h * dp + 2, w.row.data(), w.logits[h * n + i]);
    }
}

// ---- groups

namespace {

constexpr int ROUNDS = 3, LOOKED_AT = 2048; // rows that centres are made of

struct k_means {
    const edgekv_recalled & a;
    std::vector<float> row, centres, half; // half: of a centre's squared length
    int n_groups;

    k_means(const edgekv_recalled & a, int n_groups) : a(a), row(a.d_k), n_groups(n_groups) {}

    const float * key(int r) {
        edgekv_cpu_rows_to_f32(a.type_k, a.k, a.nb_k, r, 1, a.d_k, row.data());
        return row.data();
    }

    int nearest(const float * key) const {
        int best = 0;
        float most = -INFINITY;
        for (int g = 0; g < n_groups; ++g) {
            float x = 0;
            ggml_vec_dot_f32(a.d_k, &x, 0, &centres[(size_t) g * a.d_k], 0, key, 0, 1);
            x -= half[g];
            if (x > most) {
                most = x;
                best = g;
            }
        }
        return best;
    }

    void measure() {
        half.resize(n_groups);
        for (int g = 0; g < n_groups; ++g) {
            const float * c = &centres[(size_t) g * a.d_k];
            float x = 0;
            ggml_vec_dot_f32(a.d_k, &x, 0, c, 0, c, 0, 1);
            half[g] = x / 2;
        }
    }

    // from some of the rows; a centre without rows stays where it is
    void find(const std::vector<int32_t> & rows) {
        const size_t d = a.d_k;
        for (int g = 0; g < n_groups; ++g) {
            const float * x = key(rows[(size_t) g * rows.size() / n_groups]);
            centres.insert(centres.end(), x, x + d);
        }
        const size_t step = std::max<size_t>(1, rows.size() / LOOKED_AT);
        for (int round = 0; round < ROUNDS; ++round) {
            measure();
            std::vector<float> sums(n_groups * d), sizes(n_groups);
            for (size_t i = 0; i < rows.size(); i += step) {
                const float * x = key(rows[i]);
                const int g = nearest(x);
                sizes[g] += 1;
                ggml_vec_acc_f32((int) d, &sums[g * d], x);
            }
            for (int g = 0; g < n_groups; ++g)
                for (size_t i = 0; i < d && sizes[g] > 0; ++i)
                    centres[g * d + i] = sums[g * d + i] / sizes[g];
        }
        measure();
    }
};

} // namespace

int edgekv_cpu_recall_groups(const edgekv_recalled * recalled, int n_groups, uint8_t * label,
    ggml_fp16_t * keys, ggml_fp16_t * values, int32_t * members) {
    const auto & a = *recalled;
    std::vector<int32_t> rows;
    for (int r = 0; r < a.n; ++r)
        if (!is_resident(a, r)) rows.push_back(r);
    n_groups = std::min({ n_groups, EDGEKV_GROUPS, (int) rows.size() });
    if (n_groups <= 0) return 0;
    k_means found(a, n_groups);
    found.find(rows);
    std::vector<float> sum_k((size_t) n_groups * a.d_k), sum_v((size_t) n_groups * a.d_v),
        value(a.d_v);
    std::fill(members, members + n_groups, 0);
    for (int r : rows) {
        const float * x = found.key(r);
        const int g = found.nearest(x);
        label[r] = (uint8_t) g;
        ++members[g];
        ggml_vec_acc_f32(a.d_k, &sum_k[(size_t) g * a.d_k], x);
        edgekv_cpu_rows_to_f32(a.type_v, a.v, a.nb_v, r, 1, a.d_v, value.data());
        ggml_vec_acc_f32(a.d_v, &sum_v[(size_t) g * a.d_v], value.data());
    }
    for (int g = 0; g < n_groups; ++g) {
        const float by = 1.0f / (float) std::max(members[g], 1);
        for (int i = 0; i < a.d_k; ++i)
            keys[(size_t) g * a.d_k + i] =
                GGML_CPU_FP32_TO_FP16(sum_k[(size_t) g * a.d_k + i] * by);
        for (int i = 0; i < a.d_v; ++i)
            values[(size_t) g * a.d_v + i] =
                GGML_CPU_FP32_TO_FP16(sum_v[(size_t) g * a.d_v + i] * by);
    }
    return n_groups;
}
