// Rows of one layer: layout, copies, gathering
#include "edgekv-layer.h"
#include "edgekv-device.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>

edgekv_tensors edgekv_tensors::make(ggml_backend_buffer_type_t buft, const edgekv_shape & shape,
    int64_t n_rows, const char * name) {
    edgekv_tensors r;
    r.ctx.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    if (!r.ctx) throw std::bad_alloc();
    r.k = ggml_new_tensor_2d(r.ctx.get(), shape.type_k, shape.d_k, n_rows);
    if (shape.v_in_k) {
        r.v = ggml_view_2d(r.ctx.get(), r.k, shape.d_v, n_rows, r.k->nb[1], 0);
        // no node that a graph would have to compute: it lies there like any tensor
        r.v->op = GGML_OP_NONE;
        r.v->src[0] = nullptr;
    } else {
        r.v = ggml_new_tensor_2d(r.ctx.get(), shape.type_v, shape.d_v, n_rows);
    }
    ggml_format_name(r.k, "edgekv_k_%s", name);
    ggml_format_name(r.v, "edgekv_v_%s", name);
    r.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), buft));
    if (!r.buf) throw std::bad_alloc();
    return r;
}

std::vector<ggml_tensor *> edgekv_tensors::own() const {
    if (!v || v->view_src) return { k };
    return { k, v };
}

size_t edgekv_tensors::n_bytes() const { return buf ? ggml_backend_buffer_get_size(buf.get()) : 0; }

void edgekv_convert(
    ggml_type from, const char * rows, size_t nb, int64_t n, int d, ggml_type type, void * out) {
    std::vector<float> values(n * d);
    edgekv_cpu().rows_to_f32(from, rows, nb, 0, (int) n, d, values.data());
    ggml_quantize_chunk(type, values.data(), out, 0, n, d, nullptr);
}

void edgekv_convert_rows(
    const ggml_tensor * t, int64_t first, int64_t n, ggml_type type, void * out) {
    std::vector<char> rows(n * t->nb[1]);
    edgekv_get_rows(t, first, n, rows.data());
    edgekv_convert(t->type, rows.data(), t->nb[1], n, (int) t->ne[0], type, out);
}

static void copy_tensor_rows(
    const ggml_tensor * from, ggml_tensor * to, int64_t src, int64_t dst, int64_t n) {
    const size_t nb = to->nb[1];
    if (from->type != to->type) {
        std::vector<char> rows(n * nb);
        edgekv_convert_rows(from, src, n, to->type, rows.data());
        ggml_backend_tensor_set(to, rows.data(), dst * nb, rows.size());
        return;
    }
    if (ggml_backend_buffer_is_host(from->buffer) && ggml_backend_buffer_is_host(to->buffer)) {
        memcpy((char *) to->data + dst * nb, (const char *) from->data + src * nb, n * nb);
        return;
    }
    const auto buft = ggml_backend_buffer_get_type(from->buffer);
    if (const auto * device =
            buft == ggml_backend_buffer_get_type(to->buffer) ? edgekv_device::of(buft) : nullptr) {
        device->move_rows(from, nullptr, src, to, dst, (int) n);
        return;
    }
    std::vector<char> host(n * nb);
    ggml_backend_tensor_get(from, host.data(), src * nb, host.size());
    ggml_backend_tensor_set(to, host.data(), dst * nb, host.size());
}

void edgekv_tensors::copy_rows(const edgekv_tensors & from, int64_t src, int64_t dst, int64_t n) {
    if (n <= 0) return;
    const auto to = own(), of = from.own();
    for (size_t i = 0; i < to.size(); ++i) copy_tensor_rows(of[i], to[i], src, dst, n);
}

// a device is waited for twice, not before and behind each head
void edgekv_tensors::copy_heads(const edgekv_tensors & from, const std::vector<int32_t> & src,
    const std::vector<int32_t> & dst, const std::vector<int32_t> & n) {
    if (std::all_of(n.begin(), n.end(), [](int32_t x) { return x == 0; })) return;
    const auto buft = ggml_backend_buffer_get_type(from.buf.get());
    const auto * device =
        buft == ggml_backend_buffer_get_type(buf.get()) ? edgekv_device::of(buft) : nullptr;
    if (!device) {
        for (size_t h = 0; h < n.size(); ++h) copy_rows(from, src[h], dst[h], n[h]);
        return;
    }
    device->settle(k);
    const auto to = own(), of = from.own();
    for (size_t h = 0; h < n.size(); ++h)
        for (size_t i = 0; i < to.size() && n[h] > 0; ++i)
            device->queue_rows(of[i], nullptr, src[h], to[i], dst[h], n[h]);
    device->settle(k); // the old rows' memory is about to go
}

int32_t edgekv_layer::len_max() const {
    return len.empty() ? 0 : *std::max_element(len.begin(), len.end());
}

int64_t edgekv_layer::n_rows() const {
    int64_t n = 0;
    for (int32_t x : len) n += x;
    return n;
}

const edgekv_device * edgekv_layer::kernels() const {
    return v_in_k ? nullptr : edgekv_device::of(buft);
}

std::unique_ptr<edgekv_layer> edgekv_layer::alike() const {
    auto l = std::make_unique<edgekv_layer>();
    l->il = il;
    l->reads = reads;
    l->n_head = n_head;
    l->n_head_kv = n_head_kv;
    static_cast<edgekv_shape &>(*l) = *this;
    l->n_swa = n_swa;
    l->chunked = chunked;
    l->buft = buft;
    l->max_bias = max_bias;
    l->basis = basis;
    l->row_step = row_step;
    l->rounds_late = rounds_late;
    l->pos.resize(n_head_kv);
    return l;
}

static int64_t assign_first(
    const std::vector<int32_t> & cap, std::vector<int32_t> & first, int row_step) {
    int64_t n = 0;
    first.resize(cap.size());
    for (size_t k = 0; k < cap.size(); ++k) {
        n = (n + row_step - 1) / row_step * row_step;
        first[k] = (int32_t) n;
        n += cap[k];
    }
    return std::max<int64_t>(n, 1); // a tensor has at least one row
}

void edgekv_layer::layout(const std::vector<int32_t> & cap_new) {
    if (n_head_kv == 0) return;
    std::vector<int32_t> first_new;
    const int64_t n = assign_first(cap_new, first_new, row_step);
    auto fresh = edgekv_tensors::make(buft, *this, n, std::to_string(il).c_str());
    std::vector<int32_t> n_there(n_head_kv);
    for (int k = 0; k < n_head_kv; ++k) {
        n_there[k] = std::min(n_rounded(k), cap_new[k]);
        len[k] = n_there[k] + n_recent;
        pos[k].resize(len[k]);
    }
    if (t.k) fresh.copy_heads(t, first, first_new, n_there);
    t = std::move(fresh);
    row_pos = {};
    first = std::move(first_new);
    cap = cap_new;
}

// Rows of a head that wait at most, and are left when it is full: 128 is what KIVI leaves as it is
// (arXiv 2402.02750)
static constexpr int32_t RECENT_MAX = 192, RECENT_STAY = 128, RECENT_STEP = 64;

int32_t edgekv_layer::room() const {
    if (waits()) return cap_recent - n_recent;
    int32_t n = INT32_MAX;
    for (int k = 0; k < n_head_kv; ++k) n = std::min(n, cap[k] - len[k]);
    return n;
}

void edgekv_layer::make_room(int32_t n) {
    if (n_recent + n > RECENT_MAX)
        round(std::clamp(RECENT_MAX - n, 0, std::min(n_recent, RECENT_STAY)));
    const int32_t n_new = (n_recent + n + RECENT_STEP - 1) / RECENT_STEP * RECENT_STEP;
    if (n_new == cap_recent) return;
    edgekv_shape halves = *this;
    halves.type_k = halves.type_v = GGML_TYPE_F16;
    auto fresh = edgekv_tensors::make(buft, halves, (int64_t) n_new * n_head_kv, "recent");
    for (int k = 0; k < n_head_kv && n_recent; ++k)
        fresh.copy_rows(recent, (int64_t) k * cap_recent, (int64_t) k * n_new, n_recent);
    recent = std::move(fresh);
    cap_recent = n_new;
}

void edgekv_layer::round(int32_t n_stay) {
    const int32_t n = n_recent - n_stay;
    if (n <= 0) return;
    auto cap_new = cap;
    for (int k = 0; k < n_head_kv; ++k) cap_new[k] = std::max(cap[k], n_rounded(k) + n);
    if (cap_new != cap) layout(cap_new);
    for (int k = 0; k < n_head_kv; ++k)
        t.copy_rows(recent, (int64_t) k * cap_recent, first[k] + n_rounded(k), n);
    for (int k = 0; k < n_head_kv; ++k) { // nothing can fail any more
        const int64_t at = (int64_t) k * cap_recent;
        for (int32_t i = 0; i < n_stay; ++i) recent.copy_rows(recent, at + n + i, at + i, 1);
    }
    n_recent = n_stay;
    if (n_recent) return;
    recent = {};
    cap_recent = 0;
}

void edgekv_layer::place_pos(llama_pos n_past) {
    if (max_bias == 0.0f || row_pos.t || n_head_kv == 0) return;
    std::vector<float> here(t.k->ne[1], 0.0f);
    for (int k = 0; k < n_head_kv; ++k)
        for (int32_t r = 0; r < cap[k]; ++r)
            here[first[k] + r] = (float) (r < len[k] ? pos[k][r] : n_past + r - len[k]);
    row_pos = edgekv_matrix::make(buft, GGML_TYPE_F32, 1, (int64_t) here.size(), "pos");
    ggml_backend_tensor_set(row_pos.t, here.data(), 0, here.size() * sizeof(float));
}

// the rows of each head at once
static void gather_on_device(const edgekv_device & device, const edgekv_tensors & from,
    const std::vector<int64_t> & base, const std::vector<std::vector<int32_t>> & keep,
    edgekv_tensors & to, const std::vector<int32_t> & first, ggml_backend_buffer_type_t buft) {
    std::vector<int32_t> rows;
    for (const auto & x : keep) rows.insert(rows.end(), x.begin(), x.end());
    if (rows.empty()) return;
    const auto index = edgekv_matrix::make(buft, GGML_TYPE_I32, (int64_t) rows.size(), 1, "kept");
    ggml_backend_tensor_set(index.t, rows.data(), 0, rows.size() * sizeof(int32_t));
    const int32_t * at = (const int32_t *) index.t->data;
    device.settle(to.k);
    const auto there = to.own(), here = from.own();
    for (size_t k = 0; k < keep.size(); at += keep[k].size(), ++k)
        for (size_t i = 0; i < there.size(); ++i)
            device.queue_rows(here[i], at, base[k], there[i], first[k], (int) keep[k].size());
    device.settle(to.k);
}

void edgekv_gather(const edgekv_tensors & from, const std::vector<int64_t> & base,
    const std::vector<std::vector<int32_t>> & keep, edgekv_layer & to) {
    if (to.n_head_kv == 0) return;
    std::vector<int32_t> cap(to.n_head_kv);
    for (int k = 0; k < to.n_head_kv; ++k) cap[k] = (int32_t) keep[k].size();
    std::vector<int32_t> first;
    const int64_t n = assign_first(cap, first, to.row_step);
    auto fresh = edgekv_tensors::make(to.buft, to, n, std::to_string(to.il).c_str());
    const auto * device =
        from.k && from.buf && ggml_backend_buffer_get_type(from.buf.get()) == to.buft
        ? edgekv_device::of(to.buft)
        : nullptr;
    if (device) gather_on_device(*device, from, base, keep, fresh, first, to.buft);
    else
        for (int k = 0; k < to.n_head_kv; ++k) {
            for (size_t i = 0; i < keep[k].size();) { // runs of neighbours go in one copy
                size_t j = i + 1;
                while (j < keep[k].size() && keep[k][j] == keep[k][j - 1] + 1) ++j;
                fresh.copy_rows(
                    from, base[k] + keep[k][i], first[k] + (int64_t) i, (int64_t) (j - i));
                i = j;
            }
        }
    to.t = std::move(fresh);
    to.row_pos = {};
    to.first = std::move(first);
    to.len = cap;
    to.cap = std::move(cap);
}

void edgekv_get_rows(const ggml_tensor * t, int64_t first, int64_t n, void * out) {
    // a view ends with its last row's own bytes
    const ggml_tensor * whole = t->view_src ? t->view_src : t;
    if (n > 0) ggml_backend_tensor_get(whole, out, first * t->nb[1], n * t->nb[1]);
}

bool edgekv_bytes_finite(ggml_type type, const char * rows, size_t nb, int64_t n, int d) {
    std::vector<float> x(d);
    for (int64_t i = 0; i < n; ++i) {
        edgekv_cpu().rows_to_f32(type, rows, nb, i, 1, d, x.data());
        if (!std::all_of(x.begin(), x.end(), [](float y) { return std::isfinite(y); }))
            return false;
    }
    return true;
}

bool edgekv_rows_finite(const ggml_tensor * t, int64_t first, int64_t n) {
    const size_t nb = t->nb[1];
    std::vector<char> here;
    for (const int64_t end = first + n; first < end; first += 256) {
        const int64_t n_here = std::min<int64_t>(end - first, 256);
        here.resize(n_here * nb);
        edgekv_get_rows(t, first, n_here, here.data());
        if (!edgekv_bytes_finite(t->type, here.data(), nb, n_here, (int) t->ne[0])) return false;
    }
    return true;
}
