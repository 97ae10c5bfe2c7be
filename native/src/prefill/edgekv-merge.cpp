// merge, while a prompt is read: evicted rows are folded into kept ones where they lie, before they
// go
#include "edgekv-basis.h"
#include "edgekv-compute.h"
#include "edgekv-context.h"
#include "edgekv-device.h"
#include "edgekv-error.h"
#include "edgekv-host-rows.h"
#include "edgekv-keeper.h"
#include "edgekv-kernels.h"

#include <algorithm>

namespace {

constexpr int64_t TASK_SIZE = 1 << 22; // products that are worth a thread

// kernels of ours for the rows of a layer's tensor where they lie, or null; they know no basis
const edgekv_device * device_for(const edgekv_layer & l, const ggml_tensor * t) {
    const auto * device = l.basis ? nullptr : l.kernels();
    return device && device->takes(t->type, (int) t->ne[0]) ? device : nullptr;
}

struct search_job {
    const edgekv_numbered & keys;
    const std::vector<int32_t> &gone, &kept;
    float * cosine;
    int32_t * nearest;
};

void search(ggml_tensor *, int ith, int nth, void * data) {
    const auto & j = *(const search_job *) data;
    edgekv_cpu().merge_nearest(&j.keys, j.gone.data(), (int) j.gone.size(), j.kept.data(),
        (int) j.kept.size(), j.cosine, j.nearest, ith, nth);
}

edgekv_error invalid(const char * what) { return { EDGEKV_INVALID, what }; }

// rows as they lie behind the head's first one
std::vector<int32_t> located(const edgekv_head_rows & head, int32_t n, const int32_t * rows) {
    if (n < 0 || (n > 0 && !rows)) throw invalid("there are no rows to merge");
    std::vector<int32_t> out(n);
    for (int32_t i = 0; i < n; ++i) {
        if (rows[i] < 0 || rows[i] >= head.n) throw invalid("a row to merge does not exist");
        out[i] = head.order ? head.order[rows[i]] : rows[i];
    }
    return out;
}

} // namespace

edgekv_head_rows edgekv_keeper::rows_of(int il, int head) const {
    if (il != prompt.il_done || is_kept(il)) {
        const auto & f = finished(il, head);
        const auto & best = ranked[il][head];
        return { &f.t, f.first[head], f.len[head], best.empty() ? nullptr : best.data() };
    }
    return scratches.rows_read(head);
}

void edgekv_keeper::nearest(int il, int head, const edgekv_row_list & gone,
    const edgekv_row_list & kept, float * cosine, int32_t * nearest) const {
    const auto rows = rows_of(il, head);
    const auto from = located(rows, gone.n, gone.rows), to = located(rows, kept.n, kept.rows);
    if (from.empty()) return;
    if (to.empty() || !cosine || !nearest)
        throw invalid("there is no kept row, or no place for the answer");
    if (const auto * device = device_for(prompt.layer(il), rows.t->k)) {
        device->find_nearest(ggml_backend_buffer_get_type(rows.t->k->buffer), scratches.device_work,
            edgekv_rows_at(rows.t->k, rows.first), from, to, cosine, nearest);
        return;
    }
    edgekv_host_rows keys(rows.t->k, rows.first, rows.n);
    keys.view.basis = edgekv_basis_of(prompt.layer(il), head);
    search_job job { keys.view, from, to, cosine, nearest };
    const int64_t n_tasks = (int64_t) from.size() * to.size() * keys.view.d / TASK_SIZE;
    edgekv_compute(edgekv_context::cpu(*prompt.ctx), [&](ggml_context * c0) {
        return ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, search,
            (int) std::clamp<int64_t>(n_tasks, 1, 64), &job);
    });
}

void edgekv_keeper::merge(int il, int head, const edgekv_merge & m) {
    const auto rows = rows_of(il, head);
    const auto to = located(rows, m.n, m.rows);
    if (to.empty()) return;
    if (!m.own || !m.counts) throw invalid("there are no weights to merge by");
    int64_t n_sources = 0;
    for (int i = 0; i < m.n; ++i) {
        if (m.counts[i] < 0 || m.counts[i] > rows.n)
            throw invalid("a row cannot receive that many");
        n_sources += m.counts[i];
    }
    if (n_sources > rows.n) throw invalid("there are not that many rows to merge");
    if (n_sources && !m.weights) throw invalid("there are no weights to merge by");
    const auto from = located(rows, (int32_t) n_sources, m.sources);
    std::vector<bool> receives(rows.n, false);
    for (int i = 0; i < m.n; ++i) {
        if (receives[m.rows[i]]) throw invalid("a row that receives is named twice");
        receives[m.rows[i]] = true;
    }
    for (int64_t i = 0; i < n_sources; ++i)
        if (receives[m.sources[i]]) throw invalid("a row cannot be merged and receive");
    for (int i = 0; i < m.n && !is_kept(il); ++i) folded.emplace(head, m.rows[i]);
    const edgekv_shares shares { m.n, to.data(), m.own, m.counts, from.data(), m.weights };
    for (ggml_tensor * t : rows.t->own()) {
        if (const auto * device = device_for(prompt.layer(il), t)) {
            device->fold(ggml_backend_buffer_get_type(t->buffer), scratches.device_work,
                edgekv_rows_at(t, rows.first), shares);
            continue;
        }
        edgekv_host_rows host(t, rows.first, rows.n);
        // sums of keys are sums in any scale, but those of shares that are not 1 miss the centre
        if (t == rows.t->k) host.view.basis.centre = edgekv_basis_of(prompt.layer(il), head).centre;
        edgekv_cpu().merge_fold(&host.view, &shares);
        if (host.copy.empty()) continue;
        for (int32_t r : to)
            ggml_backend_tensor_set(
                t, host.view.base + r * t->nb[1], (rows.first + r) * t->nb[1], t->nb[1]);
    }
}
