// The C API from end to end on a model file: prompts, tokens behind them, cancelling, states,
// damaged ones too, and every wrong argument.
//     test-engine model.gguf [seed] [largest NMSE against the plain cache]
#include "check.h"
#include "edgekv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace {

constexpr int N_CTX = 768, N_UBATCH = 64;

// of logits, against llama.cpp's own flash attention, which adds f16 values up in f16
double max_nmse = 1e-5;
constexpr int N_DAMAGED = 100; // states, for each way in which a prompt can be read

struct context {
    llama_context * ctx = nullptr;
    int n_layer = 0, n_vocab = 0;
    int first = 0; // layer that attends to everything
    std::vector<edgekv_layer_info> layers;

    context(llama_model * model, bool store, int n_ctx = N_CTX) {
        llama_context_params p = llama_context_default_params();
        p.n_ctx = n_ctx;
        p.n_batch = 256;
        p.n_ubatch = N_UBATCH;
        p.n_threads = p.n_threads_batch = 2;
        p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        edgekv_next_context(store);
        ctx = llama_init_from_model(model, p);
        edgekv_next_context(false);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        n_layer = edgekv_n_layer(ctx);
        layers.resize(n_layer);
        for (int il = 0; il < n_layer; ++il)
            check(edgekv_layer_get(ctx, il, &layers[il]) == 0, "layer %d has no shape", il);
        while (first + 1 < n_layer && !selects(first)) ++first;
        while (first > 0 && layers[first].n_head_kv == 0) --first; // all have windows
    }
    ~context() { llama_free(ctx); }
    context(const context &) = delete;

    // whether entries of a layer are chosen: it has heads, and they attend to everything
    bool selects(int il) const { return layers[il].n_head_kv > 0 && layers[il].n_swa == 0; }
    bool rewinds() const { return memory().bytes_recurrent == 0; }

    std::vector<int32_t> len(int il) const {
        std::vector<int32_t> x(layers[il].n_head_kv, -7);
        check(edgekv_len(ctx, il, x.data()) == 0, "no lengths");
        return x;
    }
    std::vector<int32_t> pos(int il, int k) const {
        std::vector<int32_t> x(len(il)[k], -7);
        check(edgekv_pos(ctx, il, k, x.data()) == 0, "no positions");
        return x;
    }
    edgekv_memory_info memory() const {
        edgekv_memory_info m = {};
        check(edgekv_memory_get(ctx, &m) == 0, "no memory info");
        return m;
    }

    // rows of one head as f32, K then V
    std::vector<float> rows(int il, int k) const {
        const int n = len(il)[k];
        std::vector<float> x((size_t) n * (layers[il].d_k + layers[il].d_v), NAN);
        check(edgekv_rows_f32(ctx, il, k, x.data(), x.data() + (size_t) n * layers[il].d_k) == 0,
            "no rows");
        return x;
    }

    // all that a turn may change; windows: of sliding-window layers too, which drop rows when
    // tokens come
    std::string state(bool windows = true) const {
        std::string s;
        auto put = [&](const void * p, size_t n) { s.append((const char *) p, n); };
        const auto m = memory();
        put(&m.n_past, sizeof(m.n_past));
        put(&m.boundary, sizeof(m.boundary));
        const bool all_stays =
            std::all_of(layers.begin(), layers.end(), [](const auto & l) { return l.n_swa == 0; });
        // recurrent states, in front of the store in llama.cpp's own format
        if (!rewinds() && (windows || all_stays)) {
            std::string all(llama_state_seq_get_size(ctx, 0), 0);
            llama_state_seq_get_data(ctx, (uint8_t *) &all[0], all.size(), 0);
            s += all;
        }
        for (int il = 0; il < n_layer; ++il)
            for (int k = 0; k < layers[il].n_head_kv; ++k) {
                if (layers[il].n_swa && !windows) continue;
                const auto p = pos(il, k);
                put(p.data(), p.size() * sizeof(int32_t));
                const size_t n_k = p.size() *
                    ggml_row_size((ggml_type) layers[il].type_k, layers[il].d_k),
                             n_v = p.size() *
                    ggml_row_size((ggml_type) layers[il].type_v, layers[il].d_v);
                std::string bytes(n_k + n_v + 1, 0);
                check(edgekv_rows_bytes(ctx, il, k, &bytes[0], &bytes[n_k]) == 0, "no row bytes");
                s += bytes;
            }
        return s;
    }

    std::vector<float> logits() const {
        const float * x = llama_get_logits_ith(ctx, -1);
        return x ? std::vector<float>(x, x + n_vocab) : std::vector<float>();
    }

    int decode(std::vector<llama_token> tokens) {
        return llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size()));
    }
};

double distance(const std::vector<float> & a, const std::vector<float> & b) {
    nmse e;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) e.add(a[i], b[i]);
    return a.empty() || a.size() != b.size() ? INFINITY : e.value();
}

std::vector<llama_token> text(random_source & rnd, int n, int n_vocab) {
    std::vector<llama_token> x(n);
    for (auto & t : x) t = rnd.range(6, n_vocab - 1);
    return x;
}

using row_lists = std::vector<std::vector<int32_t>>; // per head

struct prompt {
    std::vector<llama_token> tokens;
    std::vector<int32_t> pieces;
    std::vector<edgekv_observer> observers;
    edgekv_prefill_params params = {};

    prompt() = default;
    prompt(std::vector<llama_token> t, int n_probe = 0) : tokens(std::move(t)) {
        if (n_probe) pieces.push_back(n_probe);
        params.n_tokens = (int32_t) tokens.size() - n_probe;
        observers = {
            { std::max(0, params.n_tokens - 16), (int32_t) tokens.size(),
                EDGEKV_STAT_MEAN | EDGEKV_STAT_VAR | EDGEKV_STAT_MAX | EDGEKV_STAT_ENTROPY, 0 },
            { 0, params.n_tokens, EDGEKV_STAT_MEAN | EDGEKV_STAT_QUERIES, 3 }
        };
    }
    edgekv_prefill_params * get() {
        params.tokens = tokens.data();
        params.pieces = pieces.data();
        params.n_pieces = (int32_t) pieces.size();
        params.observers = observers.data();
        params.n_observers = (int32_t) observers.size();
        return &params;
    }
};

int keep(edgekv_prefill * p, const row_lists & rows) {
    std::vector<int32_t> counts, flat;
    for (const auto & r : rows) {
        counts.push_back((int32_t) r.size());
        flat.insert(flat.end(), r.begin(), r.end());
    }
    return edgekv_prefill_keep(p, counts.data(), flat.data());
}

row_lists choose(random_source & rnd, const std::vector<int32_t> & n_rows, double share) {
    row_lists lists;
    for (int32_t n : n_rows) {
        std::vector<int32_t> r(n);
        std::iota(r.begin(), r.end(), 0);
        if (share < 1) std::shuffle(r.begin(), r.end(), rnd.g);
        r.resize(std::max(1, (int) (share * n)));
        lists.push_back(r);
    }
    return lists;
}

// mean column sums to 1, as attention does; every statistic is finite
void check_stats(const context & c, edgekv_prefill * p, int il, const prompt & x) {
    const auto old = c.len(il);
    const int n_rows = *std::max_element(old.begin(), old.end()) + x.params.n_tokens;
    std::vector<float> out((size_t) old.size() * n_rows, NAN);
    for (auto stat : { EDGEKV_STAT_MEAN, EDGEKV_STAT_VAR, EDGEKV_STAT_MAX, EDGEKV_STAT_ENTROPY }) {
        check(edgekv_prefill_stat(p, 0, stat, out.data()) == 0, "statistic %d: %s", stat,
            edgekv_last_error());
        check(
            std::all_of(out.begin(), out.end(), [](float y) { return std::isfinite(y) && y >= 0; }),
            "statistic %d is not finite", stat);
    }
    check(edgekv_prefill_stat(p, 1, EDGEKV_STAT_MEAN, out.data()) == 0, "observer 1: %s",
        edgekv_last_error());
    for (size_t k = 0; k < old.size(); ++k) {
        double sum = 0;
        for (int r = 0; r < n_rows; ++r) sum += out[k * n_rows + r];
        check(std::fabs(sum - 1) < 1e-4, "layer %d head %zu: attention sums to %g", il, k, sum);
    }
    check(edgekv_prefill_stat(p, 1, EDGEKV_STAT_VAR, out.data()) == EDGEKV_INVALID,
        "a statistic that nobody asked for");
    check(edgekv_prefill_stat(p, 2, EDGEKV_STAT_MEAN, out.data()) == EDGEKV_INVALID &&
            edgekv_prefill_stat(p, -1, EDGEKV_STAT_MEAN, out.data()) == EDGEKV_INVALID,
        "an observer that is not there");
    check(edgekv_prefill_stat(p, 0, EDGEKV_STAT_MEAN, nullptr) == EDGEKV_INVALID,
        "a statistic to nowhere");
}

// merging refuses what makes no sense, for a head of n_rows (at least 2) rows that are about to be
// evicted
void wrong_merges(edgekv_prefill * p, int il, int n_head_kv, int n_rows) {
    const int32_t far = n_rows, before = -1, pair[2] = { 0, 1 }, same[2] = { 1, 1 },
                  one[2] = { 1, 0 }, none[2] = { 0, 0 }, over[2] = { n_rows + 1, 0 },
                  sum[2] = { n_rows, 1 }, minus[2] = { -1, 1 };
    const float w[2] = { 0.5f, 0.5f };
    float cosine[2] = { 7, 7 };
    int32_t at[2] = { 7, 7 };
    auto near = [&](int32_t n, const int32_t * gone, int32_t m, const int32_t * kept, float * c,
                    int32_t * a) {
        return edgekv_prefill_nearest(p, il, 0, n, gone, m, kept, c, a);
    };
    for (const int32_t * r : { &far, &before, (const int32_t *) nullptr }) {
        check(near(1, r, 1, pair, cosine, at) == EDGEKV_INVALID &&
                near(1, pair, 1, r, cosine, at) == EDGEKV_INVALID,
            "a row that is not there was searched");
        const edgekv_merge to { 1, r, w, one, pair + 1, w }, from { 1, pair, w, one, r, w };
        check(edgekv_prefill_merge(p, il, 0, &to) == EDGEKV_INVALID &&
                edgekv_prefill_merge(p, il, 0, &from) == EDGEKV_INVALID,
            "a row that is not there was merged");
    }
    check(near(-1, pair, 1, pair, cosine, at) == EDGEKV_INVALID &&
            near(1, pair, -1, pair, cosine, at) == EDGEKV_INVALID,
        "-1 rows were searched");
    check(near(1, pair, 0, nullptr, cosine, at) == EDGEKV_INVALID, "a row was searched among none");
    check(near(1, pair, 1, pair + 1, nullptr, at) == EDGEKV_INVALID &&
            near(1, pair, 1, pair + 1, cosine, nullptr) == EDGEKV_INVALID,
        "an answer to nowhere");
    check(near(0, nullptr, 1, pair, nullptr, nullptr) == 0, "nothing was searched: %s",
        edgekv_last_error());
    const edgekv_merge wrong[] = {
        // fewer than none; a row twice
        { -1, pair, w, one, pair, w },
        { 2, same, w, none, pair, w },
        // it receives itself, or one that receives
        { 1, pair, w, one, pair, w },
        { 2, pair, w, one, pair + 1, w },
        { 1, pair, w, over, pair, w },
        { 2, pair, w, sum, pair, w },
        { 1, pair, w, minus, pair + 1, w },
        { 1, pair, nullptr, one, pair + 1, w },
        { 1, pair, w, nullptr, pair + 1, w },
        { 1, pair, w, one, pair + 1, nullptr },
    };
    for (const auto & m : wrong)
        check(edgekv_prefill_merge(p, il, 0, &m) == EDGEKV_INVALID, "merge %d makes no sense",
            (int) (&m - wrong));
    const edgekv_merge nothing { 0, nullptr, nullptr, nullptr, nullptr, nullptr };
    check(edgekv_prefill_merge(p, il, 0, nullptr) == EDGEKV_INVALID &&
            edgekv_prefill_merge(p, il, 0, &nothing) == 0,
        "merging nothing");
    for (int head : { -1, n_head_kv }) {
        check(edgekv_prefill_nearest(p, il, head, 1, pair, 1, pair + 1, cosine, at) ==
                    EDGEKV_INVALID &&
                edgekv_prefill_merge(p, il, head, &nothing) == EDGEKV_INVALID,
            "head %d is not there", head);
    }
    for (int other : { -1, il + 1, 1 << 20 }) {
        check(edgekv_prefill_nearest(p, other, 0, 1, pair, 1, pair + 1, cosine, at) ==
                    EDGEKV_INVALID &&
                edgekv_prefill_merge(p, other, 0, &nothing) == EDGEKV_INVALID,
            "layer %d is not there", other);
    }
    check(cosine[0] == 7 && at[0] == 7, "a refused search wrote");
    check(near(1, pair, 1, pair + 1, cosine, at) == 0 && std::fabs(cosine[0]) < 1.001f &&
            at[0] == 0 && cosine[1] == 7 && at[1] == 7,
        "a search: %s", edgekv_last_error());
}

// some rows of head 0 are those of all, and what is not there is not read
void check_rows(edgekv_prefill * p, const edgekv_layer_info & l, int32_t n) {
    std::vector<float> k((size_t) n * l.d_k), some((size_t) 3 * l.d_k);
    const int32_t rows[] = { n - 1, 0, n - 1 }, far[] = { 0, n, 0 }, before[] = { -1, 0, 0 };
    check(edgekv_prefill_rows(p, 0, k.data(), nullptr) == 0 &&
            edgekv_prefill_some_rows(p, 0, 3, rows, some.data(), nullptr) == 0,
        "%s", edgekv_last_error());
    for (int i = 0; i < 3; ++i)
        check(memcmp(&some[(size_t) i * l.d_k], &k[(size_t) rows[i] * l.d_k],
                  l.d_k * sizeof(float)) == 0,
            "row %d is another one", rows[i]);
    check(edgekv_prefill_some_rows(p, 0, 0, nullptr, some.data(), some.data()) == 0 &&
            edgekv_prefill_some_rows(p, 0, 3, rows, nullptr, nullptr) == 0,
        "nothing could not be read");
    for (const int32_t * wrong : { far, before, (const int32_t *) nullptr }) {
        check(edgekv_prefill_some_rows(p, 0, 3, wrong, some.data(), nullptr) == EDGEKV_INVALID,
            "a row that is not there was read");
    }
    check(edgekv_prefill_some_rows(p, 0, -1, rows, some.data(), nullptr) == EDGEKV_INVALID,
        "-1 rows were read");
    check(edgekv_prefill_some_rows(p, -1, 3, rows, some.data(), nullptr) == EDGEKV_INVALID &&
            edgekv_prefill_some_rows(p, l.n_head_kv, 3, rows, some.data(), nullptr) ==
                EDGEKV_INVALID,
        "a head that is not there was read");
}

// one layer of a prompt: run, look, keep a random share, look at what was kept
void read_layer(context & c, edgekv_prefill * p, int il, const prompt & x, random_source & rnd,
    double share, std::vector<row_lists> & kept) {
    check(edgekv_prefill_run(p, il) == 0, "layer %d: %s", il, edgekv_last_error());
    check(edgekv_prefill_run(p, il) == EDGEKV_INVALID, "a layer was read twice");
    auto n_rows = c.len(il);
    for (int32_t & n : n_rows) n += x.params.n_tokens;
    kept.push_back(choose(rnd, n_rows, share));
    if (!c.selects(il)) return;
    check_stats(c, p, il, x);
    check_rows(p, c.layers[il], n_rows[0]);
    row_lists bad = kept[il];
    bad[0][0] = n_rows[0];
    check(keep(p, bad) == EDGEKV_INVALID, "a row that is not there was kept");
    bad[0][0] = -1;
    check(keep(p, bad) == EDGEKV_INVALID, "row -1 was kept");
    bad[0] = { 0, 0 };
    check(keep(p, bad) == EDGEKV_INVALID, "a row was kept twice");
    const int32_t many[64] = { n_rows[0] + 1 }, none[64] = { -1 };
    check(edgekv_prefill_keep(p, many, many) == EDGEKV_INVALID &&
            edgekv_prefill_keep(p, none, none) == EDGEKV_INVALID,
        "impossible counts");
    check(edgekv_prefill_keep(p, nullptr, none) == EDGEKV_INVALID &&
            edgekv_prefill_keep(p, many, nullptr) == EDGEKV_INVALID,
        "null lists were kept");
    const int n_head_kv = c.layers[il].n_head_kv;
    if (n_rows[0] > 1) wrong_merges(p, il, n_head_kv, n_rows[0]);
    check(keep(p, kept[il]) == 0, "layer %d: %s", il, edgekv_last_error());
    if (kept[il][0].size() > 1) wrong_merges(p, il, n_head_kv, (int) kept[il][0].size());
}

// a prompt from begin to end; returns false if begin failed
bool read_prompt(context & c, prompt & x, random_source & rnd, double share,
    std::vector<row_lists> * out = nullptr) {
    edgekv_prefill * p = edgekv_prefill_begin(c.ctx, x.get());
    if (!p) return false;
    check(!edgekv_prefill_begin(c.ctx, x.get()), "two prompts at once");
    check(edgekv_prefill_end(p) == EDGEKV_INVALID, "an unread prompt was ended");
    std::vector<row_lists> kept;
    for (int il = 0; il < c.n_layer; ++il) read_layer(c, p, il, x, rnd, share, kept);
    check(edgekv_prefill_run(p, c.n_layer) == EDGEKV_INVALID, "a layer too many");
    check(edgekv_prefill_end(p) == 0, "%s", edgekv_last_error());
    const std::string after = c.state();
    std::vector<int32_t> none(64, 0);
    const edgekv_merge nothing {};
    std::vector<float> big((size_t) N_CTX * 1024);
    check(edgekv_prefill_end(p) < 0, "a prompt was ended twice");
    check(edgekv_prefill_run(p, c.n_layer) < 0 && keep(p, kept.back()) < 0 &&
            edgekv_prefill_shrink(p, 0, none.data()) < 0 &&
            edgekv_prefill_merge(p, 0, 0, &nothing) < 0 &&
            edgekv_prefill_nearest(
                p, 0, 0, 1, none.data(), 1, none.data(), big.data(), none.data()) < 0,
        "an ended prompt was changed");
    check(edgekv_prefill_rows(p, 0, big.data(), nullptr) < 0 &&
            edgekv_prefill_some_rows(p, 0, 1, none.data(), big.data(), nullptr) < 0 &&
            edgekv_prefill_stat(p, 0, EDGEKV_STAT_MEAN, big.data()) < 0,
        "an ended prompt was read");
    check(c.state() == after, "calls behind the end changed the store");
    edgekv_prefill_free(p);
    check(c.state() == after, "freeing an ended prompt changed the store");
    if (out) *out = kept;
    return true;
}

void check_prompt(
    context & c, random_source & rnd, double share, int n, int n_probe, edgekv_hidden_mode hidden) {
    prompt x(text(rnd, n + n_probe, c.n_vocab), n_probe);
    x.params.hidden = hidden;
    std::vector<float> every(hidden == EDGEKV_HIDDEN_DEVICE ? 0 : (size_t) n * c.n_vocab, NAN);
    x.params.logits = every.empty() ? nullptr : every.data();
    std::vector<std::vector<int32_t>> old;
    for (int il = 0; il < c.n_layer; ++il) old.push_back(c.len(il));
    std::vector<std::vector<std::vector<int32_t>>> pos(c.n_layer);
    for (int il = 0; il < c.n_layer; ++il)
        for (int k = 0; k < c.layers[il].n_head_kv; ++k) pos[il].push_back(c.pos(il, k));
    const int64_t before = c.memory().n_past;
    std::vector<row_lists> kept;
    if (!check(read_prompt(c, x, rnd, share, &kept), "%s", edgekv_last_error())) return;
    check(c.memory().n_past == before + n, "%lld tokens after a prompt of %d",
        (long long) c.memory().n_past, n);
    const auto last = c.logits();
    check(std::isfinite(distance(last, last)), "logits are not finite");
    check(std::all_of(every.begin(), every.end(), [](float y) { return std::isfinite(y); }) &&
            (every.empty() || std::equal(last.begin(), last.end(), every.end() - c.n_vocab)),
        "the logits of every token are not there, or the last one's are others");
    for (int il = 0; il < c.n_layer; ++il)
        for (int k = 0; k < c.layers[il].n_head_kv; ++k) {
            auto got = c.pos(il, k);
            if (c.layers[il].n_swa) {
                check((int) got.size() >= std::min(c.layers[il].n_swa, (int) before + n) &&
                        got.back() == before + n - 1,
                    "layer %d: the window is not whole", il);
                continue;
            }
            std::vector<int32_t> expected;
            for (int32_t r : kept[il][k])
                expected.push_back(
                    r < old[il][k] ? pos[il][k][r] : (int32_t) before + r - old[il][k]);
            if (share == 1)
                std::sort(expected.begin(), expected.end(), [&](int a, int b) { return a < b; }),
                    std::sort(got.begin(), got.end());
            check(got == expected, "layer %d head %d: other rows than asked for", il, k);
        }
}

void check_tokens(context & c, random_source & rnd, std::initializer_list<int> sizes) {
    for (int n : sizes) {
        const auto before = c.memory();
        std::vector<int32_t> full;
        for (int il = 0; il < c.n_layer; ++il) full.push_back(c.selects(il) ? c.len(il)[0] : -1);
        check(c.decode(text(rnd, n, c.n_vocab)) == 0, "%d tokens were refused", n);
        check(c.memory().n_past == before.n_past + n && c.memory().boundary == before.boundary,
            "%d tokens were counted as %lld", n, (long long) (c.memory().n_past - before.n_past));
        for (int il = 0; il < c.n_layer; ++il)
            if (full[il] >= 0)
                check(c.len(il)[0] == full[il] + n, "layer %d grew by %d instead of %d", il,
                    c.len(il)[0] - full[il], n);
        check(std::isfinite(distance(c.logits(), c.logits())), "logits are not finite");
    }
}

// ---- wrong arguments

void wrong_contexts(llama_context * other) {
    int32_t x[64] = {};
    float f[64];
    const edgekv_merge nothing {};
    edgekv_layer_info layer;
    edgekv_memory_info memory;
    prompt y({ 7, 8, 9 });
    for (llama_context * ctx : { (llama_context *) nullptr, other }) {
        check(!edgekv_has_store(ctx) && edgekv_n_layer(ctx) == 0, "a store out of nothing");
        check(edgekv_layer_get(ctx, 0, &layer) < 0 && edgekv_len(ctx, 0, x) < 0 &&
                edgekv_pos(ctx, 0, 0, x) < 0 && edgekv_rows_f32(ctx, 0, 0, f, f) < 0 &&
                edgekv_rows_bytes(ctx, 0, 0, f, f) < 0 && edgekv_memory_get(ctx, &memory) < 0 &&
                edgekv_evict(ctx, 0, x, x) < 0 && edgekv_trim_capacity(ctx) < 0 &&
                edgekv_write_rows(ctx, 0, 0, 1, x, f, f) < 0 && !edgekv_prefill_begin(ctx, y.get()),
            "a context without a store was used");
        check(strlen(edgekv_last_error()) > 0, "no reason was given");
    }
    check(edgekv_why_unsupported(nullptr) != nullptr, "no model is supported");
    check(!edgekv_prefill_by_layer(nullptr) && edgekv_prefill_score_ms(nullptr) == 0,
        "a prompt out of nothing");
    check(edgekv_prefill_run(nullptr, 0) < 0 &&
            edgekv_prefill_stat(nullptr, 0, EDGEKV_STAT_MEAN, f) < 0 &&
            edgekv_prefill_rows(nullptr, 0, f, f) < 0 &&
            edgekv_prefill_some_rows(nullptr, 0, 1, x, f, f) < 0 &&
            edgekv_prefill_keep(nullptr, x, x) < 0 && edgekv_prefill_shrink(nullptr, 0, x) < 0 &&
            edgekv_prefill_end(nullptr) < 0 && edgekv_prefill_merge(nullptr, 0, 0, &nothing) < 0 &&
            edgekv_prefill_nearest(nullptr, 0, 0, 1, x, 1, x, f, x) < 0,
        "no prompt was read");
    edgekv_prefill_free(nullptr);
}

void wrong_arguments(context & c) {
    const std::string before = c.state();
    int32_t x[4096] = {};
    std::vector<float> f((size_t) N_CTX * 1024);
    edgekv_layer_info layer;
    for (int il : { -1, c.n_layer, INT32_MAX, INT32_MIN }) {
        check(edgekv_layer_get(c.ctx, il, &layer) == EDGEKV_INVALID &&
                edgekv_len(c.ctx, il, x) == EDGEKV_INVALID &&
                edgekv_pos(c.ctx, il, 0, x) == EDGEKV_INVALID &&
                edgekv_rows_f32(c.ctx, il, 0, f.data(), f.data()) == EDGEKV_INVALID &&
                edgekv_rows_bytes(c.ctx, il, 0, f.data(), f.data()) == EDGEKV_INVALID &&
                edgekv_evict(c.ctx, il, x, x) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, il, 0, 1, x, f.data(), f.data()) == EDGEKV_INVALID,
            "layer %d", il);
    }
    const int one = c.first;
    for (int k : { -1, c.layers[one].n_head_kv, INT32_MAX }) {
        check(edgekv_pos(c.ctx, one, k, x) == EDGEKV_INVALID &&
                edgekv_rows_f32(c.ctx, one, k, f.data(), nullptr) == EDGEKV_INVALID &&
                edgekv_rows_bytes(c.ctx, one, k, f.data(), nullptr) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, one, k, 1, x, f.data(), f.data()) == EDGEKV_INVALID,
            "head %d", k);
    }
    check(edgekv_layer_get(c.ctx, one, nullptr) == EDGEKV_INVALID &&
            edgekv_len(c.ctx, one, nullptr) == EDGEKV_INVALID &&
            edgekv_pos(c.ctx, one, 0, nullptr) == (c.len(one)[0] ? EDGEKV_INVALID : 0) &&
            edgekv_memory_get(c.ctx, nullptr) == EDGEKV_INVALID &&
            edgekv_evict(c.ctx, one, nullptr, x) == EDGEKV_INVALID,
        "an answer to nowhere");
    check(edgekv_rows_f32(c.ctx, one, 0, nullptr, nullptr) == 0 &&
            edgekv_rows_bytes(c.ctx, one, 0, nullptr, nullptr) == 0,
        "neither K nor V");
    for (int il = 0; il < c.n_layer; ++il) {
        if (c.layers[il].n_head_kv == 0) {
            int32_t none = 0;
            check(edgekv_evict(c.ctx, il, &none, &none) == EDGEKV_INVALID,
                "a layer without attention was thinned");
            continue;
        }
        const auto len = c.len(il);
        std::vector<int32_t> counts(len.size(), 0), rows(8, 0);
        counts[0] = len[0] + 1;
        check(edgekv_evict(c.ctx, il, counts.data(), x) == EDGEKV_INVALID,
            "more rows than there are");
        counts[0] = -1;
        check(edgekv_evict(c.ctx, il, counts.data(), x) == EDGEKV_INVALID, "-1 rows");
        if (len[0] < 2) continue;
        counts[0] = 2;
        check(
            edgekv_evict(c.ctx, il, counts.data(), nullptr) == EDGEKV_INVALID, "rows from nowhere");
        check(edgekv_evict(c.ctx, il, counts.data(), rows.data()) == EDGEKV_INVALID, "a row twice");
        for (int32_t r : { -1, len[0], INT32_MAX, INT32_MIN }) {
            rows[1] = r;
            check(edgekv_evict(c.ctx, il, counts.data(), rows.data()) == EDGEKV_INVALID &&
                    edgekv_write_rows(c.ctx, il, 0, 1, &r, f.data(), f.data()) == EDGEKV_INVALID,
                "row %d", r);
        }
        const float endless[] = { NAN, INFINITY, -INFINITY };
        for (float e : endless) { // in the last value of V, when K could have been written already
            std::vector<float> v(c.layers[il].d_v, 1.0f);
            v.back() = e;
            check(edgekv_write_rows(c.ctx, il, 0, 1, x, f.data(), v.data()) == EDGEKV_INVALID,
                "%g was written", (double) e);
        }
        check(edgekv_write_rows(c.ctx, il, 0, 1, nullptr, f.data(), f.data()) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, il, 0, 1, x, nullptr, f.data()) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, il, 0, 1, x, f.data(), nullptr) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, il, 0, -1, x, f.data(), f.data()) == EDGEKV_INVALID &&
                edgekv_write_rows(c.ctx, il, 0, 0, nullptr, nullptr, nullptr) == EDGEKV_OK,
            "rows out of nothing were written");
        if (!c.layers[il].n_swa) continue;
        rows[1] = 1;
        check(edgekv_evict(c.ctx, il, counts.data(), rows.data()) == EDGEKV_INVALID,
            "a sliding window was thinned");
    }
    check(c.state() == before, "wrong arguments changed the store");
}

void wrong_prompts(context & c, bool by_layer) {
    const std::string before = c.state();
    auto refused = [&](const char * what,
                       const std::function<void(prompt &, edgekv_prefill_params &)> & change) {
        prompt x({ 7, 8, 9, 10, 11, 12 }, 2);
        edgekv_prefill_params params = *x.get();
        change(x, params);
        edgekv_prefill * p = edgekv_prefill_begin(c.ctx, &params);
        check(!p && strlen(edgekv_last_error()) > 0 && !strchr(edgekv_last_error(), '\n'),
            "%s was taken", what);
        edgekv_prefill_free(p);
    };
    check(!edgekv_prefill_begin(c.ctx, nullptr), "no parameters");
    refused("no tokens", [](prompt &, edgekv_prefill_params & p) { p.tokens = nullptr; });
    refused("zero tokens", [](prompt &, edgekv_prefill_params & p) { p.n_tokens = 0; });
    refused("-1 tokens", [](prompt &, edgekv_prefill_params & p) { p.n_tokens = -1; });
    refused("too many tokens", [](prompt &, edgekv_prefill_params & p) { p.n_tokens = INT32_MAX; });
    refused("token -1", [](prompt & x, edgekv_prefill_params &) { x.tokens[2] = -1; });
    refused(
        "a token too high", [&](prompt & x, edgekv_prefill_params &) { x.tokens[5] = c.n_vocab; });
    refused("-1 pieces", [](prompt &, edgekv_prefill_params & p) { p.n_pieces = -1; });
    refused("pieces from nowhere", [](prompt &, edgekv_prefill_params & p) { p.pieces = nullptr; });
    refused("an empty piece", [](prompt & x, edgekv_prefill_params &) { x.pieces[0] = 0; });
    refused("a piece of -1", [](prompt & x, edgekv_prefill_params &) { x.pieces[0] = -1; });
    refused("a huge piece", [](prompt & x, edgekv_prefill_params &) { x.pieces[0] = INT32_MAX; });
    refused("-1 observers", [](prompt &, edgekv_prefill_params & p) { p.n_observers = -1; });
    refused("observers from nowhere",
        [](prompt &, edgekv_prefill_params & p) { p.observers = nullptr; });
    refused(
        "an observer too far", [](prompt & x, edgekv_prefill_params &) { x.observers[0].end = 7; });
    refused("an observer of nothing",
        [](prompt & x, edgekv_prefill_params &) { x.observers[0].end = x.observers[0].begin; });
    refused("an observer of less than every token",
        [](prompt & x, edgekv_prefill_params &) { x.observers[1].every = -1; });
    refused("an observer before",
        [](prompt & x, edgekv_prefill_params &) { x.observers[0].begin = -1; });
    refused("hidden mode 5",
        [](prompt &, edgekv_prefill_params & p) { p.hidden = EDGEKV_HIDDEN_MODES; });
    if (by_layer)
        refused("a folder that is not there", [](prompt &, edgekv_prefill_params & p) {
            p.hidden = EDGEKV_HIDDEN_DISK;
            p.dir = "/no/such/folder";
        });
    check(c.state() == before, "wrong prompts changed the store");
}

// ---- cancelling

struct stop_at {
    int left;
};

void check_cancel(context & c, random_source & rnd) {
    const std::string before = c.state();
    prompt x(text(rnd, 150, c.n_vocab));
    for (int at = 0;; ++at) {
        stop_at stop { at };
        x.params.progress = [](int32_t, int32_t, void * data) {
            return ((stop_at *) data)->left-- > 0;
        };
        x.params.data = &stop;
        edgekv_prefill * p = edgekv_prefill_begin(c.ctx, x.get());
        if (!check(p != nullptr, "%s", edgekv_last_error())) return;
        int status = 0, il = 0;
        for (; il < c.n_layer && status == 0; ++il) {
            status = edgekv_prefill_run(p, il);
            if (status == 0 && c.selects(il))
                status = keep(p, row_lists(c.layers[il].n_head_kv, { 0, 1 }));
        }
        if (status != 0) {
            check(status == EDGEKV_CANCELLED, "cancelled with %d", status);
            check(edgekv_prefill_run(p, il - 1) < 0 && edgekv_prefill_run(p, il) < 0 &&
                    edgekv_prefill_end(p) < 0,
                "a cancelled prompt went on");
        }
        edgekv_prefill_free(p);
        check(c.state() == before,
            "a prompt that was cancelled at step %d or not ended changed the store", at);
        if (status == 0) break; // as far as it goes, and not ended
    }
}

// ---- a context that goes first

void check_end(llama_model * model, random_source & rnd) {
    edgekv_prefill * p = nullptr;
    prompt x;
    {
        context c(model, true);
        x = prompt(text(rnd, 150, c.n_vocab));
        p = edgekv_prefill_begin(c.ctx, x.get());
        if (!check(p != nullptr, "%s", edgekv_last_error())) return;
        check(edgekv_prefill_run(p, 0) == 0, "%s", edgekv_last_error());
        check(c.decode(text(rnd, 1, c.n_vocab)) != 0, "tokens were decoded while a prompt is read");
    }
    std::vector<float> out(1 << 20);
    std::vector<int32_t> some(64, 0);
    check(edgekv_prefill_run(p, 1) == EDGEKV_INVALID && edgekv_prefill_end(p) == EDGEKV_INVALID,
        "a prompt went on without its context");
    check(edgekv_prefill_old(p, 0, some.data()) < 0 &&
            edgekv_prefill_stat(p, 0, EDGEKV_STAT_MEAN, out.data()) < 0 &&
            edgekv_prefill_rows(p, 0, out.data(), nullptr) < 0,
        "a lost prompt was looked at");
    check(edgekv_prefill_keep(p, some.data(), some.data()) < 0 &&
            edgekv_prefill_shrink(p, 0, some.data()) < 0,
        "a lost prompt was changed");
    check(strstr(edgekv_last_error(), "closed") != nullptr, "said: %s", edgekv_last_error());
    edgekv_prefill_free(p);
    llama_token token = 7;
    check(llama_decode(nullptr, llama_batch_get_one(&token, 1)) < 0 &&
            strstr(edgekv_last_error(), "closed"),
        "a context that is none decoded");
}

// ---- states

std::vector<uint8_t> save(const context & c) {
    std::vector<uint8_t> x(llama_state_seq_get_size(c.ctx, 0));
    x.resize(llama_state_seq_get_data(c.ctx, x.data(), x.size(), 0));
    return x;
}

void check_states(llama_model * model, context & c, random_source & rnd) {
    const auto saved = save(c);
    context twin(model, true);
    check(twin.decode(text(rnd, 9, c.n_vocab)) == 0, "tokens were refused");
    const std::string before = twin.state();
    for (size_t n = 0; n < saved.size(); n += 1 + saved.size() / 40) {
        check(llama_state_seq_set_data(twin.ctx, saved.data(), n, 0) == 0,
            "%zu of %zu bytes were taken for a state", n, saved.size());
        check(twin.state() == before, "a state that was refused changed the store");
    }
    check(llama_state_seq_set_data(twin.ctx, saved.data(), saved.size(), 0) != 0,
        "a state was refused");
    check(twin.state() == c.state(), "a state came back changed");
    const auto tokens = text(rnd, 4, c.n_vocab);
    check(c.decode(tokens) == 0 && twin.decode(tokens) == 0 && c.logits() == twin.logits(),
        "the same conversation goes on differently");

    context small(model, true, 256);
    check(small.decode(text(rnd, 9, c.n_vocab)) == 0, "tokens were refused");
    const std::string small_before = small.state();
    check(llama_state_seq_set_data(small.ctx, saved.data(), saved.size(), 0) == 0 &&
            small.state() == small_before,
        "a state of %lld tokens went into a context of 256", (long long) c.memory().n_past);
    check(small.decode(text(rnd, 2, c.n_vocab)) == 0, "a refused state broke the context");
}

// what a broken disk or a hostile file may do to one; mostly in front, where sizes and positions
// are
std::vector<uint8_t> damaged(random_source & rnd, const std::vector<uint8_t> & state) {
    std::vector<uint8_t> x = state;
    const int n = (int) x.size(), widths[] = { 64, 2000, n }, counts[] = { 1, 1, 2, 50 },
              holes[] = { 0, 1, 4, 1000 };
    const int width = std::min(rnd.one_of(widths), n - 4);
    for (int left = rnd.one_of(counts); left > 0; --left) {
        const uint32_t values[] = { (uint32_t) rnd.g(), INT32_MAX, 0, UINT32_MAX, N_CTX,
            N_CTX + 1 };
        const uint32_t value = rnd.one_of(values);
        memcpy(&x[rnd.below(width)], &value, sizeof(value));
    }
    if (rnd.below(5) == 0) { // a hole, or all behind it
        const int at = rnd.below(n), hole = rnd.one_of(holes);
        x.erase(x.begin() + at, hole ? x.begin() + std::min(n, at + hole) : x.end());
    }
    // no byte more is allocated: a sanitizer sees who reads behind it
    return std::vector<uint8_t>(x.begin(), x.end());
}

// a damaged state is refused and changes nothing, or the conversation in it goes on
void check_damaged_states(llama_model * model, const context & c, random_source & rnd) {
    const auto saved = save(c);
    context twin(model, true);
    check(twin.decode(text(rnd, 9, c.n_vocab)) == 0, "tokens were refused");
    int n_taken = 0;
    for (int i = 0; i < N_DAMAGED; ++i) {
        const auto bad = damaged(rnd, saved);
        const std::string before = twin.state();
        const bool taken = llama_state_seq_set_data(twin.ctx, bad.data(), bad.size(), 0) != 0;
        n_taken += taken;
        check(taken || twin.state() == before, "damaged state %d was refused and changed the store",
            i);
        const bool is_full = twin.memory().n_past >= N_CTX;
        check(is_full || twin.decode(text(rnd, 1, c.n_vocab)) == 0,
            "behind damaged state %d no token was taken", i);
    }
    check(n_taken > 0 && n_taken < N_DAMAGED, "%d of %d damaged states were taken", n_taken,
        N_DAMAGED);
    check(llama_state_seq_set_data(twin.ctx, saved.data(), saved.size(), 0) != 0 &&
            twin.state() == c.state(),
        "a whole state did not come back behind damaged ones");
    const auto tokens = text(rnd, 4, c.n_vocab);
    context fresh(model, true);
    check(llama_state_seq_set_data(fresh.ctx, saved.data(), saved.size(), 0) != 0,
        "a state was refused");
    check(twin.decode(tokens) == 0 && fresh.decode(tokens) == 0 && twin.logits() == fresh.logits(),
        "damaged states left something behind");
}

// ---- the whole

void check_evict(context & c, random_source & rnd) {
    for (int il = 0; il < c.n_layer; ++il) {
        if (!c.selects(il)) continue;
        const auto lists = choose(rnd, c.len(il), 0.5);
        std::vector<int32_t> counts, flat;
        std::vector<std::vector<int32_t>> pos;
        for (int k = 0; k < c.layers[il].n_head_kv; ++k) {
            counts.push_back((int32_t) lists[k].size());
            flat.insert(flat.end(), lists[k].begin(), lists[k].end());
            pos.emplace_back();
            for (int32_t r : lists[k]) pos[k].push_back(c.pos(il, k)[r]);
        }
        check(edgekv_evict(c.ctx, il, counts.data(), flat.data()) == 0, "%s", edgekv_last_error());
        check(c.len(il) == counts, "layer %d: evicted to other lengths", il);
        for (int k = 0; k < c.layers[il].n_head_kv; ++k)
            check(c.pos(il, k) == pos[k], "layer %d head %d: other rows are left", il, k);
    }
    check(edgekv_trim_capacity(c.ctx) == 0, "%s", edgekv_last_error());
    int64_t used = 0;
    for (int il = 0; il < c.n_layer; ++il)
        for (int32_t n : c.len(il)) used += (int64_t) n * c.layers[il].bytes_row;
    check(c.memory().bytes_now >= used && c.memory().bytes_now <= used + c.n_layer * 1024,
        "%lld bytes for rows of %lld", (long long) c.memory().bytes_now, (long long) used);
}

void check_trim(context & c, random_source & rnd) {
    const auto memory = c.memory();
    const std::string before = c.state(false);
    llama_memory_t mem = llama_get_memory(c.ctx);
    if (!c.rewinds())
        check(!llama_memory_seq_rm(mem, 0, (llama_pos) memory.n_past - 1, -1),
            "recurrent layers forgot a token");
    check(edgekv_mark_tokens(c.ctx) == 0, "%s", edgekv_last_error());
    check_tokens(c, rnd, { 1, 3 });
    if (!c.rewinds())
        check(!llama_memory_seq_rm(mem, 0, (llama_pos) memory.n_past + 1, -1),
            "recurrent layers forgot three tokens");
    check(llama_memory_seq_rm(mem, 0, (llama_pos) memory.n_past, -1),
        "tokens could not be taken back");
    check(c.state(false) == before, "taking tokens back left something");
    check(memory.boundary == 0 || !llama_memory_seq_rm(mem, 0, (llama_pos) memory.boundary - 1, -1),
        "an evicted prompt was taken back");
    check(!llama_memory_seq_rm(mem, 0, 1, 2), "a hole was cut");
    check(c.state(false) == before, "a refusal changed the store");
}

// a prompt of which everything is kept says what the plain cache says
void check_whole(llama_model * model, random_source & rnd) {
    context c(model, true), plain(model, false);
    prompt x(text(rnd, 200, c.n_vocab));
    check(read_prompt(c, x, rnd, 1.0), "%s", edgekv_last_error());
    check(plain.decode(x.tokens) == 0, "tokens were refused");
    // of all tokens together: llama.cpp rounds queries to f16, which moves single ones by chance
    nmse error;
    const auto compare = [&] {
        const auto got = c.logits(), expected = plain.logits();
        for (size_t i = 0; i < got.size(); ++i) error.add(got[i], expected[i]);
    };
    compare();
    for (int i = 0; i < 5; ++i) {
        const auto token = text(rnd, 1, c.n_vocab);
        check(c.decode(token) == 0 && plain.decode(token) == 0, "token %d was refused: %s", i,
            edgekv_last_error());
        compare();
    }
    check(error.value() < max_nmse, "logits differ from the plain cache: NMSE %g", error.value());
    check(!edgekv_has_store(plain.ctx), "a plain context has a store");
    wrong_contexts(plain.ctx);
}

void run(llama_model * model, random_source & rnd, bool by_layer) {
    check_whole(model, rnd);
    context c(model, true);
    if (!check(edgekv_has_store(c.ctx) && c.n_layer > 0, "no store: %s",
            edgekv_why_unsupported(model)))
        return;
    wrong_arguments(c);
    wrong_prompts(c, by_layer);
    check_prompt(c, rnd, 0.3, 200, 0, EDGEKV_HIDDEN_F32);
    check_tokens(c, rnd, { 1, 1, 5, 70 });
    wrong_arguments(c);
    wrong_prompts(c, by_layer);
    check_cancel(c, rnd);
    check_end(model, rnd);
    check_trim(c, rnd);
    check_prompt(c, rnd, 0.5, 100, 20, EDGEKV_HIDDEN_F16);
    check_prompt(c, rnd, 0.5, 65, 0, EDGEKV_HIDDEN_DISK);
    check_states(model, c, rnd);
    check_damaged_states(model, c, rnd);
    check_evict(c, rnd);
    check_tokens(c, rnd, { 1, 8 });
    check(c.decode(text(rnd, 250, c.n_vocab)) == 0 && c.decode(text(rnd, 250, c.n_vocab)) != 0,
        "more tokens than the context holds");
    check_tokens(c, rnd, { 1 });
    llama_memory_clear(llama_get_memory(c.ctx), true);
    check(c.memory().n_past == 0 && c.memory().boundary == 0 && c.len(c.first)[0] == 0,
        "something is left after clear");
    check_prompt(c, rnd, 0.2, 130, 0, EDGEKV_HIDDEN_DEVICE); // there is none: as F32
    check_prompt(c, rnd, 0.5, 100, 20, EDGEKV_HIDDEN_NONE);
}

void set_variable(const char * name, const char * value) {
#ifdef _WIN32
    _putenv_s(name, value);
#else
    setenv(name, value, 1);
#endif
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: test-engine model.gguf [seed] [nmse]\n");
        return 2;
    }
    random_source rnd(argc > 2 ? (uint32_t) strtoul(argv[2], nullptr, 10) : 1);
    if (argc > 3) max_nmse = strtod(argv[3], nullptr);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    check(edgekv_abi() == EDGEKV_ABI && edgekv_last_error(), "the library is of another version");
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!check(model != nullptr, "%s cannot be loaded", argv[1])) return finish();
    for (auto [variable, value] : { std::pair<const char *, const char *>("", ""),
             { "EDGEKV_WHOLE", "1" }, { "EDGEKV_ATTEND", "graph" }, { "EDGEKV_ATTEND", "node" } }) {
        // the ways a prompt can be read and attended to
        if (*variable) set_variable(variable, value);
        run(model, rnd, strcmp(variable, "EDGEKV_WHOLE") != 0);
        if (*variable) set_variable(variable, "");
    }
    llama_model_free(model);
    return finish();
}
