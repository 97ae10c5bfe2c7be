// The store without a model: long random sequences of what an engine does to it, compared with
// plain vectors after every step.
//     test-store [seed] [number of steps]
#include "check.h"
#include "edgekv-error.h"
#include "edgekv-store.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "llama-io.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

// ---- memory that is watched: the largest request so far

static size_t g_largest = 0;

void * operator new(size_t n) {
    g_largest = std::max(g_largest, n);
    if (void * p = n > (size_t) 1 << 30 ? nullptr : malloc(std::max<size_t>(n, 1))) return p;
    throw std::bad_alloc();
}
// a stable sort asks for its buffer so
void * operator new(size_t n, const std::nothrow_t &) noexcept { return malloc(n); }
void operator delete(void * p) noexcept { free(p); }
void operator delete(void * p, size_t) noexcept { free(p); }

namespace {

// the CPU's buffers, counted; the n-th allocation from now can be made to fail
struct watched_buffers {
    ggml_backend_buffer_type type;
    int64_t n_live = 0, n_bytes = 0;
    int fail_in = -1;

    watched_buffers(bool host) : type(*ggml_backend_cpu_buffer_type()) {
        type.context = this;
        type.iface.alloc_buffer = alloc;
        if (!host) type.iface.is_host = [](ggml_backend_buffer_type_t) { return false; };
    }

    static ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t buft, size_t size) {
        auto & self = *(watched_buffers *) buft->context;
        g_largest = std::max(g_largest, size);
        if (self.fail_in >= 0 && self.fail_in-- == 0) return nullptr;
        ggml_backend_buffer_t b = ggml_backend_cpu_buffer_type()->iface.alloc_buffer(buft, size);
        if (!b) return nullptr;
        b->buft = buft;
        b->iface.free_buffer = release;
        memset(ggml_backend_buffer_get_base(b), 0xA5, size); // nothing may rely on fresh memory
        ++self.n_live;
        self.n_bytes += size;
        return b;
    }

    static void release(ggml_backend_buffer_t b) {
        auto & self = *(watched_buffers *) b->buft->context;
        --self.n_live;
        self.n_bytes -= b->size;
        static const auto free_buffer = [] {
            ggml_backend_buffer_t x =
                ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 64);
            const auto f = x->iface.free_buffer;
            ggml_backend_buffer_free(x);
            return f;
        }();
        free_buffer(b);
    }
};

struct bytes_out : llama_io_write_i {
    std::vector<char> data;
    void write(const void * src, size_t n) override {
        data.insert(data.end(), (const char *) src, (const char *) src + n);
    }
    void write_tensor(ggml_tensor * t, size_t offset, size_t n) override {
        std::vector<char> x(n);
        ggml_backend_tensor_get(t, x.data(), offset, n);
        write(x.data(), n);
    }
    size_t n_bytes() override { return data.size(); }
};

struct bytes_in : llama_io_read_i {
    const std::vector<char> & data;
    size_t at = 0;
    explicit bytes_in(const std::vector<char> & d) : data(d) {}
    void read(void * dst, size_t n) override {
        if (n > data.size() - at) throw std::runtime_error("the end of the data");
        if (n) memcpy(dst, data.data() + at, n);
        at += n;
    }
    void read_tensor(ggml_tensor * t, size_t offset, size_t n) override {
        std::vector<char> x(n);
        read(x.data(), n);
        ggml_backend_tensor_set(t, x.data(), offset, n);
    }
    size_t n_bytes() override { return at; }
};

// ---- the same, in plain vectors

struct plain_row {
    llama_pos pos;
    std::string k, v;
    bool operator==(const plain_row & o) const { return pos == o.pos && k == o.k && v == o.v; }
};
using plain_head = std::vector<plain_row>;

struct plain_store {
    // a sliding-window layer forgets nothing here: the store's rows are a suffix
    std::vector<std::vector<plain_head>> layers;
    llama_pos n_past = 0, boundary = 0;
};

constexpr ggml_type TYPES[] = { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };
constexpr int N_CTX = 3000, MAX_APPEND = 150, SLACK = 64, GROWTH = 64;

struct walk {
    random_source rnd;
    watched_buffers buffers;
    edgekv_store store;
    plain_store plain;
    std::vector<char> saved;
    plain_store saved_plain;
    int step = 0;

    walk(uint32_t seed, bool host) : rnd(seed), buffers(host) {
        const int n_layer = rnd.range(1, 4);
        for (int il = 0; il < n_layer; ++il) {
            auto l = std::make_unique<edgekv_layer>();
            l->il = il;
            l->n_head_kv = rnd.range(1, 4);
            l->n_head = l->n_head_kv * rnd.range(1, 4);
            l->d_k = 32 * rnd.range(1, 3);
            l->d_v = 32 * rnd.range(1, 3);
            l->type_k = rnd.one_of(TYPES);
            l->type_v = rnd.one_of(TYPES);
            l->v_in_k = rnd.below(4) == 0;
            if (l->v_in_k) {
                l->d_v = 32 * rnd.range(1, l->d_k / 32);
                l->type_v = l->type_k;
            }
            l->n_swa = rnd.below(3) == 0 ? rnd.range(1, 100) : 0;
            l->chunked = l->n_swa && rnd.below(3) == 0; // keeps as much as a window that slides
            l->buft = &buffers.type;
            l->row_step = 1 << rnd.below(4);
            l->len.assign(l->n_head_kv, 0);
            l->pos.resize(l->n_head_kv);
            l->layout(std::vector<int32_t>(l->n_head_kv, 0));
            plain.layers.emplace_back(l->n_head_kv);
            store.layers.push_back(std::move(l));
        }
    }

    // what set_layer of edgekv-attend.cpp and ggml_set_rows do
    void append() {
        const int n = std::min(
            rnd.below(4) ? rnd.range(1, 4) : rnd.range(1, MAX_APPEND), N_CTX - store.n_past);
        if (n <= 0) return;
        store.reserve_tail(n);
        for (auto & l : store.layers)
            for (int k = 0; k < l->n_head_kv; ++k) {
                check(l->len[k] + n <= l->cap[k], "step %d: no room for %d rows", step, n);
                for (int t = 0; t < n; ++t) {
                    plain_row row { store.n_past + t, noise(l->t.k->nb[1]), noise(l->t.v->nb[1]) };
                    if (l->v_in_k) row.v = row.k; // its rows have K's bytes behind their own
                    const int64_t r = l->first[k] + l->len[k] + t;
                    for (ggml_tensor * x : l->t.own()) {
                        const auto & bytes = x == l->t.k ? row.k : row.v;
                        ggml_backend_tensor_set(x, bytes.data(), r * x->nb[1], bytes.size());
                    }
                    l->pos[k].push_back(row.pos);
                    plain.layers[l->il][k].push_back(std::move(row));
                }
                l->len[k] += n;
            }
        plain.n_past = store.n_past += n;
    }

    std::string noise(size_t n) {
        std::string s(n, 0);
        // halves, and scales of blocks, that are numbers
        for (size_t i = 0; i < n; ++i) s[i] = (char) (rnd.g() & (i % 2 ? 0xbf : 0xff));
        return s;
    }

    edgekv_layer * full_layer() {
        auto & l = store.layers[rnd.below((int) store.layers.size())];
        return l->n_swa ? nullptr : l.get();
    }

    void selected() {
        store.boundary = plain.boundary = store.n_past;
        ++store.version;
    }

    // a step that fails when some layers, and some heads of one of them, have its rows
    void fail_step() {
        const llama_pos before = store.n_past;
        store.reserve_tail(2);
        int left = rnd.range(0, (int) store.layers.size() * 4);
        for (auto & l : store.layers)
            for (int k = 0; k < l->n_head_kv && left > 0; ++k, --left) {
                l->pos[k].push_back(before);
                if (left == 1) break; // its length is not written down
                l->len[k]++;
            }
        if (left > 1) store.n_past = before + 1;
        store.take_back(before);
    }

    // a subset of the rows in any order
    void evict() {
        edgekv_layer * l = full_layer();
        if (!l) return;
        std::vector<std::vector<int32_t>> keep(l->n_head_kv);
        std::vector<std::vector<llama_pos>> pos(l->n_head_kv);
        std::vector<plain_head> kept(l->n_head_kv);
        for (int k = 0; k < l->n_head_kv; ++k) {
            keep[k].resize(l->len[k]);
            std::iota(keep[k].begin(), keep[k].end(), 0);
            if (rnd.below(2)) std::shuffle(keep[k].begin(), keep[k].end(), rnd.g);
            keep[k].resize(rnd.below(l->len[k] + 1));
            for (int32_t r : keep[k]) {
                pos[k].push_back(l->pos[k][r]);
                kept[k].push_back(plain.layers[l->il][k][r]);
            }
        }
        edgekv_gather(l->t, std::vector<int64_t>(l->first.begin(), l->first.end()), keep, *l);
        l->pos = pos;
        plain.layers[l->il] = kept;
        selected();
    }

    // first rows of each head only
    void shrink() {
        edgekv_layer * l = full_layer();
        if (!l) return;
        std::vector<int32_t> cap = l->len;
        for (int32_t & c : cap) c = rnd.below(c + 1);
        l->layout(cap);
        for (int k = 0; k < l->n_head_kv; ++k) plain.layers[l->il][k].resize(cap[k]);
        selected();
    }

    void trim() {
        const llama_pos p0 =
            rnd.below(3) ? store.n_past - rnd.below(70) : rnd.range(-1, store.n_past + 3);
        bool exact = p0 >= store.boundary || p0 <= 0;
        for (auto & l : store.layers)
            if (exact && l->n_swa && p0 > 0 && l->len[0])
                exact = l->pos[0].front() <= std::max(0, p0 - l->n_swa + 1);
        exact = exact || p0 >= store.n_past;
        check(store.trim(p0) == exact, "step %d: trim to %d of %d (boundary %d) should %s", step,
            p0, plain.n_past, plain.boundary, exact ? "work" : "be refused");
        if (!exact || p0 >= plain.n_past) return;
        for (auto & heads : plain.layers)
            for (auto & rows : heads) {
                rows.erase(std::remove_if(rows.begin(), rows.end(),
                               [&](const plain_row & r) { return r.pos >= p0; }),
                    rows.end());
            }
        plain.n_past = std::max(p0, 0);
        if (p0 <= 0) plain.boundary = 0;
    }

    void clear() {
        store.clear();
        for (auto & heads : plain.layers)
            for (auto & rows : heads) rows.clear();
        plain.n_past = plain.boundary = 0;
    }

    void save() {
        bytes_out out;
        store.write(out);
        saved = out.data;
        saved_plain = plain;
        // what a window has left behind is gone for good
        for (size_t il = 0; il < store.layers.size(); ++il)
            for (int k = 0; k < store.layers[il]->n_head_kv; ++k) {
                auto & rows = saved_plain.layers[il][k];
                rows.erase(rows.begin(), rows.end() - store.layers[il]->len[k]);
            }
    }

    void load() {
        if (saved.empty()) return;
        bytes_in in(saved);
        store.read(in, N_CTX);
        check(in.at == saved.size(), "step %d: %zu of %zu bytes were read", step, in.at,
            saved.size());
        plain = saved_plain;
    }

    // a state that is cut or changed is refused, or says the same; a refusal changes nothing
    void load_damaged() {
        if (saved.empty()) return;
        auto bad = saved;
        const bool cut = rnd.below(2);
        if (cut) bad.resize(rnd.below((int) bad.size()));
        else
            for (int i = rnd.range(1, 3); i > 0; --i) damage(bad);
        g_largest = 0;
        bytes_in in(bad);
        const uint64_t version = store.version;
        try {
            store.read(in, N_CTX);
            check(!cut, "step %d: %zu of %zu bytes were taken for a state", step, bad.size(),
                saved.size());
            check_sane();
            // it may differ in rows' bytes and in some positions: nothing can tell
            bytes_in good(saved);
            store.read(good, N_CTX);
            plain = saved_plain;
        } catch (const std::exception &) {
            check(store.version == version, "step %d: a refused state moved the tensors", step);
        }
        check(g_largest < 16u << 20,
            "step %d: a damaged state of %zu bytes made the store ask for %zu", step, bad.size(),
            g_largest);
    }

    void damage(std::vector<char> & x) {
        const int32_t values[] = { -1, 0, 1, N_CTX, N_CTX + 1, INT32_MAX, INT32_MIN,
            (int32_t) rnd.g() };
        size_t at = rnd.below(2) ? rnd.below((int) std::min<size_t>(x.size() / 4, 16))
                                 : rnd.below((int) x.size() / 4);
        const int32_t v = rnd.one_of(values);
        memcpy(&x[4 * at], &v, 4);
    }

    // no allocation may leave a half-changed store behind
    void fail_allocation() {
        buffers.fail_in = rnd.below(3);
        try {
            switch (rnd.below(5)) {
                case 0: append(); break;
                case 1: evict(); break;
                case 2: load(); break;
                case 3: clear(); break;
                default: store.shrink_to_fit();
            }
        } catch (const std::bad_alloc &) {}
        buffers.fail_in = -1;
    }

    // whatever it holds, it holds together
    void check_sane() {
        int64_t n_bytes = 0;
        for (auto & l : store.layers) {
            if (!check(
                    l->t.k && l->t.v && l->t.buf, "step %d: layer %d has no tensors", step, l->il))
                continue;
            n_bytes += ggml_backend_buffer_get_size(l->t.buf.get());
            int64_t next = 0;
            for (int k = 0; k < l->n_head_kv; ++k) {
                while (next % l->row_step) ++next;
                check(l->first[k] == next && l->len[k] >= 0 && l->len[k] <= l->cap[k] &&
                        (int) l->pos[k].size() == l->len[k],
                    "step %d: layer %d head %d: first %d len %d cap %d pos %zu", step, l->il, k,
                    l->first[k], l->len[k], l->cap[k], l->pos[k].size());
                next += l->cap[k];
                auto pos = l->pos[k];
                if (l->n_swa)
                    check(std::is_sorted(pos.begin(), pos.end()) && pos == l->pos[0],
                        "step %d: layer %d: a window's rows are out of order", step, l->il);
                std::sort(pos.begin(), pos.end());
                check(std::adjacent_find(pos.begin(), pos.end()) == pos.end() &&
                        (pos.empty() || (pos.front() >= 0 && pos.back() < store.n_past)),
                    "step %d: layer %d head %d: positions are wrong", step, l->il, k);
                if (l->n_swa)
                    check(l->cap[k] <= l->n_swa + SLACK + std::max(GROWTH, MAX_APPEND),
                        "step %d: a window of %d holds %d rows", step, l->n_swa, l->cap[k]);
            }
            check(l->t.k->ne[1] == std::max<int64_t>(next, 1) && l->t.v->ne[1] == l->t.k->ne[1],
                "step %d: layer %d: %lld rows for %lld", step, l->il, (long long) l->t.k->ne[1],
                (long long) next);
        }
        check((int64_t) store.n_bytes() == n_bytes && n_bytes == buffers.n_bytes &&
                buffers.n_live == (int64_t) store.layers.size(),
            "step %d: reported %zu bytes, buffers have %lld, %lld in %lld live ones", step,
            store.n_bytes(), (long long) n_bytes, (long long) buffers.n_bytes,
            (long long) buffers.n_live);
        store.note_peak();
        check(store.n_bytes_peak >= store.n_bytes(), "step %d: the peak is below what is there",
            step);
        check(store.boundary >= 0 && store.boundary <= store.n_past && store.n_past <= N_CTX,
            "step %d: boundary %d of %d", step, store.boundary, store.n_past);
    }

    void check_same() {
        check_sane();
        check(store.n_past == plain.n_past && store.boundary == plain.boundary,
            "step %d: %d tokens, boundary %d instead of %d, %d", step, store.n_past, store.boundary,
            plain.n_past, plain.boundary);
        for (auto & l : store.layers)
            for (int k = 0; l->t.k && k < l->n_head_kv; ++k) check_head(*l, k);
    }

    void check_head(const edgekv_layer & l, int k) {
        const auto & rows = plain.layers[l.il][k];
        const int n = l.len[k], n_plain = (int) rows.size();
        const bool whole = l.n_swa ? n <= n_plain &&
                (n == n_plain || l.pos[k].front() <= std::max(0, store.n_past - l.n_swa + 1))
                                   : n == n_plain;
        if (!check(whole, "step %d: layer %d head %d has %d of %d rows", step, l.il, k, n, n_plain))
            return;
        std::string bytes_k((size_t) n * l.t.k->nb[1], 0), bytes_v((size_t) n * l.t.v->nb[1], 0);
        edgekv_get_rows(l.t.k, l.first[k], n, &bytes_k[0]);
        edgekv_get_rows(l.t.v, l.first[k], n, &bytes_v[0]);
        bool same = true;
        for (int r = 0; r < n && same; ++r) {
            const auto & row = rows[n_plain - n + r];
            same = row.pos == l.pos[k][r] &&
                !bytes_k.compare(r * row.k.size(), row.k.size(), row.k) &&
                !bytes_v.compare(r * row.v.size(), row.v.size(), row.v);
        }
        check(same, "step %d: layer %d head %d: rows differ", step, l.il, k);
    }

    std::vector<void *> places() const {
        std::vector<void *> x;
        for (const auto & l : store.layers) x.push_back(l->t.k ? l->t.k->data : nullptr);
        return x;
    }

    void act() {
        const int what = rnd.below(100);
        if (store.n_past > 900 && what < 30) clear();
        else if (what < 50) append();
        else if (what < 60) trim();
        else if (what < 68) evict();
        else if (what < 74) shrink();
        else if (what < 80) store.shrink_to_fit();
        else if (what < 85) save();
        else if (what < 88) load();
        else if (what < 94) load_damaged();
        else if (what < 97) fail_allocation();
        else if (what < 99) fail_step();
        else clear();
    }

    void run(int n_steps) {
        for (step = 0; step < n_steps && g_failed < 20; ++step) {
            const auto before = places();
            const uint64_t version = store.version;
            act();
            check(before == places() || store.version != version,
                "step %d: tensors moved and the version did not change", step);
            check_same();
        }
        store.shrink_to_fit();
        for (auto & l : store.layers) check(l->len == l->cap, "room is left after shrink_to_fit");
        check_same();
        store.layers.clear();
        check(buffers.n_live == 0 && buffers.n_bytes == 0, "%lld buffers are left",
            (long long) buffers.n_live);
    }
};

// values that are no numbers would reach every later token
void test_no_number() {
    walk w(9, true);
    w.append();
    w.save();
    for (auto & l : w.store.layers) {
        const std::vector<char> nan(l->t.k->nb[1], (char) 0xff);
        ggml_backend_tensor_set(l->t.k, nan.data(), l->first[0] * l->t.k->nb[1], nan.size());
        check(!edgekv_rows_finite(l->t.k, l->first[0], l->len[0]),
            "a row that is no number was taken for one");
    }
    bytes_out out;
    w.store.write(out);
    bytes_in in(out.data);
    bool refused = false;
    try {
        w.store.read(in, N_CTX);
    } catch (const std::exception &) { refused = true; }
    check(refused == (out.data != w.saved), "a state of %s",
        refused ? "numbers was refused" : "no numbers was taken");
}

// every prefix of a small state, and every 4 bytes of it replaced by the values that hurt most
void test_every_byte() {
    walk w(7, true);
    for (int i = 0; i < 3; ++i) {
        w.append();
        w.evict();
    }
    w.append();
    w.save();
    const size_t n = w.saved.size();
    for (size_t i = 0; i < n; i += 1 + n / 4000) {
        auto cut = w.saved;
        cut.resize(i);
        bytes_in in(cut);
        bool refused = false;
        try {
            w.store.read(in, N_CTX);
        } catch (const std::exception &) { refused = true; }
        check(refused, "%zu of %zu bytes were taken for a state", i, n);
    }
    w.check_same();
    for (size_t i = 0; i + 4 <= n; i += i < 400 ? 4 : 4 * (1 + n / 8000))
        for (int32_t v : { -1, INT32_MAX, N_CTX + 1 })
            for (bool many : { false, true }) {
                auto bad = w.saved;
                memcpy(&bad[i], &v, 4);
                if (many && i != 8) memcpy(&bad[8], &v, 4); // the number of tokens as well
                g_largest = 0;
                bytes_in in(bad);
                try {
                    w.store.read(in, N_CTX);
                    w.check_sane();
                } catch (const std::exception &) {}
                check(g_largest < 16u << 20,
                    "a damaged state of %zu bytes made the store ask for %zu", n, g_largest);
            }
    bytes_in other(w.saved);
    walk stranger(8, true);
    bool refused = false;
    try {
        stranger.store.read(other, N_CTX);
    } catch (const std::exception &) { refused = true; }
    check(refused, "the state of another shape was taken");
    stranger.check_same();
}

// rows that wait to be rounded come back as they were, and a damaged state of them is harmless
void test_halves() {
    for (uint32_t seed = 20; seed < 30; ++seed) {
        walk w(seed, true);
        for (auto & l : w.store.layers) l->rounds_late = !l->v_in_k;
        const int n = 70;
        w.store.reserve_tail(n);
        std::vector<llama_pos> pos(n);
        std::iota(pos.begin(), pos.end(), 0);
        w.store.append(pos.data(), n);
        for (auto & l : w.store.layers)
            for (int k = 0; k < l->n_head_kv; ++k)
                for (ggml_tensor * t : (l->n_recent ? l->recent : l->t).own()) {
                    const auto rows = w.noise(n * t->nb[1]);
                    const int64_t first = l->n_recent ? (int64_t) k * l->cap_recent : l->first[k];
                    ggml_backend_tensor_set(t, rows.data(), first * t->nb[1], rows.size());
                }
        bytes_out before, after;
        w.store.write(before);
        bytes_in in(before.data);
        w.store.read(in, N_CTX);
        w.store.write(after);
        check(before.data == after.data, "seed %u: a state changed on its way", seed);
        for (int i = 0; i < 2000; ++i) {
            auto bad = before.data;
            if (i % 2) bad.resize(w.rnd.below((int) bad.size()));
            else w.damage(bad);
            g_largest = 0;
            bytes_in damaged(bad);
            try {
                w.store.read(damaged, N_CTX);
                check(i % 2 == 0, "seed %u: a part of a state was taken for one", seed);
            } catch (const std::exception &) {}
            check(g_largest < 16u << 20, "seed %u: a damaged state asked for %zu bytes", seed,
                g_largest);
        }
    }
}

int g_n_waits = 0;

// tensors that a graph may still be at work on are waited for before they move
void test_waits() {
    ggml_backend_t backend = ggml_backend_cpu_init();
    backend->iface.synchronize = [](ggml_backend_t) { ++g_n_waits; };
    ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type();
    ggml_backend_sched_t sched = ggml_backend_sched_new(&backend, &buft, 1, 16, false, false);
    {
        walk w(5, true);
        auto waits = [&](auto && step) {
            g_n_waits = 0;
            step();
            return g_n_waits;
        };
        check(waits([&] {
            w.append();
            w.store.reserve_tail(500);
        }) == 0,
            "a store without graphs waited");
        w.store.sched = sched;
        check(waits([&] { w.store.reserve_tail(500); }) == 0, "a tail that has room waited");
        check(waits([&] { w.store.reserve_tail(600); }) > 0, "a tail grew and did not wait");
        w.save();
        check(waits([&] {
            bytes_in in(w.saved);
            w.store.read(in, N_CTX);
        }) > 0,
            "rows were replaced and nobody waited");
        check(waits([&] { w.store.clear(); }) > 0, "rows were forgotten and nobody waited");
    }
    ggml_backend_sched_free(sched);
    ggml_backend_free(backend);
}

} // namespace

// two archives have their first tokens in one file, and neither writes over what the other has
void test_branches(
    edgekv_archive & archive, const std::vector<std::unique_ptr<edgekv_layer>> & layers) {
    const int n = archive.n_tokens, n_common = n / 2;
    const auto pieces = [](const edgekv_archive & a) {
        std::vector<std::vector<char>> all;
        for (size_t i = 0; a.piece_bytes(i) >= 0; ++i) {
            all.emplace_back(a.piece_bytes(i));
            a.get_piece(i, all.back().data());
        }
        return all;
    };
    const auto write = [&](edgekv_archive & a, int begin, int n_new) {
        for (const auto & l : layers) {
            if (!l->selects()) continue;
            auto t = edgekv_tensors::make(l->buft, *l, n_new, "more");
            for (ggml_tensor * x : t.own()) memset(x->data, 0, ggml_nbytes(x));
            for (int k = 0; k < l->n_head_kv; ++k) a.put(*l, k, begin, n_new, t, 0, true);
        }
        a.n_tokens = begin + n_new;
    };
    const auto before = pieces(archive);
    edgekv_archive branch(archive);
    check(pieces(branch) == before, "archive: a branch has other rows");
    write(archive, n, 7); // behind what both have
    check(pieces(branch) == before, "archive: the trunk wrote into a branch");
    branch.cut(n_common);
    write(branch, n_common, 3);
    archive.cut(n);
    check(pieces(archive) == before, "archive: a branch wrote into the trunk");
    const auto short_ones = pieces(branch);
    bool same = short_ones.size() == before.size();
    for (size_t i = 0; i < before.size() && same; ++i) {
        const size_t n_bytes = before[i].size() / n * n_common;
        same = !memcmp(short_ones[i].data(), before[i].data(), n_bytes) &&
            std::all_of(short_ones[i].begin() + n_bytes, short_ones[i].end(),
                [](char x) { return x == 0; });
    }
    check(same, "archive: a branch lost what it had in common");
    std::vector<char> bad(archive.piece_bytes(0), (char) 0xff);
    try {
        archive.put_piece(0, bad.data());
        check(false, "archive: rows that are no numbers");
    } catch (const edgekv_error &) { ++g_passed; }
    check(pieces(archive) == before, "archive: rows that are no numbers were written");
}

// rows come out of the archive as they went in, in any order of pieces and heads
void test_archive() {
    random_source rnd(5);
    std::vector<std::unique_ptr<edgekv_layer>> layers;
    for (int il = 0; il < 3; ++il) {
        auto l = std::make_unique<edgekv_layer>();
        l->il = il;
        l->n_head = l->n_head_kv = 1 + il;
        l->d_k = 32 * (1 + il);
        l->d_v = 64;
        l->n_swa = il == 1 ? 10 : 0; // windows have no archive
        l->type_k = l->type_v = il == 2 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        l->buft = ggml_backend_cpu_buffer_type();
        layers.push_back(std::move(l));
    }
    constexpr int N = 200;
    edgekv_archive archive(layers, N, "", 0.1f, 128);
    for (const int il : { 0, 2 }) {
        const auto & l = *layers[il];
        auto t = edgekv_tensors::make(l.buft, l, N * l.n_head_kv, "all");
        auto other = edgekv_tensors::make(l.buft, l, N, "one");
        for (ggml_tensor * x : t.own())
            for (int64_t r = 0; r < x->ne[1]; ++r) {
                std::vector<float> row(x->ne[0]);
                for (float & y : row) y = rnd.normal() + 3;
                ggml_quantize_chunk(
                    x->type, row.data(), (char *) x->data + r * x->nb[1], 0, 1, x->ne[0], nullptr);
            }
        for (int begin = 0, n; begin < N; begin += n) {
            n = std::min(rnd.range(1, 90), N - begin);
            for (int k = l.n_head_kv - 1; k >= 0; --k)
                archive.put(l, k, begin, n, t, k * N + begin, true);
        }
        for (int k = 0; k < l.n_head_kv; ++k) {
            const int begin = rnd.below(N), n = rnd.below(N - begin + 1);
            archive.get(l, k, begin, n, other, 0);
            for (size_t i = 0; i < t.own().size(); ++i) {
                const ggml_tensor *a = t.own()[i], *b = other.own()[i];
                check(!memcmp((const char *) a->data + (k * N + begin) * a->nb[1], b->data,
                          n * a->nb[1]),
                    "archive: layer %d, head %d: other rows came back", il, k);
            }
            const auto a = archive.recalled(l, k);
            check(!memcmp(a.k, (const char *) t.k->data + k * N * t.k->nb[1], N * a.nb_k) &&
                    !memcmp(a.v, (const char *) t.v->data + k * N * t.v->nb[1], N * a.nb_v),
                "archive: layer %d, head %d: other rows are in the file", il, k);
            check(a.n == 0 && a.n_most == 0,
                "archive: before a prompt's end there is nothing to recall");
        }
    }
    archive.n_tokens = N;
    auto & l = *layers[2];
    l.pos = { { 1, 5 }, {}, { 199 } };
    archive.set_resident(l, N);
    const auto resident = [&](int head, int r) {
        return archive.recalled(l, head).resident[r / 32] >> r % 32 & 1;
    };
    check(archive.recalled(l, 0).n == N && archive.recalled(l, 0).n_most == 80,
        "archive: four times a tenth of %d is %d", N, archive.recalled(l, 0).n_most);
    check(resident(0, 5) && !resident(0, 6) && resident(2, 199),
        "archive: other rows are in the store");
    check(archive.group(l, 2), "archive: labels cannot be written");
    const auto grouped = archive.recalled(l, 2);
    std::vector<int32_t> size(grouped.n_groups);
    for (int r = 0; r < N; ++r)
        if (!resident(2, r) && grouped.label[r] < grouped.n_groups) ++size[grouped.label[r]];
    check(grouped.n_groups == 1 && size[0] == N - 1 && grouped.members[0] == N - 1,
        "archive: the file has other labels");
    l.pos[2] = { 3, 100, 199 };
    archive.set_resident(l, N);
    check(archive.group(l, 2) && archive.recalled(l, 2).members[0] == N - 3,
        "archive: a group has rows that are in the store");
    archive.cut(100);
    check(archive.n_tokens == 100 && archive.recalled(l, 1).n == 100, "archive: it was not cut");
    test_branches(archive, layers);
    try {
        edgekv_archive(layers, N, "/no such folder", 0, 128);
        check(false, "archive: a folder that is not there");
    } catch (const std::runtime_error &) { ++g_passed; }
}

// how far queries' logits are from what the index says, of their variance: the mean over queries
double lost(const edgekv_index & index, const std::vector<float> & keys, int n, int d) {
    random_source rnd(8);
    edgekv_recalled a = {};
    index.fill(a, 0.5f);
    double error = 0, size = 0;
    for (int i = 0; i < 20; ++i) {
        std::vector<float> q(d), step(1);
        for (float & x : q) x = rnd.normal();
        const int n_padded = (n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * EDGEKV_BLOCK;
        std::vector<uint16_t> said(n_padded);
        edgekv_cpu_codes_score(
            &a.book, a.codes, n_padded, q.data(), d, 1, said.data(), step.data());
        std::vector<double> x(n), e(n);
        for (int r = 0; r < n; ++r) {
            for (int j = 0; j < d; ++j) x[r] += (double) q[j] * keys[r * d + j];
            e[r] = x[r] - step[0] * said[r];
        }
        const auto variance = [&](const std::vector<double> & v) {
            double sum = 0, squares = 0;
            for (double y : v) {
                sum += y;
                squares += y * y;
            }
            return squares / n - sum / n * sum / n;
        };
        error += variance(e);
        size += variance(x);
    }
    return error / size;
}

// keys of a normal distribution in d directions
std::vector<float> some_keys(random_source & rnd, int n, int d) {
    std::vector<float> keys((size_t) n * d);
    for (int i = 0; i < n * d; ++i) keys[i] = 2 + rnd.normal();
    return keys;
}

// a code of 4 bits for two values cannot be nearer to a normal distribution than 1/16; it is as
// good in pieces, and where the first keys are few, and say nothing of the others
void test_index() {
    constexpr int N = 500, FEW = 5, D = 32;
    random_source rnd(6);
    auto keys = some_keys(rnd, N, D);
    for (int i = 0; i < FEW * D; ++i) keys[i] = 0.01f * rnd.normal();
    double before = 1;
    for (int bits : { 32, 64, 128 }) {
        edgekv_index whole(D, bits), pieces(D, bits);
        whole.put(0, N, keys.data());
        whole.set_resident({}, N);
        int64_t n = 0;
        for (int64_t n_new : { FEW, 1, 100, N - FEW - 101 }) {
            const int64_t from = pieces.wants_from(n, n_new, true);
            pieces.put(from, n + n_new - from, &keys[from * D]);
            n += n_new;
        }
        check(pieces.known() == 0, "index: nothing may be recalled yet");
        pieces.set_resident({}, FEW);
        pieces.put(0, N, keys.data());
        check(pieces.known() == FEW, "index: new codes of the same keys take nothing away");
        check(pieces.wants_from(N, N, false) == N, "index: no codes anew for what is written");
        check(pieces.wants_from(N, 1, true) == N, "index: all keys again for one more");
        pieces.set_resident({}, N);
        const double x = lost(whole, keys, N, D), y = lost(pieces, keys, N, D);
        check(x < before && y < 1.3 * x, "index: %d bits lose %g, in pieces %g", bits, x, y);
        before = x / 1.5;
    }
    check(1.5 * before > 1.0 / 16 && 1.5 * before < 0.14, "index: two bits lose %g", 1.5 * before);
}

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_steps = argc > 2 ? atoi(argv[2]) : 1500;
    printf("seed %u, %d steps\n", seed, n_steps);
    ggml_cpu_init(); // its table of f16 values
    // refused allocations are told
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    test_every_byte();
    test_no_number();
    test_halves();
    test_waits();
    test_archive();
    test_index();
    for (uint32_t i = 0; i < 6 && g_failed < 20; ++i)
        walk(1000 * seed + i, i % 2 == 0).run(n_steps);
    return finish();
}
