// Products of quantised weights with many tokens, for the registers that this file is compiled for
#include "edgekv-cpu.h"
#include "edgekv-fastest.h"
#include "edgekv-few.h"
#include "edgekv-int8.h"
#include "edgekv-product.h"

#include "ggml-backend-impl.h"
#include "repack.h"

#include <cstdlib>
#include <numeric>
#include <vector>

using namespace edgekv;

// tokens that an expert has on average from which its weights are worth unpacking: llama.cpp
// multiplies each of them by itself
constexpr int64_t EXPERT_MIN = 8;
constexpr size_t SPARE = LINE / sizeof(uint32_t); // words, so that the others can be aligned

// Multiply-adds of one thread in a second, with what is multiplied in the nearest cache. TIMES
// products take about a hundred times as long as the clock's step, or longer.
template <class W>
static double peak(int64_t us) {
    using kernel = product<W>;
    constexpr int N_IN = 128, P = kernel::P, ROWS = W::ROWS, TIMES = 1000;
    [[maybe_unused]] const typename W::scope scope;
    std::vector<uint32_t> tokens(kernel::n_all_words(N_IN, ROWS) + SPARE),
        panel(kernel::panel_size(N_IN) + SPARE);
    std::vector<float> sums((size_t) P * ROWS);
    const kernel p = { {}, N_IN, P, ROWS, nullptr, sums.data(), aligned(tokens.data()) };
    double most = 0;
    for (const int64_t begin = ggml_time_us(); ggml_time_us() < begin + us;) {
        const int64_t now = ggml_time_us();
        for (int i = 0; i < TIMES; ++i)
            p.block(aligned(panel.data()), 0, 0, 0, kernel::n_words(N_IN));
        const auto took = (double) std::max<int64_t>(1, ggml_time_us() - now);
        most = std::max(most, 1e6 * TIMES * N_IN * P * ROWS / took);
    }
    return most;
}

#if EDGEKV_INT8
#if EDGEKV_PAIRS
// Pairs of bf16 round less, so levels have to be faster by a seventh. Both are timed in turns, and
// most turns decide: the processor may wake up, or another program have the core, in any of them.
// The choice changes how results are rounded, so chance must not make it.
static bool levels_beat_pairs() {
    constexpr int TURNS = 9;
    int n_won = 0;
    for (int i = 0; i < TURNS; ++i)
        n_won += peak<int8_words<true>>(1000) > 8.0 / 7 * peak<bf16_words>(1000);
    return n_won > TURNS / 2;
}
#else
static bool levels_beat_pairs() { return true; }
#endif

static bool multiplies_levels() {
    static const bool does = [] {
        const char * set = std::getenv("EDGEKV_LEVELS");
        if (set && *set) return *set != '0';
        return !has_tiles() && (!has_fast_pairs() || levels_beat_pairs());
    }();
    return does;
}
#endif

// f(words): for products with weights of a type
template <class F>
static auto with_words(ggml_type type, F && f) {
#if EDGEKV_INT8
    const level_form form = form_of(type);
    if (form.most > 0 && form.most <= byte_products::MOST && multiplies_levels()) {
        if (form.two_scales) return f(int8_words<false, 8, 2>());
        if (form.of_eight) return f(int8_words<true, 8>());
        return form.low ? f(int8_words<true>()) : f(int8_words<false>());
    }
#else
    (void) type;
#endif
    return with_fastest([&](auto, auto words) { return f(words); });
}

static bool multiplies_f32(ggml_type type) {
    return with_words(type, [](auto words) { return words.PER == 1; });
}

// Whether unpacked weights are multiplied by VNNI: what is unpacked once then pays for fewer tokens
// than elsewhere, where that was not measured (edgekv-lab drafts --rows)
static bool is_quick(ggml_type type) {
#if EDGEKV_INT8 && (defined(__AVX512VNNI__) || defined(__AVXVNNI__))
    return with_words(type, [](auto words) { return words.LEVELS; });
#else
    (void) type;
    return false;
#endif
}

// tokens from which weights as in their file are taken
static int64_t product_min(ggml_type type) {
    if (!is_quick(type)) return EDGEKV_PRODUCT_MIN;
    switch (type) {
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K: return 40;
        case GGML_TYPE_Q6_K: return 12;
        default: return 8;
    }
}

int64_t edgekv_cpu_product_min_repacked(ggml_type type) {
#if defined(__aarch64__)
    // llama.cpp's have the same instructions there, and which are faster was not measured
    (void) type;
    return INT64_MAX;
#else
    if (is_quick(type)) return type == GGML_TYPE_Q4_0 ? 16 : 24;
    return with_words(type, [](auto words) -> int64_t {
        return words.TILES ? EDGEKV_PRODUCT_MIN : words.PER > 1 ? 160 : INT64_MAX;
    });
#endif
}

// whether the CPU backend has repacked a weight
static bool stand_side_by_side(const ggml_tensor * w) {
    return w->buffer && w->buffer->buft == ggml_backend_cpu_repack_buffer_type() && w->extra;
}

size_t edgekv_cpu_product_words(const ggml_tensor * node) {
    const ggml_tensor *w = node->src[0], *x = node->src[1], *ids = node->src[2];
    const bool by_expert = node->op == GGML_OP_MUL_MAT_ID;
    if ((node->op != GGML_OP_MUL_MAT && !by_expert) || !w->buffer) return 0;
    const bool is_plain = x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) &&
        ggml_is_contiguous(w) && ggml_is_contiguous(node) && w->ne[3] == 1 && x->ne[3] == 1;
    if (!is_plain || (!by_expert && w->ne[2] != 1)) return 0;
    return edgekv_cpu_product_room(w, by_expert ? ggml_nelements(ids) : ggml_nrows(x));
}

size_t edgekv_cpu_product_room(const ggml_tensor * w, int64_t n_tokens) {
    const int64_t n_expert = w->ne[2], n_each = n_tokens / n_expert;
    if (!ggml_is_quantized(w->type) || n_tokens > INT32_MAX / 2) return 0;
    auto * buft = w->buffer ? w->buffer->buft : nullptr;
    const bool repacked = stand_side_by_side(w);
    if (buft && buft != ggml_backend_cpu_repack_buffer_type() && !ggml_backend_buft_is_host(buft))
        return 0;
    const bool is_known = !repacked || (w->ne[1] % 8 == 0 && knows_side_by_side(w->type));
    if (const size_t n = is_known ? few_words(w, n_tokens, repacked) : 0) return n;
    const int64_t min_repacked = edgekv_cpu_product_min_repacked(w->type);
    if (n_expert > 1 && multiplies_f32(w->type)) return 0; // f32 is slower for few tokens
    if (n_expert > 1 ? n_each < EXPERT_MIN || (repacked && min_repacked == INT64_MAX)
                     : n_each < (repacked ? min_repacked : product_min(w->type)))
        return 0;
    if (!is_known) return 0;
    return with_words(w->type, [&](auto words) {
        using kernel = product<decltype(words)>;
        // each expert's tokens are filled up
        const int64_t n_all = n_expert > 1 ? n_tokens + n_expert * (words.ROWS - 1) : n_tokens;
        return kernel::n_all_words((int) w->ne[0], (int) n_all) + SPARE;
    });
}

size_t edgekv_cpu_product_unpacked(const ggml_tensor * w, int64_t n_tokens) {
    const int64_t n_in = w->ne[0], n_rows = w->ne[1];
    if (w->ne[2] > 1) return 0; // all experts together are too many
    if (few_words(w, n_tokens, stand_side_by_side(w))) return 0;
    return with_words(w->type, [&](auto words) -> size_t {
        using kernel = product<decltype(words)>;
        // f32 is multiplied so slowly that unpacking is nothing beside it
        if (words.PER == 1 || n_in > INT32_MAX / 2 || n_rows > INT32_MAX / 2) return 0;
        return kernel::n_panels((int) n_rows) * kernel::panel_size((int) n_in) + SPARE;
    });
}

// what a node is made of: one product, or one for each expert that has tokens; at: their rows
template <class W>
static std::vector<product<W>> products_of(
    const ggml_tensor * node, uint32_t * words, std::vector<int32_t> & at) {
    const ggml_tensor *w = node->src[0], *x = node->src[1], *ids = node->src[2];
    const bool sides = stand_side_by_side(w);
    product<W> p = { { (const char *) w->data, w->nb[1], w->type, sides }, (int) w->ne[0],
        (int) w->ne[1], (int) ggml_nrows(x), (const float *) x->data, (float *) node->data, words };
    if (!ids) return { p };

    const auto n_used = (int) ids->ne[0], n = (int) ggml_nelements(ids), n_expert = (int) w->ne[2];
    const auto expert = [&](int i) {
        const char * row = (const char *) ids->data + i / n_used * ids->nb[1];
        return *(const int32_t *) (row + i % n_used * ids->nb[0]);
    };
    std::vector<int32_t> ends(n_expert + 1); // in `at`, of the experts before
    for (int i = 0; i < n; ++i) ++ends[expert(i) + 1];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    at.resize(n);
    for (int i = 0; i < n; ++i) at[ends[expert(i)]++] = i;

    std::vector<product<W>> found;
    p.share = x->ne[1] == 1 ? n_used : 1;
    for (int e = 0, begin = 0; e < n_expert; begin = ends[e++]) {
        p.n_tokens = ends[e] - begin;
        p.at = at.data() + begin;
        p.w.data = (const char *) w->data + e * w->nb[2];
        if (p.n_tokens == 0) continue;
        found.push_back(p);
        p.words += product<W>::n_all_words(p.n_in, p.n_tokens);
    }
    return found;
}

template <class W>
static void run(ggml_tensor * node, int ith, int nth, edgekv_product_job & job) {
    static thread_local typename product<W>::workspace workspace;
    static thread_local std::vector<int32_t> at;
    const auto products = products_of<W>(node, aligned(job.words), at);
    if (!job.has_words) {
        for (const auto & p : products) p.make_words(ith, nth);
        wait_for_words(job, nth);
    }
    int taken = job.next++, before = 0;
    for (const auto & p : products) {
        p.run_after(before, workspace, job.next, taken, nth,
            job.unpacked ? aligned(job.unpacked) : nullptr, job.is_unpacked);
        before += p.n_groups(nth);
    }
}

void edgekv_cpu_product(ggml_tensor * dst, int ith, int nth, void * data) {
    auto & job = *(edgekv_product_job *) data;
    const int64_t begin = ggml_time_us();
    const ggml_tensor * w = dst->src[0];
    const bool sides = stand_side_by_side(w);
    if (dst->src[2] == nullptr && few_words(w, ggml_nrows(dst), sides)) {
        few_run(dst, sides, ith, nth, job);
        if (ith == 0) job.levels = true;
    } else
        with_words(w->type, [&](auto words) {
            run<decltype(words)>(dst, ith, nth, job);
            if (ith == 0) {
                job.levels = words.LEVELS;
                job.has_unpacked = job.unpacked != nullptr;
            }
        });
    if (ith == 0) job.ms = (double) (ggml_time_us() - begin) / 1e3;
}

double edgekv_cpu_product_peak(bool levels) {
    return with_words(levels ? GGML_TYPE_Q4_0 : GGML_TYPE_COUNT,
        [](auto words) { return peak<decltype(words)>(20000); });
}
