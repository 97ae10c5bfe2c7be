// self-test: before a device's kernels are used on rows of a type and size, they are held against
// the CPU's on a few rows. What was never run on the hardware at hand, or was compiled wrongly for
// it, then costs speed and not answers.
#include "edgekv-compute.h"
#include "edgekv-device.h"
#include "edgekv-log.h"
#include "edgekv-op.h"
#include "edgekv-kernels.h"

#include <random>
#include <stdexcept>

namespace {

constexpr int N_ROWS = 96, N_MANY = 600, N_LONG = 2200, N_HEAD = 4, N_HEAD_KV = 2, N_TOKENS = 8;
// products of halves are within 1e-5 and 2e-4
constexpr double MAX_NMSE = 1e-3, MAX_COSINE_ERROR = 5e-3;

// heads of different length, with rows behind the first that belong to nobody
constexpr int32_t HEADS[] = { 0, 50, 37, 46 }; // first row of each, length of each
constexpr int32_t LONG_HEADS[] = { 0, 1203, 1200, 990 };

// what a model's attention may have: tokens at once, a limit of its logits, sinks, windows, ALiBi,
// a part that was recalled
struct variant {
    int n_tokens;
    float softcap;
    bool has_sinks, has_windows, has_alibi, has_recalled = false;

    static constexpr float SINKS[N_HEAD] = { 0.5f, -1, 2, 0 };
    // first row that each token sees
    static constexpr int32_t START[N_TOKENS] = { 3, 20, 20, 21, 22, 30, 30, 31 };

    const float * sinks() const { return has_sinks ? SINKS : nullptr; }
    const int32_t * start() const { return has_windows ? START : nullptr; }
    float max_bias() const { return has_alibi ? 8.0f : 0.0f; }

    // token of each row, of which some are gone; null: it does not matter
    const float * pos() const {
        static const std::vector<float> all = [] {
            std::vector<float> x;
            for (int r = 0; r < N_ROWS; ++r) x.push_back((float) (r + r / 3));
            return x;
        }();
        return has_alibi ? all.data() : nullptr;
    }
};

constexpr variant VARIANTS[] = { { 5, 0, false, false, false }, { 1, 0, true, false, false },
    { 8, 2, false, true, false }, { 3, 0, false, false, true },
    { 2, 0, true, false, false, true } };

double nmse(const std::vector<float> & got, const std::vector<float> & expected) {
    double error = 0, square = 1e-30;
    for (size_t i = 0; i < got.size(); ++i) {
        error += ((double) got[i] - expected[i]) * ((double) got[i] - expected[i]);
        square += (double) expected[i] * expected[i];
    }
    return std::isfinite(error) ? error / square : INFINITY;
}

std::vector<float> normal(size_t n, int seed) {
    std::mt19937 g(seed);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> out(n);
    for (float & x : out) x = normal(g);
    return out;
}

// the same rows here and on the device
struct twin {
    std::vector<char> here;
    edgekv_matrix there;

    // the first N_MANY rows are drawn, those behind repeat them
    twin(ggml_backend_buffer_type_t buft, ggml_type type, int d, int seed, int n_rows = N_ROWS)
        : here(n_rows * ggml_row_size(type, d)),
          there(edgekv_matrix::make(buft, type, d, n_rows, "self-test")) {
        const int n_drawn = std::min(n_rows, N_MANY);
        const auto x = normal((size_t) n_drawn * d, seed);
        ggml_quantize_chunk(type, x.data(), here.data(), 0, n_drawn, d, nullptr);
        for (size_t i = n_drawn * ggml_row_size(type, d); i < here.size(); ++i)
            here[i] = here[i - n_drawn * ggml_row_size(type, d)];
        ggml_backend_tensor_set(there.t, here.data(), 0, here.size());
    }

    const ggml_tensor * t() const { return there.t; }
    edgekv_numbered at(char * base) const {
        return { base, t()->nb[1], t()->type, (int) t()->ne[0] };
    }
    edgekv_numbered at_home() { return at(here.data()); }
    edgekv_numbered abroad() const { return at((char *) t()->data); }

    std::vector<char> read() const {
        std::vector<char> out(here.size());
        ggml_backend_tensor_get(t(), out.data(), 0, out.size());
        return out;
    }
    std::vector<float> f32(const std::vector<char> & rows) const {
        std::vector<float> out((size_t) ggml_nelements(t()));
        edgekv_cpu().rows_to_f32(
            t()->type, rows.data(), t()->nb[1], 0, N_ROWS, (int) t()->ne[0], out.data());
        return out;
    }
};

edgekv_rows rows_of(const char * k, const char * v, const ggml_tensor * tk, const ggml_tensor * tv,
    const variant & x, const int32_t * heads = HEADS) {
    return { k, v, tk->nb[1], tv->nb[1], tk->type, tv->type, (int) tk->ne[0], (int) tv->ne[0],
        N_HEAD, N_HEAD_KV, heads, heads + N_HEAD_KV, 1 / std::sqrt((float) tk->ne[0]), x.softcap,
        x.sinks(), x.pos(), x.max_bias() };
}

edgekv_queries queries_of(const std::vector<float> & q, int d, const variant & x) {
    return { q.data(), N_HEAD * d, d, x.n_tokens, nullptr, x.start() };
}

// ---- score

struct columns {
    std::vector<float> sum, max, entropy, mean, m2;
    int64_t n_rows;

    columns(int64_t n_rows, bool has_moments) : n_rows(n_rows) {
        for (auto * x : { &sum, &max, &entropy }) x->assign(n_rows, 0.0f);
        for (auto * x : { &mean, &m2 })
            x->assign(has_moments ? N_HEAD / N_HEAD_KV * n_rows : 0, 0.0f);
    }
    static float * at(std::vector<float> & x) { return x.empty() ? nullptr : x.data(); }
    edgekv_columns c() { return { at(sum), at(max), at(entropy), at(mean), at(m2), n_rows, 0 }; }
};

bool scores(const edgekv_device & device, ggml_backend_buffer_type_t buft, const twin & keys,
    const variant & x, const int32_t * heads = HEADS, bool has_moments = true) {
    const int d = (int) keys.t()->ne[0];
    const auto q = normal((size_t) x.n_tokens * N_HEAD * d, 3);
    edgekv_queries qs = queries_of(q, d, x);
    edgekv_rows rows = rows_of(keys.here.data(), nullptr, keys.t(), keys.t(), x, heads);
    columns expected(keys.t()->ne[1], has_moments), got(keys.t()->ne[1], has_moments);
    std::vector<float> norm((size_t) 2 * N_HEAD * x.n_tokens);
    std::atomic<int32_t> next { 0 };
    edgekv_cpu().attend_prompt(&rows, &qs, nullptr, norm.data(), &next, 1);
    const auto here = expected.c();
    edgekv_cpu().score_columns(&rows, &qs, norm.data(), &here, 0, 1);
    rows.k = (const char *) keys.t()->data;
    edgekv_matrix work,
        queries = edgekv_matrix::make(buft, GGML_TYPE_F32, (int64_t) q.size(), 1, "self-test");
    ggml_backend_tensor_set(queries.t, q.data(), 0, q.size() * sizeof(float));
    qs.q = (const float *) queries.t->data;
    edgekv_device_columns there;
    there.begin(buft, got.c(), N_HEAD / N_HEAD_KV);
    device.score_columns(buft, work, rows, qs, there.at);
    there.fetch(got.c());
    for (auto x : { &columns::sum, &columns::max, &columns::entropy, &columns::mean, &columns::m2 })
        if (!(nmse(got.*x, expected.*x) < MAX_NMSE)) return false;
    return true;
}

// over rows and tokens that are several parts and several tiles of a kernel
bool scores_long(const edgekv_device & device, ggml_backend_buffer_type_t buft, const twin & keys) {
    constexpr variant many = { 40, 0, false, false, false };
    return scores(device, buft, keys, many, LONG_HEADS, true) &&
        scores(device, buft, keys, many, LONG_HEADS, false);
}

// ---- predict: rows enough for several blocks of a kernel

// no value is far off either
bool close(const std::vector<float> & got, const std::vector<float> & expected) {
    double square = 0, worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        square += (double) expected[i] * expected[i] / expected.size();
        worst = std::max(worst, std::fabs((double) got[i] - expected[i]));
    }
    return nmse(got, expected) < MAX_NMSE && worst < 0.1 * std::sqrt(square);
}

bool predicts_right(const edgekv_device & device, ggml_backend_buffer_type_t buft, twin & keys,
    twin & values, bool other) {
    const int d_k = (int) keys.t()->ne[0], d_v = (int) values.t()->ne[0];
    const auto weights = normal((size_t) d_v + d_k / 2 + 4, 5);
    const edgekv_map map = { weights.data(), other, other ? d_k & -d_k : 0,
        other ? d_v & -d_v : 0 };
    const auto k = keys.at_home(), v = values.at_home();
    std::vector<float> sum(d_k), expected(N_MANY), expected_unlike(N_MANY), out(N_MANY),
        unlike(N_MANY);
    edgekv_cpu().key_sum(&k, 0, N_MANY, sum.data());
    edgekv_cpu().predict(
        &k, &v, sum.data(), &map, 0, N_MANY, expected.data(), expected_unlike.data());
    edgekv_matrix work;
    device.predict_rows(
        buft, work, keys.abroad(), values.abroad(), map, N_MANY, out.data(), unlike.data());
    return close(out, expected) && close(unlike, expected_unlike);
}

// ---- merge

bool finds_nearest(const edgekv_device & device, ggml_backend_buffer_type_t buft, twin & keys) {
    std::vector<int32_t> gone, kept;
    for (int i = 0; i < N_MANY; ++i) (i % 3 ? gone : kept).push_back(i);
    std::vector<float> cosine(gone.size()), expected(gone.size());
    std::vector<int32_t> nearest(gone.size(), -1), expected_nearest(gone.size());
    const auto home = keys.at_home();
    edgekv_cpu().merge_nearest(&home, gone.data(), (int) gone.size(), kept.data(),
        (int) kept.size(), expected.data(), expected_nearest.data(), 0, 1);
    edgekv_matrix work;
    device.find_nearest(buft, work, keys.abroad(), gone, kept, cosine.data(), nearest.data());
    size_t n_same = 0;
    for (size_t i = 0; i < gone.size(); ++i) {
        if (!(std::fabs(cosine[i] - expected[i]) < MAX_COSINE_ERROR)) return false;
        n_same += nearest[i] == expected_nearest[i];
    }
    return 10 * n_same > 8 * gone.size(); // two may be as near but for rounding
}

bool folds(const edgekv_device & device, ggml_backend_buffer_type_t buft, twin & rows) {
    const int32_t to[] = { 3, 40, 95 }, counts[] = { 2, 0, 3 }, sources[] = { 7, 8, 1, 50, 51 };
    const float own[] = { 0.5f, 1.0f, 0.25f }, weights[] = { 0.25f, 0.25f, 0.25f, 0.3f, 0.2f };
    const edgekv_shares shares = { 3, to, own, counts, sources, weights };
    const auto home = rows.at_home();
    edgekv_cpu().merge_fold(&home, &shares);
    edgekv_matrix work;
    device.fold(buft, work, rows.abroad(), shares);
    const auto got = rows.read();
    const size_t nb = rows.t()->nb[1];
    for (int i = 0; i < N_ROWS; ++i) {
        if (std::find(std::begin(to), std::end(to), i) == std::end(to) &&
            memcmp(&got[i * nb], &rows.here[i * nb], nb))
            return false;
    }
    return nmse(rows.f32(got), rows.f32(rows.here)) < MAX_NMSE;
}

// ---- attend

void not_here(ggml_tensor *, int, int, void *) {}

// [n_tokens][N_HEAD][2 + d_v]; one head of the first token has recalled nothing
std::vector<float> recalled_of(const variant & x, size_t d_v) {
    if (!x.has_recalled) return {};
    auto parts = normal((size_t) x.n_tokens * N_HEAD * (2 + d_v), 7);
    for (size_t i = 1; i < parts.size(); i += 2 + d_v) parts[i] = 2 + std::fabs(parts[i]);
    std::fill_n(parts.begin(), 2 + d_v, 0.0f);
    parts[0] = -INFINITY;
    return parts;
}

std::vector<float> attended(
    const edgekv_rows & rows, const edgekv_queries & qs, const std::vector<float> & recalled) {
    std::vector<float> parts((size_t) qs.n_tokens * N_HEAD * (2 + rows.d_v)),
        out((size_t) qs.n_tokens * N_HEAD * rows.d_v);
    edgekv_cpu().attend_part(&rows, &qs, parts.data(), 0, 1);
    parts.insert(parts.end(), recalled.begin(), recalled.end());
    edgekv_cpu().attend_combine(
        &rows, qs.n_tokens, parts.data(), recalled.empty() ? 1 : 2, out.data(), 0, 1);
    return out;
}

bool attends_right(ggml_backend_dev_t dev, const twin & k, const twin & v, const variant & x,
    const std::vector<int32_t> & where, int n_times = 1) {
    const ggml_backend_ptr backend { ggml_backend_dev_init(dev, nullptr) };
    if (!backend) return false;
    const int64_t d_k = k.t()->ne[0], d_v = v.t()->ne[0];
    const auto q = normal((size_t) x.n_tokens * N_HEAD * d_k, 4), parts = recalled_of(x, d_v);
    std::vector<int32_t> table = where;
    if (x.has_windows) table.insert(table.end(), x.start(), x.start() + x.n_tokens);
    std::vector<float> got((size_t) x.n_tokens * N_HEAD * d_v);
    ggml_tensor *queries = nullptr, *heads = nullptr, *sinks = nullptr, *pos = nullptr,
                *recalled = nullptr;
    auto send = [](ggml_tensor * to, const void * from) {
        if (to) ggml_backend_tensor_set(to, from, 0, ggml_nbytes(to));
    };
    edgekv_compute(
        backend.get(),
        [&](ggml_context * c0) {
            queries = ggml_new_tensor_3d(c0, GGML_TYPE_F32, d_k, N_HEAD, x.n_tokens);
            heads = ggml_new_tensor_1d(c0, GGML_TYPE_I32, (int64_t) table.size());
            if (x.has_sinks) sinks = ggml_new_tensor_1d(c0, GGML_TYPE_F32, N_HEAD);
            if (x.has_alibi) pos = ggml_new_tensor_1d(c0, GGML_TYPE_F32, N_ROWS);
            if (x.has_recalled)
                recalled = ggml_new_tensor_3d(c0, GGML_TYPE_F32, 2 + d_v, N_HEAD, x.n_tokens);
            ggml_tensor * a[] = { queries, k.there.t, v.there.t, heads, sinks, pos, recalled };
            ggml_tensor * node = ggml_custom_4d(
                c0, GGML_TYPE_F32, d_v, N_HEAD, x.n_tokens, 1, a, 7, not_here, 1, nullptr);
            edgekv_op_set(node, N_HEAD_KV, 1 / std::sqrt((float) d_k), x.softcap, x.max_bias());
            return node;
        },
        [&] {
            send(queries, q.data());
            send(heads, table.data());
            send(sinks, variant::SINKS);
            send(pos, x.pos());
            send(recalled, parts.data());
        },
        [&](const ggml_tensor * out) {
            ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
        },
        n_times);
    return nmse(got,
               attended(rows_of(k.here.data(), v.here.data(), k.t(), v.t(), x, where.data()),
                   queries_of(q, (int) d_k, x), parts)) < MAX_NMSE;
}

// Over so many rows that each part of the device's has several tiles, one of them those of two
// heads: only then does a copy go on while another tile is worked on, and do warps have sums to
// add. Three times, so that a graph of the device's is recorded and replayed.
bool attends_long(const edgekv_device & device, ggml_backend_dev_t dev,
    ggml_backend_buffer_type_t buft, const twin & k, const twin & v) {
    constexpr int ROWS_OF_PART = 8 * 16;
    constexpr variant one = { 1, 0, false, false, false };
    const edgekv_rows like = rows_of(nullptr, nullptr, k.t(), v.t(), one);
    const int n = std::clamp(device.attend_parts(&like), 1, 1024) * ROWS_OF_PART,
              n_first = n / 8 * 5 + 3;
    const twin many_k(buft, k.t()->type, (int) k.t()->ne[0], 5, n),
        many_v(buft, v.t()->type, (int) v.t()->ne[0], 6, n);
    return attends_right(dev, many_k, many_v, one, { 0, n_first + 4, n_first, n - n_first - 9 }, 3);
}

template <typename F>
bool in_every_variant(F && passes) {
    for (const variant & x : VARIANTS)
        if (!passes(x)) return false;
    return true;
}

// lines not yet logged: most self-tests are made while a context is created, when bindings silence
// llama.cpp
struct {
    std::mutex mutex;
    std::vector<std::string> lines;
} pending;

// what the self-test says; an error is a no
template <typename T>
bool passes(ggml_backend_dev_t dev, const std::string & what, T && test) {
    std::string why = "they compute something else than the CPU";
    try {
        if (test()) return true;
    } catch (const std::bad_alloc &) {
        throw; // says nothing about kernels
    } catch (const std::exception & e) { why = e.what(); }
    edgekv_device::left_alone(dev, what, why + "; please report it");
    return false;
}

} // namespace

void edgekv_device::left_alone(
    ggml_backend_dev_t dev, const std::string & what, const std::string & why) {
    const std::lock_guard<std::mutex> lock(pending.mutex);
    pending.lines.push_back(std::string("the kernels of ") + ggml_backend_dev_name(dev) + " for " +
        what + " are left alone: " + why);
}

void edgekv_device::report() {
    const std::lock_guard<std::mutex> lock(pending.mutex);
    for (const auto & line : pending.lines) edgekv_say(line.c_str());
    pending.lines.clear();
}

static bool moves(
    const edgekv_device & device, ggml_backend_buffer_type_t buft, ggml_type type, int d) {
    const twin from(buft, type, d, 1), to(buft, type, d, 2);
    std::vector<int32_t> index;
    for (int i = 0; i < 40; ++i) index.push_back((7 * i + 5) % (N_ROWS - 10));
    const auto there =
        edgekv_matrix::make(buft, GGML_TYPE_I32, (int64_t) index.size(), 1, "self-test");
    ggml_backend_tensor_set(there.t, index.data(), 0, ggml_nbytes(there.t));
    device.move_rows(
        from.t(), (const int32_t *) there.t->data, 10, to.there.t, 3, (int) index.size());
    device.move_rows(from.t(), nullptr, 20, to.there.t, 50, 11);
    auto expected = to.here;
    const size_t nb = to.t()->nb[1];
    for (size_t i = 0; i < index.size(); ++i)
        memcpy(&expected[(3 + i) * nb], &from.here[(10 + index[i]) * nb], nb);
    memcpy(&expected[50 * nb], &from.here[20 * nb], 11 * nb);
    return to.read() == expected;
}

// rows of a multiple of 16, of 4 and of 2 bytes: kernels may be different ones
bool edgekv_device::moves_right() const {
    try {
        return passes(dev, "moving rows", [&] {
            return moves(*this, buft, GGML_TYPE_F16, 64) &&
                moves(*this, buft, GGML_TYPE_Q8_0, 128) && moves(*this, buft, GGML_TYPE_Q8_0, 32);
        });
    } catch (const std::bad_alloc &) {
        left_alone(dev, "everything", "there is no memory to try them");
        return false;
    }
}

static std::string rows_named(ggml_type type, int d) {
    return std::string(ggml_type_name(type)) + " rows of " + std::to_string(d);
}

static std::string rows_named(ggml_type type_k, int d_k, ggml_type type_v, int d_v) {
    return rows_named(type_k, d_k) + " and " + rows_named(type_v, d_v);
}

bool edgekv_device::takes(ggml_type type, int d) const {
    if (!attend_supports(type, type, d, d)) return false;
    return tried(rows_named(type, d), [&] {
        twin rows(buft, type, d, 1), many(buft, type, d, 1, N_LONG);
        return in_every_variant([&](const variant & x) { return scores(*this, buft, rows, x); }) &&
            scores_long(*this, buft, many) && finds_nearest(*this, buft, many) &&
            folds(*this, buft, rows);
    });
}

bool edgekv_device::attends(ggml_type type_k, ggml_type type_v, int d_k, int d_v) const {
    if (!attend_supports(type_k, type_v, d_k, d_v)) return false;
    return tried("attention over " + rows_named(type_k, d_k, type_v, d_v), [&] {
        const twin k(buft, type_k, d_k, 1), v(buft, type_v, d_v, 2);
        const std::vector<int32_t> few(std::begin(HEADS), std::end(HEADS));
        return in_every_variant(
                   [&](const variant & x) { return attends_right(dev, k, v, x, few); }) &&
            (!attend_parts || attends_long(*this, dev, buft, k, v));
    });
}

bool edgekv_device::predicts(ggml_type type_k, ggml_type type_v, int d_k, int d_v) const {
    if (!predict || !attend_supports(type_k, type_v, d_k, d_v)) return false;
    return tried("kvzap's maps of " + rows_named(type_k, d_k, type_v, d_v), [&] {
        twin k(buft, type_k, d_k, 1, N_MANY), v(buft, type_v, d_v, 2, N_MANY);
        return predicts_right(*this, buft, k, v, false) && predicts_right(*this, buft, k, v, true);
    });
}

bool edgekv_device::tried(const std::string & what, const std::function<bool()> & test) const {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto it = outcomes.find(what);
    if (it != outcomes.end()) return it->second;
    try {
        return outcomes[what] = passes(dev, what, test);
    } catch (const std::bad_alloc &) {
        return false; // this time: there is no room to try
    }
}
