// Rows of the store: tails, rewinding, state
#include "edgekv-store.h"
#include "edgekv-error.h"
#include "edgekv-switches.h"
#include "edgekv-table.h"

#include "llama-impl.h"
#include "llama-io.h"

#include <algorithm>
#include <stdexcept>

static constexpr int32_t TAIL_STEP = 64; // rows per head that a full tail grows by

edgekv_store::edgekv_store()
    : graph_attend(edgekv_switches::graph_attend()), node_attend(edgekv_switches::node_attend()) {}
edgekv_store::~edgekv_store() {
    for (auto * reader : { active, paused })
        if (reader) reader->lose_context();
}

size_t edgekv_store::n_bytes() const {
    size_t n = archive ? archive->n_bytes_memory() : 0;
    for (const auto & l : layers) n += l->t.n_bytes() + l->recent.n_bytes() + l->row_pos.n_bytes();
    return n;
}

ggml_backend_dev_t edgekv_store::only_device(uint32_t n_layer) const {
    const auto is_there = [&](const auto & l) { return l->buft == layers[0]->buft; };
    const bool one = !layers.empty() && layers.size() == n_layer &&
        std::all_of(layers.begin(), layers.end(), is_there);
    if (!one || ggml_backend_buft_is_host(layers[0]->buft)) return nullptr;
    return ggml_backend_buft_get_device(layers[0]->buft);
}

void edgekv_store::note_peak(size_t n_bytes_extra) {
    n_bytes_peak = std::max(n_bytes_peak, n_bytes() + n_bytes_extra);
}

// drop the oldest rows of a sliding-window layer that no token from n_past on (less the slack) can
// see
static void drop_window(edgekv_layer & l, llama_pos n_past) {
    const int32_t n_keep = l.n_window();
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
    for (int k = 0; k < l.n_head_kv; ++k)
        l.pos[k].erase(l.pos[k].begin(), l.pos[k].end() - l.len[k]);
}

// the newest n rows of each head, of which those that wait are halves
static void archive_newest(edgekv_archive & archive, const edgekv_layer & l, int32_t n) {
    const int32_t n_waiting = std::min(n, l.n_recent), n_rounded = n - n_waiting;
    for (int k = 0; k < l.n_head_kv; ++k) {
        archive.put(
            l, k, archive.n_tokens, n_rounded, l.t, l.first[k] + l.n_rounded(k) - n_rounded, false);
        archive.put(l, k, archive.n_tokens + n_rounded, n_waiting, l.recent,
            (int64_t) k * l.cap_recent + l.n_recent - n_waiting, false);
    }
}

void edgekv_store::catch_up() {
    if (!archive || archive->n_tokens == n_past) return;
    try {
        if (!has_archive()) throw edgekv_error { EDGEKV_FAILED, "the archive ends too early" };
        settle();
        for (const auto & l : layers)
            if (l->selects()) archive_newest(*archive, *l, n_past - archive->n_tokens);
        archive->n_tokens = n_past;
    } catch (const std::exception & e) {
        lose_archive(e.what());
        throw;
    }
}

void edgekv_store::lose_archive(const char * why) noexcept {
    archive.reset();
    ++version; // graphs point to it
    try {
        lost_archive = why;
    } catch (const std::bad_alloc &) {}
}

bool edgekv_store::has_all_layers() const {
    return std::all_of(layers.begin(), layers.end(), [](const auto & l) { return l->n_swa == 0; });
}

void edgekv_store::reserve_tail(int32_t n) {
    const auto fits = [&](const auto & l) { return l->has_room(n); };
    // what waits may be about to be rounded. Without an archive the conversation goes on
    if (archive && !std::all_of(layers.begin(), layers.end(), fits)) {
        try {
            catch_up();
        } catch (const std::exception &) {}
    }
    for (auto & l : layers) {
        if (l->has_room(n)) continue;
        settle();
        ++version; // first: one of the steps may move the tensors and another fail
        if (l->waits()) {
            l->make_room(n);
            continue;
        }
        drop_window(*l, n_past);
        std::vector<int32_t> cap(l->n_head_kv);
        for (int k = 0; k < l->n_head_kv; ++k) cap[k] = l->len[k] + std::max(n, TAIL_STEP);
        l->layout(cap);
    }
    place_pos();
    note_peak();
}

int32_t edgekv_store::n_alike() const {
    int32_t n = TAIL_STEP;
    for (const auto & l : layers) {
        const int32_t room = l->room();
        if (room > 0) n = std::min(n, room);
    }
    return n;
}

static void keep_before(edgekv_layer & l, llama_pos p0) {
    std::vector<std::vector<int32_t>> keep(l.n_head_kv);
    std::vector<std::vector<llama_pos>> pos(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k)
        for (int32_t r = 0; r < l.n_rounded(k); ++r)
            if (l.pos[k][r] < p0) {
                keep[k].push_back(r);
                pos[k].push_back(l.pos[k][r]);
            }
    const auto from = std::move(l.t);
    edgekv_gather(from, std::vector<int64_t>(l.first.begin(), l.first.end()), keep, l);
    l.pos = std::move(pos);
    l.n_recent = l.cap_recent = 0; // newer than the boundary
    l.recent = {};
}

void edgekv_store::append(const llama_pos * pos, int32_t n) {
    for (auto & l : layers) {
        for (int k = 0; k < l->n_head_kv; ++k) {
            l->pos[k].insert(l->pos[k].end(), pos, pos + n);
            l->len[k] += n;
        }
        if (l->waits()) l->n_recent += n;
    }
    n_past = pos[n - 1] + 1;
}

void edgekv_store::place_pos() {
    for (auto & l : layers) l->place_pos(n_past);
}

bool edgekv_store::trim(llama_pos p0) {
    if (p0 >= n_past) return true;
    if (p0 <= 0) {
        clear();
        return true;
    }
    if (p0 < boundary) return go_back(p0);
    for (const auto & l : layers) { // a window that has moved on cannot come back
        if (l->n_swa == 0 || l->len_max() == 0) continue;
        const llama_pos oldest = l->pos[0].front();
        if (oldest > 0 && oldest > p0 - l->n_swa + 1) return false;
    }
    take_back(p0);
    return true;
}

void edgekv_store::take_back(llama_pos p0) noexcept {
    for (auto & l : layers) {
        // tokens since the boundary lie at the end, in order
        const int32_t n_before = l->len_max();
        for (int k = 0; k < l->n_head_kv; ++k) {
            auto & pos = l->pos[k];
            while (!pos.empty() && pos.back() >= p0) pos.pop_back();
            l->len[k] = (int32_t) pos.size();
        }
        l->n_recent = std::max(0, l->n_recent - (n_before - l->len_max()));
    }
    n_past = p0;
    if (archive) archive->cut(p0);
}

bool edgekv_store::go_back(llama_pos p0) {
    if (!can_go_back()) return false;
    settle();
    ++version;
    for (auto & l : layers) keep_before(*l, p0);
    archive->cut(p0);
    n_past = boundary = p0;
    archive->went_back = true;
    place_pos();
    return true;
}

void edgekv_store::clear() noexcept {
    for (auto & l : layers) {
        std::fill(l->len.begin(), l->len.end(), 0);
        for (auto & pos : l->pos) pos.clear();
        l->n_recent = l->cap_recent = 0;
        l->recent = {};
        l->row_pos = {};
    }
    n_past = boundary = 0;
    archive.reset();
    lost_archive.clear();
    n_bytes_peak = 0;
    ++version;
    try {
        settle();
        for (auto & l : layers) l->layout(std::vector<int32_t>(l->n_head_kv, 0));
        place_pos();
    } catch (const std::exception &) {} // the room of some layers stays, for the next tokens
}

void edgekv_store::round_all() {
    settle();
    for (auto & l : layers)
        if (l->n_recent) {
            l->round(0);
            ++version;
        }
}

void edgekv_store::shrink_to_fit() {
    for (auto & l : layers) {
        std::vector<int32_t> n(l->n_head_kv);
        for (int k = 0; k < l->n_head_kv; ++k) n[k] = l->n_rounded(k);
        if (n == l->cap) continue;
        l->layout(n);
        ++version;
    }
    place_pos();
}

// ---- state: header, then per layer the lengths, positions and rows of each head; those that wait
// stay halves, so that a conversation goes on as if it had not been saved

// "ekv1", and "ekv3" where keys are stored in a basis of their own; where rows wait to be rounded,
// "ekv4" and "ekv6"
static uint32_t magic_of(const edgekv_store & s, bool waits) {
    const bool has_basis = std::any_of(
        s.layers.begin(), s.layers.end(), [](const auto & l) { return (bool) l->basis; });
    return 0x00766b65 + ((uint32_t) ('1' + 2 * has_basis + 3 * waits) << 24);
}

template <typename T>
static void put(llama_io_write_i & io, const T & x) {
    io.write(&x, sizeof(x));
}
template <typename T>
static T get(llama_io_read_i & io) {
    T x;
    io.read(&x, sizeof(x));
    return x;
}

// a head without rows has no memory either, and memcpy takes no null pointer, not even for 0 bytes
template <typename T>
static void put_all(llama_io_write_i & io, const std::vector<T> & x) {
    if (!x.empty()) io.write(x.data(), x.size() * sizeof(T));
}
template <typename T>
static void get_all(llama_io_read_i & io, std::vector<T> & x) {
    if (!x.empty()) io.read(x.data(), x.size() * sizeof(T));
}

static void write_rows(llama_io_write_i & io, const ggml_tensor * t, int64_t first, int64_t n) {
    std::vector<char> host(n * t->nb[1]);
    edgekv_get_rows(t, first, n, host.data());
    put_all(io, host);
}

void edgekv_store::write(llama_io_write_i & io) const {
    settle();
    const bool waits =
        std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l->n_recent > 0; });
    put(io, magic_of(*this, waits));
    put(io, (uint32_t) layers.size());
    put(io, n_past);
    put(io, boundary);
    for (const auto & l : layers) {
        put(io, (int32_t) l->n_head_kv);
        put(io, (int32_t) l->type_k);
        put(io, (int32_t) l->type_v);
        put(io, (int32_t) l->d_k);
        put(io, (int32_t) l->d_v);
        if (waits) put(io, l->n_recent);
        const auto rounded = l->t.own();
        const auto recent = l->n_recent ? l->recent.own() : std::vector<ggml_tensor *>();
        for (int k = 0; k < l->n_head_kv; ++k) {
            put(io, l->len[k]);
            put_all(io, l->pos[k]);
            for (const auto * t : rounded) write_rows(io, t, l->first[k], l->n_rounded(k));
            for (const auto * t : recent)
                write_rows(io, t, (int64_t) k * l->cap_recent, l->n_recent);
        }
    }
}

// positions as the rest of the code relies on: each token once, those behind the boundary last and
// in order; windows in order, alike in all heads
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

// rows of one head and part, not yet in their tensor
static std::vector<char> read_rows(llama_io_read_i & io, ggml_type type, int d, int32_t n) {
    const size_t nb = ggml_row_size(type, d);
    std::vector<char> rows(n * nb);
    get_all(io, rows);
    if (!edgekv_bytes_finite(type, rows.data(), nb, n, d))
        throw std::runtime_error("the state holds values that are no numbers");
    return rows;
}

static void set_rows(ggml_tensor * t, int64_t first, const std::vector<char> & rows) {
    if (!rows.empty()) ggml_backend_tensor_set(t, rows.data(), first * t->nb[1], rows.size());
}

static std::unique_ptr<edgekv_layer> read_layer(
    llama_io_read_i & io, const edgekv_layer & like, llama_pos n_past, bool waits) {
    if (get<int32_t>(io) != like.type_k || get<int32_t>(io) != like.type_v ||
        get<int32_t>(io) != like.d_k || get<int32_t>(io) != like.d_v) {
        throw std::runtime_error("the state was saved with another model or cache type");
    }
    auto l = like.alike();
    const int32_t n_recent = waits ? get<int32_t>(io) : 0;
    const std::pair<ggml_type, int> parts[] = { { l->type_k, l->d_k }, { l->type_v, l->d_v } };
    const int n_parts = l->v_in_k ? 1 : 2;
    std::vector<std::vector<char>> kv(n_parts * l->n_head_kv), recent(kv.size());
    std::vector<int32_t> n_rows(l->n_head_kv), n_rounded(l->n_head_kv);
    for (int k = 0; k < l->n_head_kv; ++k) {
        n_rows[k] = get<int32_t>(io);
        if (n_rows[k] < 0 || n_rows[k] > n_past || n_recent < 0 || n_recent > n_rows[k])
            throw std::runtime_error("the state is damaged");
        n_rounded[k] = n_rows[k] - n_recent;
        l->pos[k].resize(n_rows[k]);
        get_all(io, l->pos[k]);
        for (int i = 0; i < n_parts; ++i)
            kv[n_parts * k + i] = read_rows(io, parts[i].first, parts[i].second, n_rounded[k]);
        for (int i = 0; i < n_parts; ++i)
            recent[n_parts * k + i] = read_rows(io, GGML_TYPE_F16, parts[i].second, n_recent);
    }
    const auto pos = l->pos;
    l->len.assign(l->n_head_kv, 0);
    l->layout(n_rounded);
    if (n_recent) l->make_room(n_recent);
    l->len = n_rows;
    l->pos = pos;
    l->n_recent = n_recent;
    for (int k = 0; k < l->n_head_kv; ++k)
        for (int i = 0; i < n_parts; ++i) {
            set_rows(l->t.own()[i], l->first[k], kv[n_parts * k + i]);
            if (n_recent)
                set_rows(l->recent.own()[i], (int64_t) k * l->cap_recent, recent[n_parts * k + i]);
        }
    if (!l->waits()) l->round(0); // a cache on a device has no such rows
    return l;
}

void edgekv_store::read(llama_io_read_i & io, llama_pos n_ctx, llama_pos n_tokens) {
    const auto magic = get<uint32_t>(io);
    const bool waits = magic == magic_of(*this, true);
    if ((!waits && magic != magic_of(*this, false)) || get<uint32_t>(io) != layers.size())
        throw std::runtime_error(
            "the state is of another model, or its keys were stored otherwise");
    const auto n_past_new = get<llama_pos>(io);
    const auto boundary_new = get<llama_pos>(io);
    if (n_past_new < 0 || boundary_new < 0 || boundary_new > n_past_new)
        throw std::runtime_error("the state is damaged");
    if (n_tokens >= 0 && n_past_new != n_tokens) throw std::runtime_error("the state is damaged");
    if (n_past_new > n_ctx)
        throw std::runtime_error("the state holds more tokens than this context");
    std::vector<std::unique_ptr<edgekv_layer>> fresh(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        if (get<int32_t>(io) != layers[i]->n_head_kv)
            throw std::runtime_error("the state is not of this model");
        fresh[i] = read_layer(io, *layers[i], n_past_new, waits);
        if (!plausible(*fresh[i], n_past_new, boundary_new))
            throw std::runtime_error("the state is damaged");
    }
    for (auto & l : fresh) l->place_pos(n_past_new);
    settle();
    layers = std::move(fresh);
    n_past = n_past_new;
    boundary = boundary_new;
    lose_archive("it was saved without one"); // which was of other tokens
    ++version;
    note_peak();
}
