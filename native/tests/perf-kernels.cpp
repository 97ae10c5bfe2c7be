// Prompt attention alone: our kernel beside ggml's flash attention over the same rows, the sums of
// its columns, and the processor's own f32 speed.
//     test-kernels --perf [threads] [repetitions]
// One JSON object per line: first {"peak_gflops"}, then one per case. The queries are the last
// chunk of a prompt. Everything of a case is run in turn, and the shortest of the repetitions
// counts, because other work of the machine only ever adds time.
#include "check.h"
#include "modes.h"
#include "cpu/edgekv-cpu.h"
#include "cpu/edgekv-lanes.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <vector>

namespace {

struct bench_case {
    ggml_type type;
    int d, group, n_head_kv, n_rows, n_tokens;
};

const bench_case CASES[] = {
    { GGML_TYPE_F16, 64, 3, 3, 512, 512 },
    { GGML_TYPE_F16, 64, 3, 3, 2048, 512 },
    { GGML_TYPE_F16, 64, 3, 3, 6144, 512 },
    { GGML_TYPE_Q8_0, 64, 3, 3, 512, 512 },
    { GGML_TYPE_Q8_0, 64, 3, 3, 2048, 512 },
    { GGML_TYPE_Q8_0, 64, 3, 3, 6144, 512 },
    { GGML_TYPE_Q4_0, 64, 3, 3, 2048, 512 },
    { GGML_TYPE_F16, 64, 4, 8, 2048, 512 },
    { GGML_TYPE_F16, 128, 4, 2, 2048, 512 },
    { GGML_TYPE_Q8_0, 128, 4, 2, 2048, 512 },
    { GGML_TYPE_F16, 96, 1, 4, 2048, 512 },
    { GGML_TYPE_F16, 256, 2, 2, 2048, 512 },
};

using context_ptr = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using backend_ptr =
    std::unique_ptr<std::remove_pointer_t<ggml_backend_t>, decltype(&ggml_backend_free)>;

// one thread: its processor time, which a busy machine hardly changes; several: wall time, because
// they wait for each other
double now(int n_threads) {
    if (n_threads == 1) return (double) std::clock() / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

struct runner {
    int n_threads;
    backend_ptr backend { ggml_backend_cpu_init(), ggml_backend_free };
    explicit runner(int n_threads) : n_threads(n_threads) {
        ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    }
    double seconds(ggml_cgraph * gf) const {
        const double start = now(n_threads);
        ggml_backend_graph_compute(backend.get(), gf);
        return now(n_threads) - start;
    }
};

ggml_cgraph * graph_of(ggml_context * ctx, ggml_tensor * t) {
    ggml_cgraph * gf = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, t);
    return gf;
}

// ---- the processor's speed: independent chains of multiply-adds in registers

constexpr int N_CHAINS = 12, N_STEPS = 4000000;

void peak_node(ggml_tensor * dst, int ith, int, void *) {
    using L = edgekv::best_lanes;
    L::reg x[N_CHAINS];
    for (int i = 0; i < N_CHAINS; ++i) x[i] = L::set(1.0f + i);
    for (int s = 0; s < N_STEPS; ++s)
        for (auto & y : x) y = L::fma(y, L::set(0.999f), L::set(0.001f));
    for (const auto & y : x) L::store((float *) dst->data + L::N * ith, y);
}

double peak_gflops(const runner & r, int n_repeat) {
    context_ptr ctx(ggml_init({ 1 << 20, nullptr, false }), ggml_free);
    ggml_tensor * t = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, edgekv::best_lanes::N, r.n_threads,
        1, 1, nullptr, 0, peak_node, GGML_N_TASKS_MAX, nullptr);
    ggml_cgraph * gf = graph_of(ctx.get(), t);
    double best = INFINITY;
    for (int i = 0; i < n_repeat; ++i) best = std::min(best, r.seconds(gf));
    return 2.0 * edgekv::best_lanes::N * N_CHAINS * N_STEPS * r.n_threads / best * 1e-9;
}

// ---- attention

struct attention {
    std::vector<int32_t> first, len;
    edgekv_rows rows;
    edgekv_queries qs;
    std::vector<float> norm, sums;
    edgekv_columns columns {};
    std::atomic<int32_t> next { 0 };
};

void ours_node(ggml_tensor * dst, int, int nth, void * data) {
    auto & a = *(attention *) data;
    edgekv_cpu_attend_prompt(&a.rows, &a.qs, (float *) dst->data, a.norm.data(), &a.next, nth);
}

// what is multiplied in the fastest form that the processor has
void rounded_node(ggml_tensor * dst, int, int nth, void * data) {
    auto & a = *(attention *) data;
    auto rows = a.rows;
    rows.rounded = true;
    edgekv_cpu_attend_prompt(&rows, &a.qs, (float *) dst->data, a.norm.data(), &a.next, nth);
}

void columns_node(ggml_tensor *, int ith, int nth, void * data) {
    const auto & a = *(const attention *) data;
    edgekv_cpu_score_columns(&a.rows, &a.qs, a.norm.data(), &a.columns, ith, nth);
}

void fill(ggml_tensor * t, random_source & rnd) {
    std::vector<float> x(ggml_nelements(t));
    for (float & y : x) y = rnd.normal();
    if (t->type == GGML_TYPE_F32) std::copy(x.begin(), x.end(), (float *) t->data);
    else ggml_quantize_chunk(t->type, x.data(), t->data, 0, ggml_nrows(t), t->ne[0], nullptr);
}

void fill_causal(ggml_tensor * mask, int n_before) {
    auto * m = (ggml_fp16_t *) mask->data;
    for (int64_t t = 0; t < mask->ne[1]; ++t)
        for (int64_t r = 0; r < mask->ne[0]; ++r)
            *m++ = ggml_fp32_to_fp16(r <= n_before + t ? 0.0f : -INFINITY);
}

void run(const runner & r, const bench_case & c, int n_repeat) {
    random_source rnd(1);
    const int n_head = c.group * c.n_head_kv, n_before = c.n_rows - c.n_tokens;
    const size_t n_values = (size_t) c.d * (2 * c.n_rows * c.n_head_kv + 4 * c.n_tokens * n_head) +
        (size_t) c.n_rows * c.n_tokens;
    context_ptr ctx(ggml_init({ 4 * n_values + (1 << 20), nullptr, false }), ggml_free);
    ggml_tensor * q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, c.d, c.n_tokens, n_head);
    ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), c.type, c.d, c.n_rows, c.n_head_kv);
    ggml_tensor * v = ggml_new_tensor_3d(ctx.get(), c.type, c.d, c.n_rows, c.n_head_kv);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, c.n_rows, c.n_tokens);
    for (auto * t : { q, k, v }) fill(t, rnd);
    fill_causal(mask, n_before);
    const float scale = 1.0f / std::sqrt((float) c.d);

    attention a;
    for (int h = 0; h < c.n_head_kv; ++h) {
        a.first.push_back(h * c.n_rows);
        a.len.push_back(c.n_rows);
    }
    a.rows = { (const char *) k->data, (const char *) v->data, k->nb[1], v->nb[1], c.type, c.type,
        c.d, c.d, n_head, c.n_head_kv, a.first.data(), a.len.data(), scale, 0.0f, nullptr };
    a.qs = { (const float *) q->data, (int64_t) c.d, (int64_t) c.d * c.n_tokens, c.n_tokens,
        nullptr, nullptr };
    a.norm.resize((size_t) 2 * n_head * c.n_tokens);
    a.sums.resize((size_t) c.n_rows * c.n_head_kv);
    a.columns.sum = a.sums.data();

    ggml_tensor * stock = ggml_flash_attn_ext(ctx.get(), q, k, v, mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(stock, GGML_PREC_F32);
    ggml_tensor * ours = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, c.d, n_head, c.n_tokens, 1,
        nullptr, 0, ours_node, GGML_N_TASKS_MAX, &a);
    ggml_tensor * columns = ggml_custom_4d(
        ctx.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, columns_node, GGML_N_TASKS_MAX, &a);
    ggml_tensor * rounded = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, c.d, n_head, c.n_tokens, 1,
        nullptr, 0, rounded_node, GGML_N_TASKS_MAX, &a);
    ggml_cgraph * graphs[] = { graph_of(ctx.get(), stock), graph_of(ctx.get(), rounded),
        graph_of(ctx.get(), ours), graph_of(ctx.get(), columns) };
    double best[] = { INFINITY, INFINITY, INFINITY, INFINITY };
    for (int i = 0; i < n_repeat; ++i)
        for (int j : { 0, 1, 2, 3 }) {
            a.next = 0;
            best[j] = std::min(best[j], r.seconds(graphs[j]));
        }

    nmse error, of_rounded;
    for (int64_t i = 0; i < ggml_nelements(ours); ++i) {
        const float x = ((const float *) ours->data)[i];
        error.add(x, ((const float *) stock->data)[i]);
        of_rounded.add(((const float *) rounded->data)[i], x);
    }
    const double pairs = n_head *
        (c.n_tokens * (double) n_before + 0.5 * c.n_tokens * (c.n_tokens + 1.0)),
                 gflop = 4e-9 * c.d * pairs;
    printf(
        "{\"type\": \"%s\", \"d\": %d, \"n_head\": %d, \"n_head_kv\": %d, \"n_rows\": %d, \"n_tokens\": %d, \"stock_ms\": %.2f, \"ours_ms\": %.2f, "
        "\"rounded_ms\": %.2f, \"columns_ms\": %.2f, \"stock_gflops\": %.1f, \"ours_gflops\": %.1f, \"rounded_gflops\": %.1f, \"difference\": %.2g, \"of_rounded\": %.2g}\n",
        ggml_type_name(c.type), c.d, n_head, c.n_head_kv, c.n_rows, c.n_tokens, 1e3 * best[0],
        1e3 * best[2], 1e3 * best[1], 1e3 * best[3], gflop / best[0], gflop / best[2],
        gflop / best[1], error.value(), of_rounded.value());
    fflush(stdout);
}

} // namespace

int perf(int argc, char ** argv) {
    const int n_threads = argc > 1 ? atoi(argv[1]) : 1, n_repeat = argc > 2 ? atoi(argv[2]) : 5;
    const runner r(n_threads);
    printf("{\"n_threads\": %d, \"peak_gflops\": %.1f}\n", n_threads, peak_gflops(r, 3 * n_repeat));
    for (const auto & c : CASES) run(r, c, n_repeat);
    return 0;
}
