// Rows moved and judged on the device where they lie
#include "edgekv-device.h"

#include "ggml-backend.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

const edgekv_device * edgekv_device::of(ggml_backend_buffer_type_t buft) {
    static std::mutex mutex; // contexts may live in different threads
    static std::map<ggml_backend_reg_t, std::unique_ptr<edgekv_device>> known;
    ggml_backend_dev_t dev = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);
    if (!dev) return nullptr;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto [it, fresh] = known.try_emplace(reg);
    if (fresh) {
        auto d = std::make_unique<edgekv_device>();
        auto find = [&](auto & function, const char * name) { return (function = (std::decay_t<decltype(function)>) ggml_backend_reg_get_proc_address(reg, name)) != nullptr; };
        if (find(d->attend_supports, "edgekv_cuda_attend_supports") && find(d->score_workspace, "edgekv_cuda_score_workspace") &&
            find(d->score, "edgekv_cuda_score") && find(d->gather, "edgekv_cuda_gather") && find(d->wait, "edgekv_cuda_wait")) it->second = std::move(d);
    }
    return it->second.get();
}

void edgekv_device::check(int error, const char * what) const {
    if (error) throw std::runtime_error(std::string("the device could not ") + what + " (error " + std::to_string(error) + ")");
}

void edgekv_device::move_rows(const ggml_tensor * from, const int32_t * index, int64_t src, ggml_tensor * to, int64_t dst, int n) const {
    const size_t nb = from->nb[1];
    check(wait(to->data), "finish");
    check(gather((const char *) from->data + src*nb, (char *) to->data + dst*nb, nb, index, n, nullptr), "move rows");
    check(wait(to->data), "move rows");
}

namespace {

// pieces of one allocation
struct arena {
    size_t n = 0;
    size_t add(size_t n_bytes) { const size_t at = n; n += (n_bytes + 255)/256*256; return at; }
};

// an array that lies in main memory, and its place on the device
struct piece { const void * here; size_t n_bytes, at; };

} // namespace

void edgekv_device::score_columns(ggml_backend_buffer_type_t buft, edgekv_matrix & work, edgekv_rows rows, edgekv_queries qs, edgekv_columns cols) const {
    const int n_rows_max = *std::max_element(rows.len, rows.len + rows.n_head_kv), G = rows.n_head/rows.n_head_kv;
    arena a;
    std::vector<piece> in, out;
    std::vector<std::pair<const void **, size_t>> pointers; // to be turned into addresses on the device
    auto send = [&](auto *& x, size_t n, bool back) {
        if (!x) return;
        const piece p = { x, n*sizeof(*x), a.add(n*sizeof(*x)) };
        in.push_back(p);
        if (back) out.push_back(p);
        pointers.push_back({ (const void **) &x, p.at });
    };
    send(rows.first, rows.n_head_kv, false);
    send(rows.len, rows.n_head_kv, false);
    send(rows.sinks, rows.n_head, false);
    send(qs.q, (qs.n_tokens - 1)*qs.stride_t + (rows.n_head - 1)*qs.stride_h + rows.d_k, false);
    send(qs.n_after, qs.n_tokens, false);
    send(qs.start, qs.n_tokens, false);
    for (float ** x : { &cols.sum, &cols.max, &cols.entropy }) send(*x, cols.n_rows, true);
    for (float ** x : { &cols.mean, &cols.m2 }) send(*x, G*cols.n_rows, true);
    const size_t at_workspace = a.add(score_workspace(&rows, qs.n_tokens, n_rows_max));

    if (work.n_bytes() < a.n) {
        work = {};
        work = edgekv_matrix::make(buft, GGML_TYPE_I8, (int64_t) a.n, 1, "score");
    }
    char * base = (char *) work.t->data;
    for (const auto & p : in) ggml_backend_tensor_set(work.t, p.here, p.at, p.n_bytes);
    for (auto & [pointer, at] : pointers) *pointer = base + at;
    check(wait(base), "finish");
    check(score(&rows, &qs, &cols, n_rows_max, base + at_workspace, nullptr), "score");
    check(wait(base), "score");
    for (const auto & p : out) ggml_backend_tensor_get(work.t, const_cast<void *>(p.here), p.at, p.n_bytes);
}
