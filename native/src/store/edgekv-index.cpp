// Keys in two bits a value
#include "edgekv-index.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cmath>

// Levels 0.45 and 1.51 deviations are the best four of a normal distribution (Max, 1960); 1 and 3
// halves are near them, and are whole numbers of steps
static constexpr float HALF = 0.5f, EDGE = 0.98f;

void edgekv_index::put(int64_t begin, int64_t n_new, int d_k, const float * keys) {
    d = d_k;
    cut(begin);
    if (begin == 0) {
        mean.assign(d, 0);
        step.assign(d, 0);
        for (int i = 0; i < d; ++i) {
            double sum = 0, squares = 0;
            for (int64_t r = 0; r < n_new; ++r) {
                sum += keys[r * d + i];
                squares += (double) keys[r * d + i] * keys[r * d + i];
            }
            const double m = sum / (double) n_new;
            mean[i] = (float) m;
            step[i] = HALF * (float) std::sqrt(std::max(squares / (double) n_new - m * m, 1e-12));
        }
        n_judged = n_new;
    }
    const int n_bytes = d / 4;
    codes.resize((begin + n_new) * n_bytes);
    for (int64_t r = 0; r < n_new; ++r) {
        uint8_t * code = codes.data() + (begin + r) * n_bytes;
        std::fill(code, code + n_bytes, (uint8_t) 0);
        for (int i = 0; i < d; ++i) {
            const float x = (keys[r * d + i] - mean[i]) / (2 * step[i]);
            const int level = (x > -EDGE) + (x > 0) + (x > EDGE);
            code[i % n_bytes] |= (uint8_t) (level << (2 * (i / n_bytes)));
        }
    }
    n = begin + n_new;
}

void edgekv_index::cut(int64_t n_tokens) {
    n = std::min(n, n_tokens);
    codes.resize(n * d / 4);
    if ((int64_t) label.size() > n) { // its groups are of other rows
        label.resize(n);
        members.clear();
    }
    if (n == 0) n_judged = 0;
}

void edgekv_index::set_resident(const std::vector<llama_pos> & pos, int64_t n_tokens) {
    label.assign(n_tokens, 0);
    members.clear();
    for (llama_pos p : pos)
        if (p < n_tokens) label[p] = EDGEKV_RESIDENT;
}

void edgekv_index::group(const edgekv_recalled & rows) {
    edgekv_recalled a = rows;
    a.n = (int) label.size();
    const int n_groups = std::min(MOST_GROUPS, a.n / EACH);
    group_k.resize((size_t) n_groups * a.d_k);
    group_v.resize((size_t) n_groups * a.d_v);
    members.resize(n_groups);
    members.resize(edgekv_cpu().recall_groups(
        &a, n_groups, label.data(), group_k.data(), group_v.data(), members.data()));
}

void edgekv_index::fill(edgekv_recalled & a, float share) const {
    a.codes = codes.data();
    a.step = step.data();
    a.label = label.data();
    a.n = (int) label.size();
    a.n_wanted = (int) std::ceil(share * (float) label.size());
    a.n_groups = (int) members.size();
    a.group_k = group_k.data();
    a.group_v = group_v.data();
    a.members = members.data();
}

size_t edgekv_index::n_bytes() const {
    return codes.size() + label.size() +
        (mean.size() + step.size() + members.size()) * sizeof(float) +
        (group_k.size() + group_v.size()) * sizeof(ggml_fp16_t);
}
