// Keys in codes of 4 bits
#include "edgekv-index.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cmath>

// A basis vector for each 3 parts of 4 bits is about as many as are worth bits: with 3/4 of a bit
// for each of 64 values that are 36
edgekv_index::edgekv_index(int d, int bits)
    : d(d), n_parts(std::max(1, d * bits / 256)), n_dims(std::min(d, 3 * n_parts)),
      type(d % 32 == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16) {}

edgekv_codebook edgekv_index::book() const {
    return { d, n_parts, n_dims, type, basis.data(), centres.data(), mean.data(), ends.data() };
}

int64_t edgekv_index::wants_from(int64_t begin, int64_t n_new, bool is_read) const {
    const bool is_few = n_judged < ENOUGH && begin + n_new >= 2 * n_judged;
    const bool anew = n_judged == 0 || (is_read && is_few);
    return anew ? 0 : begin;
}

void edgekv_index::put(int64_t begin, int64_t n_new, const float * keys) {
    if (n_new <= 0) return;
    if (begin + n_new < n) cut(begin + n_new);
    forget_labels(begin);
    if (begin == 0) {
        basis.resize(n_dims * ggml_row_size(type, d));
        centres.resize((size_t) n_dims * EDGEKV_CENTRES);
        mean.resize(d);
        ends.resize(n_parts);
        const auto sizes = book();
        edgekv_cpu().codes_learn(
            &sizes, keys, (int) n_new, basis.data(), centres.data(), mean.data(), ends.data());
        n_judged = n_new;
    }
    n = begin + n_new;
    codes.resize((n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * n_parts * 16);
    const auto b = book();
    edgekv_cpu().codes_put(&b, keys, (int) n_new, begin, codes.data());
}

void edgekv_index::cut(int64_t n_tokens) {
    n = std::min(n, n_tokens);
    codes.resize((n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * n_parts * 16);
    if (n_seen > n) { // its groups are of other rows
        n_seen = n;
        members.clear();
    }
    forget_labels(n);
    if (2 * n < n_judged) n_judged = 0; // most of what it was made of is gone: made anew
}

void edgekv_index::forget_labels(int64_t from) {
    n_grouped = from < n_found ? 0 : std::min(n_grouped, from); // groups are of those rows
}

void edgekv_index::set_resident(const std::vector<llama_pos> & pos, int64_t n_tokens) {
    n_seen = n_tokens;
    resident.assign((n_tokens + 31) / 32, 0);
    members.clear();
    for (llama_pos p : pos)
        if (p < n_tokens) resident[p / 32] |= 1u << p % 32;
}

std::vector<uint8_t> edgekv_index::group(const edgekv_recalled & rows) {
    edgekv_recalled a = rows;
    a.n = (int) n_seen;
    a.resident = resident.data();
    const int64_t last = n_found;
    n_found = std::min<int64_t>(n_seen, EACH);
    while (n_found >= EACH && 5 * n_found / 4 <= n_seen) n_found = 5 * n_found / 4;
    if (n_found != last) n_grouped = 0;
    const int n_groups = std::min(MOST_GROUPS, (int) n_found / EACH);
    std::vector<uint8_t> label(n_seen);
    std::copy(rows.label, rows.label + n_grouped, label.begin());
    group_k.resize((size_t) n_groups * a.d_k);
    group_v.resize((size_t) n_groups * a.d_v);
    members.resize(n_groups);
    members.resize(edgekv_cpu().recall_groups(&a, (int) n_found, (int) n_grouped, n_groups,
        label.data(), group_k.data(), group_v.data(), members.data()));
    n_grouped = n_seen;
    return label;
}

void edgekv_index::fill(edgekv_recalled & a, float share) const {
    const float n_wanted = share * (float) n_seen;
    a.book = book();
    a.codes = codes.data();
    a.resident = resident.data();
    a.n = (int) n_seen;
    a.n_most = (int) std::min((float) n_seen, std::ceil(MOST_TIMES * n_wanted));
    a.least = LEAST * (1 - share) * (1 - share) / std::max(n_wanted, 1.0f);
    a.n_groups = (int) members.size();
    a.group_k = group_k.data();
    a.group_v = group_v.data();
    a.members = members.data();
}

size_t edgekv_index::n_bytes() const {
    return codes.size() + basis.size() + resident.size() * sizeof(uint32_t) +
        (centres.size() + group_k.size() + group_v.size()) * sizeof(ggml_fp16_t) +
        (mean.size() + members.size() + ends.size()) * sizeof(float);
}
