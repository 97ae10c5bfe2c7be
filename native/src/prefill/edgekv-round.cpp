// round: rows that stay go from the scratch's halves to the types of the cache. Those of earlier
// turns were rounded before, and go as bytes, unless something was folded into them.
#include "edgekv-compute.h"
#include "edgekv-context.h"
#include "edgekv-host-rows.h"
#include "edgekv-keeper.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t TASK_SIZE = 1 << 16; // values that are worth a thread

// of one head and tensor: row keep[i] becomes row i of `to`, from `halves` or, if it is old, from
// `before`
struct job {
    edgekv_numbered halves, before, to;
    const std::vector<int32_t> & keep;
    const std::vector<bool> & is_old;
};

void round_rows(ggml_tensor *, int ith, int nth, void * data) {
    const auto & j = *(const job *) data;
    const int64_t n = (int64_t) j.keep.size();
    std::vector<float> row(j.to.d);
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
        char * to = j.to.base + i * j.to.nb;
        if (j.is_old[i]) {
            memcpy(to, j.before.base + j.keep[i] * j.before.nb, j.to.nb);
            continue;
        }
        edgekv_cpu().rows_to_f32(
            j.halves.type, j.halves.base, j.halves.nb, j.keep[i], 1, j.to.d, row.data());
        ggml_quantize_chunk(j.to.type, row.data(), to, 0, 1, j.to.d, nullptr);
    }
}

} // namespace

void edgekv_keeper::round(const std::vector<int64_t> & base,
    const std::vector<std::vector<int32_t>> & keep, edgekv_layer & to) const {
    const auto & l = prompt.layer(to.il);
    for (const auto & rows : keep) to.len.push_back((int32_t) rows.size());
    to.layout(to.len);
    const auto halves = scratches.of(l).t.own(), there = to.t.own();
    const auto before = l.t.k ? l.t.own() : halves; // by the archive, no row is old
    for (int k = 0; k < l.n_head_kv; ++k) {
        std::vector<bool> is_old;
        for (int32_t r : keep[k]) is_old.push_back(r < l.n_rounded(k) && !folded.count({ k, r }));
        for (size_t i = 0; i < there.size(); ++i) {
            job j { edgekv_rows_at(halves[i], base[k]), edgekv_rows_at(before[i], l.first[k]),
                edgekv_rows_at(there[i], to.first[k]), keep[k], is_old };
            const int64_t n_tasks = (int64_t) keep[k].size() * j.to.d / TASK_SIZE;
            edgekv_compute(edgekv_context::cpu(*prompt.ctx), [&](ggml_context * c0) {
                return ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, round_rows,
                    (int) std::clamp<int64_t>(n_tasks, 1, 64), &j);
            });
        }
    }
}
