// Rows of the layer in work for the program, as f32
#include "edgekv-basis.h"
#include "edgekv-device.h"
#include "edgekv-error.h"
#include "edgekv-host-rows.h"
#include "edgekv-keeper.h"
#include "edgekv-kernels.h"

#include <algorithm>

namespace {

void fetch(const ggml_tensor * t, int64_t first, int64_t n, float * out) {
    const edgekv_host_rows host(t, first, n);
    edgekv_cpu().rows_to_f32(t->type, host.view.base, host.view.nb, 0, (int) n, host.view.d, out);
}

// rows `which` of the head whose n rows begin at `first`
void fetch_some(const ggml_tensor * t, int64_t first, int64_t n, const std::vector<int32_t> & which,
    edgekv_matrix & work, float * out) {
    const auto buft = ggml_backend_buffer_get_type(t->buffer);
    if (const auto * device = edgekv_device::of(buft)) {
        std::vector<char> rows(which.size() * t->nb[1]);
        device->fetch_rows(buft, work, edgekv_rows_at(t, first), which, rows.data());
        edgekv_cpu().rows_to_f32(
            t->type, rows.data(), t->nb[1], 0, (int) which.size(), (int) t->ne[0], out);
        return;
    }
    const edgekv_host_rows host(t, first, n);
    for (size_t i = 0; i < which.size(); ++i)
        edgekv_cpu().rows_to_f32(
            t->type, host.view.base, host.view.nb, which[i], 1, host.view.d, out + i * host.view.d);
}

} // namespace

void edgekv_keeper::rows(int head, float * k, float * v) const {
    const auto r = scratches.rows_read(head);
    if (k) {
        fetch(r.t->k, r.first, r.n, k);
        edgekv_whole_keys(scratches.in_work(), head, r.n, k);
    }
    if (v) fetch(r.t->v, r.first, r.n, v);
}

void edgekv_keeper::some_rows(int head, const edgekv_row_list & which, float * k, float * v) const {
    const auto r = scratches.rows_read(head);
    if (which.n < 0 || (which.n && !which.rows))
        throw edgekv_error { EDGEKV_INVALID, "there are no rows to read" };
    const std::vector<int32_t> rows(which.rows, which.rows + which.n);
    if (std::any_of(rows.begin(), rows.end(), [&](int32_t i) { return i < 0 || i >= r.n; }))
        throw edgekv_error { EDGEKV_INVALID, "a row to read does not exist" };
    if (rows.empty()) return;
    if (k) {
        fetch_some(r.t->k, r.first, r.n, rows, scratches.device_work, k);
        edgekv_whole_keys(scratches.in_work(), head, which.n, k);
    }
    if (v) fetch_some(r.t->v, r.first, r.n, rows, scratches.device_work, v);
}
