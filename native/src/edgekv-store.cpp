// Rows of the store: layout, gathering, tails, rewinding, state
#include "edgekv-store.h"
#include "edgekv-device.h"
#include "edgekv-prefill.h"
#include "edgekv-table.h"
#include "cpu/edgekv-cpu.h"

#include "llama-io.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

static constexpr int32_t TAIL_STEP = 64; // rows per head that a full tail grows by
static constexpr int32_t SWA_SLACK = 64; // rows behind the window that stay, so that short rewinds are exact

edgekv_tensors edgekv_tensors::make(ggml_backend_buffer_type_t buft, ggml_type type_k, ggml_type type_v, int d_k, int d_v, int64_t n_rows, const char * name) {
    edgekv_tensors r;
    r.ctx.reset(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));
    if (!r.ctx) throw std::bad_alloc();
    r.k = ggml_new_tensor_2d(r.ctx.get(), type_k, d_k, n_rows);
    r.v = ggml_new_tensor_2d(r.ctx.get(), type_v, d_v, n_rows);
    ggml_format_name(r.k, "edgekv_k_%s", name);
    ggml_format_name(r.v, "edgekv_v_%s", name);
    r.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), buft));
    if (!r.buf) throw std::bad_alloc();
    return r;
}

edgekv_matrix edgekv_matrix::make(ggml_backend_buffer_type_t buft, ggml_type type, int64_t ne0, int64_t ne1, const char * name) {
    edgekv_matrix r;
    r.ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    if (!r.ctx) throw std::bad_alloc();
    r.t = ggml_new_tensor_2d(r.ctx.get(), type, ne0, ne1);
    ggml_format_name(r.t, "edgekv_%s", name);
    r.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), buft));
    if (!r.buf) throw std::bad_alloc();
    return r;
}

size_t edgekv_tensors::n_bytes() const { return buf ? ggml_backend_buffer_get_size(buf.get()) : 0; }

static void copy_tensor_rows(const ggml_tensor * from, ggml_tensor * to, int64_t src, int64_t dst, int64_t n) {
    const size_t nb = from->nb[1];
    if (ggml_backend_buffer_is_host(from->buffer) && ggml_backend_buffer_is_host(to->buffer)) {
        memcpy((char *) to->data + dst*nb, (const char *) from->data + src*nb, n*nb);
        return;
    }
    const auto buft = ggml_backend_buffer_get_type(from->buffer);
    if (const auto * device = buft == ggml_backend_buffer_get_type(to->buffer) ? edgekv_device::of(buft) : nullptr) {
        device->move_rows(from, nullptr, src, to, dst, (int) n);
        return;
    }
    std::vector<char> host(n*nb);
    ggml_backend_tensor_get(from, host.data(), src*nb, host.size());
    ggml_backend_tensor_set(to,   host.data(), dst*nb, host.size());
}

void edgekv_tensors::copy_rows(const edgekv_tensors & from, int64_t src, int64_t dst, int64_t n) {
    if (n <= 0) return;
    copy_tensor_rows(from.k, k, src, dst, n);
    copy_tensor_rows(from.v, v, src, dst, n);
}

// a device is waited for twice, not before and behind each head
void edgekv_tensors::copy_heads(const edgekv_tensors & from, const std::vector<int32_t> & src, const std::vector<int32_t> & dst, const std::vector<int32_t> & n) {
    if (std::all_of(n.begin(), n.end(), [](int32_t x) { return x == 0; })) return;
    const auto buft = ggml_backend_buffer_get_type(from.buf.get());
    const auto * device = buft == ggml_backend_buffer_get_type(buf.get()) ? edgekv_device::of(buft) : nullptr;
    if (!device) {
        for (size_t h = 0; h < n.size(); ++h) copy_rows(from, src[h], dst[h], n[h]);
        return;
    }
    device->settle(k);
    for (size_t h = 0; h < n.size(); ++h) {
        if (n[h] == 0) continue;
        device->queue_rows(from.k, nullptr, src[h], k, dst[h], n[h]);
        device->queue_rows(from.v, nullptr, src[h], v, dst[h], n[h]);
    }
    device->settle(k); // the old rows' memory is about to go
}

int32_t edgekv_layer::len_max() const { return len.empty() ? 0 : *std::max_element(len.begin(), len.end()); }

int64_t edgekv_layer::n_rows() const {
    int64_t n = 0;
    for (int32_t x : len) n += x;
    return n;
}

std::unique_ptr<edgekv_layer> edgekv_layer::alike() const {
    auto l = std::make_unique<edgekv_layer>();
    l->il = il; l->n_head = n_head; l->n_head_kv = n_head_kv; l->d_k = d_k; l->d_v = d_v;
    l->type_k = type_k; l->type_v = type_v; l->n_swa = n_swa; l->buft = buft; l->max_bias = max_bias; l->row_step = row_step;
    l->pos.resize(n_head_kv);
    return l;
}

static int64_t assign_first(const std::vector<int32_t> & cap, std::vector<int32_t> & first, int row_step) {
    int64_t n = 0;
    first.resize(cap.size());
    for (size_t k = 0; k < cap.size(); ++k) {
        n = (n + row_step - 1)/row_step*row_step;
        first[k] = (int32_t) n;
        n += cap[k];
    }
    return std::max<int64_t>(n, 1); // a tensor has at least one row
}

void edgekv_layer::layout(const std::vector<int32_t> & cap_new) {
    if (n_head_kv == 0) return;
    std::vector<int32_t> first_new;
    const int64_t n = assign_first(cap_new, first_new, row_step);
    auto fresh = edgekv_tensors::make(buft, type_k, type_v, d_k, d_v, n, std::to_string(il).c_str());
    for (int k = 0; k < n_head_kv; ++k) {
        len[k] = std::min(len[k], cap_new[k]);
        pos[k].resize(len[k]);
    }
    if (t.k) fresh.copy_heads(t, first, first_new, len);
    t = std::move(fresh);
    row_pos = {};
    first = std::move(first_new);
    cap = cap_new;
}

void edgekv_layer::place_pos(llama_pos n_past) {
    if (max_bias == 0.0f || row_pos.t || n_head_kv == 0) return;
    std::vector<float> here(t.k->ne[1], 0.0f);
    for (int k = 0; k < n_head_kv; ++k) for (int32_t r = 0; r < cap[k]; ++r) here[first[k] + r] = (float) (r < len[k] ? pos[k][r] : n_past + r - len[k]);
    row_pos = edgekv_matrix::make(buft, GGML_TYPE_F32, 1, (int64_t) here.size(), "pos");
    ggml_backend_tensor_set(row_pos.t, here.data(), 0, here.size()*sizeof(float));
}

// the rows of each head at once
static void gather_on_device(const edgekv_device & device, const edgekv_tensors & from, const std::vector<int64_t> & base,
        const std::vector<std::vector<int32_t>> & keep, edgekv_tensors & to, const std::vector<int32_t> & first, ggml_backend_buffer_type_t buft) {
    std::vector<int32_t> rows;
    for (const auto & x : keep) rows.insert(rows.end(), x.begin(), x.end());
    if (rows.empty()) return;
    const auto index = edgekv_matrix::make(buft, GGML_TYPE_I32, (int64_t) rows.size(), 1, "kept");
    ggml_backend_tensor_set(index.t, rows.data(), 0, rows.size()*sizeof(int32_t));
    const int32_t * at = (const int32_t *) index.t->data;
    device.settle(to.k);
    for (size_t k = 0; k < keep.size(); at += keep[k].size(), ++k) {
        device.queue_rows(from.k, at, base[k], to.k, first[k], (int) keep[k].size());
        device.queue_rows(from.v, at, base[k], to.v, first[k], (int) keep[k].size());
    }
    device.settle(to.k);
}

void edgekv_gather(const edgekv_tensors & from, const std::vector<int64_t> & base, const std::vector<std::vector<int32_t>> & keep, edgekv_layer & to) {
    if (to.n_head_kv == 0) return;
    std::vector<int32_t> cap(to.n_head_kv);
    for (int k = 0; k < to.n_head_kv; ++k) cap[k] = (int32_t) keep[k].size();
    std::vector<int32_t> first;
    const int64_t n = assign_first(cap, first, to.row_step);
    auto fresh = edgekv_tensors::make(to.buft, to.type_k, to.type_v, to.d_k, to.d_v, n, std::to_string(to.il).c_str());
    const auto * device = from.k && from.buf && ggml_backend_buffer_get_type(from.buf.get()) == to.buft ? edgekv_device::of(to.buft) : nullptr;
    if (device) gather_on_device(*device, from, base, keep, fresh, first, to.buft);
    else for (int k = 0; k < to.n_head_kv; ++k) {
        for (size_t i = 0; i < keep[k].size();) { // runs of neighbours go in one copy
            size_t j = i + 1;
            while (j < keep[k].size() && keep[k][j] == keep[k][j - 1] + 1) ++j;
            fresh.copy_rows(from, base[k] + keep[k][i], first[k] + (int64_t) i, (int64_t) (j - i));
            i = j;
        }
    }
    to.t = std::move(fresh);
    to.row_pos = {};
    to.first = std::move(first);
    to.len = cap;
    to.cap = std::move(cap);
}

edgekv_store::edgekv_store() = default;
edgekv_store::~edgekv_store() { if (active) active->lose_context(); }

size_t edgekv_store::n_bytes() const {
    size_t n = 0;
    for (const auto & l : layers) if (l) n += l->t.n_bytes() + l->row_pos.n_bytes();
    return n;
}

void edgekv_store::note_peak(size_t n_bytes_extra) { n_bytes_peak = std::max(n_bytes_peak, n_bytes() + n_bytes_extra); }

// drop the oldest rows of a sliding-window layer that no token from n_past on (less the slack) can see
static void drop_window(edgekv_layer & l, llama_pos n_past) {
    const int32_t n_keep = l.n_swa + SWA_SLACK;
    if (l.n_swa == 0 || l.len_max() <= n_keep) return;
    (void) n_past;
    std::vector<std::vector<int32_t>> keep(l.n_head_kv);
    std::vector<int64_t> base(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) {
        base[k] = l.first[k];
        const int32_t drop = std::max(0, l.len[k] - n_keep);
        for (int32_t r = drop; r < l.len[k]; ++r) keep[k].push_back(r);
    }
    edgekv_gather(l.t, base, keep, l);
    for (int k = 0; k < l.n_head_kv; ++k) l.pos[k].erase(l.pos[k].begin(), l.pos[k].end() - l.len[k]);
}

void edgekv_store::reserve_tail(int32_t n) {
    for (auto & l : layers) {
        if (!l) continue;
        bool fits = true;
        for (int k = 0; k < l->n_head_kv; ++k) fits = fits && l->len[k] + n <= l->cap[k];
        if (fits) continue;
        settle();
        ++version; // first: one of the two may move the tensors and the other fail
        drop_window(*l, n_past);
        std::vector<int32_t> cap(l->n_head_kv);
        for (int k = 0; k < l->n_head_kv; ++k) cap[k] = l->len[k] + std::max(n, TAIL_STEP);
        l->layout(cap);
    }
    place_pos();
    note_peak();
}

void edgekv_store::place_pos() { for (auto & l : layers) if (l) l->place_pos(n_past); }

bool edgekv_store::trim(llama_pos p0) {
    if (p0 >= n_past) return true;
    if (p0 <= 0) { clear(); return true; }
    if (p0 < boundary) return false;
    for (const auto & l : layers) { // a window that has moved on cannot come back
        if (!l || l->n_swa == 0 || l->len_max() == 0) continue;
        const llama_pos oldest = l->pos[0].front();
        if (oldest > 0 && oldest > p0 - l->n_swa + 1) return false;
    }
    take_back(p0);
    return true;
}

void edgekv_store::take_back(llama_pos p0) noexcept {
    for (auto & l : layers) {
        if (!l) continue;
        for (int k = 0; k < l->n_head_kv; ++k) { // tokens since the boundary lie at the end, in order
            auto & pos = l->pos[k];
            while (!pos.empty() && pos.back() >= p0) pos.pop_back();
            l->len[k] = (int32_t) pos.size();
        }
    }
    n_past = p0;
}

void edgekv_store::clear() noexcept {
    for (auto & l : layers) {
        if (!l) continue;
        std::fill(l->len.begin(), l->len.end(), 0);
        for (auto & pos : l->pos) pos.clear();
        l->row_pos = {};
    }
    n_past = boundary = 0;
    n_bytes_peak = 0;
    ++version;
    try {
        settle();
        for (auto & l : layers) if (l) l->layout(std::vector<int32_t>(l->n_head_kv, 0));
        place_pos();
    } catch (const std::exception &) {} // the room of some layers stays, for the next tokens
}

void edgekv_store::shrink_to_fit() {
    for (auto & l : layers) if (l && l->len != l->cap) { l->layout(l->len); ++version; }
    place_pos();
}

// ---- state: header, then per layer the lengths, positions and rows of each head

static constexpr uint32_t STATE_MAGIC = 0x31766b65; // "ekv1"

template <typename T> static void put(llama_io_write_i & io, const T & x) { io.write(&x, sizeof(x)); }
template <typename T> static T    get(llama_io_read_i & io) { T x; io.read(&x, sizeof(x)); return x; }

// a head without rows has no memory either, and memcpy takes no null pointer, not even for 0 bytes
template <typename T> static void put_all(llama_io_write_i & io, const std::vector<T> & x) { if (!x.empty()) io.write(x.data(), x.size()*sizeof(T)); }
template <typename T> static void get_all(llama_io_read_i & io, std::vector<T> & x) { if (!x.empty()) io.read(x.data(), x.size()*sizeof(T)); }

static void write_rows(llama_io_write_i & io, const ggml_tensor * t, int64_t first, int64_t n) {
    std::vector<char> host(n*t->nb[1]);
    if (n) ggml_backend_tensor_get(t, host.data(), first*t->nb[1], host.size());
    put_all(io, host);
}

void edgekv_store::write(llama_io_write_i & io) const {
    put(io, STATE_MAGIC);
    put(io, (uint32_t) layers.size());
    put(io, n_past);
    put(io, boundary);
    for (const auto & l : layers) {
        put(io, (int32_t) (l ? l->n_head_kv : 0));
        if (!l) continue;
        put(io, (int32_t) l->type_k); put(io, (int32_t) l->type_v);
        put(io, (int32_t) l->d_k);    put(io, (int32_t) l->d_v);
        for (int k = 0; k < l->n_head_kv; ++k) {
            put(io, l->len[k]);
            put_all(io, l->pos[k]);
            write_rows(io, l->t.k, l->first[k], l->len[k]);
            write_rows(io, l->t.v, l->first[k], l->len[k]);
        }
    }
}

// positions as the rest of the code relies on: each token once, those behind the boundary last and in order; windows in order, alike in all heads
static bool plausible(const edgekv_layer & l, llama_pos n_past, llama_pos boundary) {
    std::vector<bool> seen(n_past);
    for (const auto & pos : l.pos) {
        if (l.n_swa && pos != l.pos[0]) return false;
        std::fill(seen.begin(), seen.end(), false);
        llama_pos last = -1; // of those that must be in order
        for (llama_pos p : pos) {
            if (p < 0 || p >= n_past || seen[p] || p < last) return false;
            seen[p] = true;
            if (l.n_swa || p >= boundary) last = p;
        }
    }
    return true;
}

static bool finite(ggml_type type, const char * rows, size_t nb, int64_t n, int d) {
    std::vector<float> x(d);
    for (int64_t i = 0; i < n; ++i) {
        edgekv_cpu_rows_to_f32(type, rows, nb, i, 1, d, x.data());
        if (!std::all_of(x.begin(), x.end(), [](float y) { return std::isfinite(y); })) return false;
    }
    return true;
}

bool edgekv_rows_finite(const ggml_tensor * t, int64_t first, int64_t n) {
    const size_t nb = t->nb[1];
    std::vector<char> here;
    for (const int64_t end = first + n; first < end; first += 256) {
        const int64_t n_here = std::min<int64_t>(end - first, 256);
        here.resize(n_here*nb);
        ggml_backend_tensor_get(t, here.data(), first*nb, here.size());
        if (!finite(t->type, here.data(), nb, n_here, (int) t->ne[0])) return false;
    }
    return true;
}

static std::unique_ptr<edgekv_layer> read_layer(llama_io_read_i & io, const edgekv_layer & like, llama_pos n_past) {
    if (get<int32_t>(io) != like.type_k || get<int32_t>(io) != like.type_v || get<int32_t>(io) != like.d_k || get<int32_t>(io) != like.d_v) {
        throw std::runtime_error("the state was saved with another model or cache type");
    }
    auto l = like.alike();
    std::vector<std::vector<char>> kv(2*l->n_head_kv);
    l->len.assign(l->n_head_kv, 0);
    std::vector<int32_t> cap(l->n_head_kv);
    const size_t nb[2] = { ggml_row_size(l->type_k, l->d_k), ggml_row_size(l->type_v, l->d_v) };
    for (int k = 0; k < l->n_head_kv; ++k) {
        cap[k] = get<int32_t>(io);
        if (cap[k] < 0 || cap[k] > n_past) throw std::runtime_error("the state is damaged");
        l->pos[k].resize(cap[k]);
        get_all(io, l->pos[k]);
        for (int i = 0; i < 2; ++i) {
            kv[2*k + i].resize(cap[k]*nb[i]);
            get_all(io, kv[2*k + i]);
            if (!finite(i ? l->type_v : l->type_k, kv[2*k + i].data(), nb[i], cap[k], i ? l->d_v : l->d_k)) {
                throw std::runtime_error("the state holds values that are no numbers");
            }
        }
    }
    const auto pos = l->pos;
    l->layout(cap);
    l->len = cap;
    l->pos = pos;
    for (int k = 0; k < l->n_head_kv; ++k) {
        if (cap[k] == 0) continue;
        ggml_backend_tensor_set(l->t.k, kv[2*k].data(),     l->first[k]*nb[0], kv[2*k].size());
        ggml_backend_tensor_set(l->t.v, kv[2*k + 1].data(), l->first[k]*nb[1], kv[2*k + 1].size());
    }
    return l;
}

void edgekv_store::read(llama_io_read_i & io, llama_pos n_ctx, llama_pos n_tokens) {
    if (get<uint32_t>(io) != STATE_MAGIC || get<uint32_t>(io) != layers.size()) throw std::runtime_error("the state is not of this model");
    const auto n_past_new   = get<llama_pos>(io);
    const auto boundary_new = get<llama_pos>(io);
    if (n_past_new < 0 || boundary_new < 0 || boundary_new > n_past_new) throw std::runtime_error("the state is damaged");
    if (n_tokens >= 0 && n_past_new != n_tokens) throw std::runtime_error("the state is damaged");
    if (n_past_new > n_ctx) throw std::runtime_error("the state holds more tokens than this context");
    std::vector<std::unique_ptr<edgekv_layer>> fresh(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        if (get<int32_t>(io) != (layers[i] ? layers[i]->n_head_kv : 0)) throw std::runtime_error("the state is not of this model");
        if (!layers[i]) continue;
        fresh[i] = read_layer(io, *layers[i], n_past_new);
        if (!plausible(*fresh[i], n_past_new, boundary_new)) throw std::runtime_error("the state is damaged");
    }
    for (auto & l : fresh) if (l) l->place_pos(n_past_new);
    settle();
    layers   = std::move(fresh);
    n_past   = n_past_new;
    boundary = boundary_new;
    ++version;
    note_peak();
}
