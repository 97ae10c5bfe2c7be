// predict: what a linear map says of each row of the layer in work
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

// rows that are worth a thread; sums over them are added up in order, whatever the number of
// threads
constexpr int BLOCK = 1024;

struct job {
    const edgekv_numbered &keys, &values;
    const edgekv_map & map;
    int n;
    float *out, *unlike;
    std::vector<float> sums; // [n_blocks][d_k]

    int n_blocks() const { return (n + BLOCK - 1) / BLOCK; }
    int rows_in(int block) const { return std::min(BLOCK, n - block * BLOCK); }
};

void sum_keys(ggml_tensor *, int ith, int nth, void * data) {
    auto & j = *(job *) data;
    for (int b = ith; b < j.n_blocks(); b += nth)
        edgekv_cpu().key_sum(&j.keys, b * BLOCK, j.rows_in(b), &j.sums[(size_t) b * j.keys.d]);
}

void predict(ggml_tensor *, int ith, int nth, void * data) {
    auto & j = *(job *) data;
    std::vector<float> sum(j.keys.d);
    for (int i = 0; i < j.keys.d; ++i) {
        double all = 0;
        for (size_t b = i; b < j.sums.size(); b += j.keys.d) all += j.sums[b];
        sum[i] = (float) all;
    }
    for (int b = ith; b < j.n_blocks(); b += nth)
        edgekv_cpu().predict(
            &j.keys, &j.values, sum.data(), &j.map, b * BLOCK, j.rows_in(b), j.out, j.unlike);
}

bool is_block(int size, int d) {
    return size == 0 || (size > 0 && (size & (size - 1)) == 0 && d % size == 0);
}

} // namespace

void edgekv_keeper::predict(
    int head, const edgekv_map & map, int n_weights, float * out, float * unlike) const {
    const auto & l = scratches.in_work();
    if (!map.weights || n_weights != l.d_v + l.d_k / 2 + 4)
        throw edgekv_error { EDGEKV_INVALID, "the map does not fit the heads of this layer" };
    if (!is_block(map.turn_k, l.d_k) || !is_block(map.turn_v, l.d_v))
        throw edgekv_error { EDGEKV_INVALID, "rows cannot be turned in blocks of that size" };
    const auto rows = rows_of(l.il, head);
    if (rows.n == 0) return;
    const auto buft = ggml_backend_buffer_get_type(rows.t->k->buffer);
    const auto * device = l.basis ? nullptr : l.kernels(); // which know no basis
    if (device && device->predicts(l.type_k, l.type_v, l.d_k, l.d_v)) {
        device->predict_rows(buft, scratches.device_work, edgekv_rows_at(rows.t->k, rows.first),
            edgekv_rows_at(rows.t->v, rows.first), map, rows.n, out, unlike);
        return;
    }
    edgekv_host_rows keys(rows.t->k, rows.first, rows.n);
    const edgekv_host_rows values(rows.t->v, rows.first, rows.n);
    keys.view.basis = edgekv_basis_of(l, head);
    job j { keys.view, values.view, map, rows.n, out, unlike, {} };
    j.sums.resize((size_t) j.n_blocks() * l.d_k);
    const int n_tasks = std::min(j.n_blocks(), 64);
    edgekv_compute(edgekv_context::cpu(*prompt.ctx), [&](ggml_context * c0) {
        ggml_tensor * summed =
            ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, sum_keys, n_tasks, &j);
        return ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, &summed, 1, ::predict, n_tasks, &j);
    });
}
