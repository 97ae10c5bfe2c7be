// Products of a quantised weight by their number of tokens: llama.cpp's and ours, in turns.
//     test-product --perf [threads] [repetitions]
// Weights lie as the CPU backend keeps them, and are larger than caches. One JSON object per line:
// milliseconds, the shortest of the repetitions (of one thread its processor time), and those that
// reading the weight once takes.
#include "check.h"
#include "modes.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-cpu.h"
#include "repack.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int N_IN = 2048, N_ROWS = 49152, SAME = 64; // rows that are quantised, and repeated
constexpr ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K,
    GGML_TYPE_Q6_K };

using backend_ptr =
    std::unique_ptr<std::remove_pointer_t<ggml_backend_t>, decltype(&ggml_backend_free)>;
using context_ptr = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using buffer_ptr = std::unique_ptr<std::remove_pointer_t<ggml_backend_buffer_t>,
    decltype(&ggml_backend_buffer_free)>;

template <class F>
double seconds(int n_threads, F && f) {
    const auto now = [n_threads] {
        if (n_threads == 1) return (double) std::clock() / CLOCKS_PER_SEC;
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration<double>(since).count();
    };
    const double start = now();
    f();
    return now() - start;
}

template <class F>
void in_threads(int n, F && f) {
    std::vector<std::thread> others;
    for (int i = 1; i < n; ++i) others.emplace_back(f, i);
    f(0);
    for (auto & t : others) t.join();
}

context_ptr new_context() {
    return { ggml_init({ 4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }),
        ggml_free };
}

void put_weight(ggml_tensor * w) {
    random_source rnd(5);
    std::vector<float> values((size_t) SAME * N_IN);
    for (float & v : values) v = rnd.normal();
    std::vector<char> rows(ggml_nbytes(w));
    const std::vector<float> weights(N_IN, 1.0f);
    ggml_quantize_chunk(w->type, values.data(), rows.data(), 0, SAME, N_IN, weights.data());
    const size_t part = SAME * ggml_row_size(w->type, N_IN);
    for (size_t i = part; i < rows.size(); i += part) memcpy(&rows[i], rows.data(), part);
    ggml_backend_tensor_set(w, rows.data(), 0, rows.size());
}

void read_all(const ggml_tensor * w, int ith, int nth) {
    const size_t n = ggml_nbytes(w) / 8 / nth;
    const auto * words = (const uint64_t *) w->data + n * ith;
    uint64_t sums[32] = {};
    for (size_t i = 0; i + 32 <= n; i += 32)
        for (int k = 0; k < 32; ++k) sums[k] += words[i + k];
    volatile uint64_t kept = 0;
    for (uint64_t sum : sums) kept = kept + sum;
}

void measure(ggml_type type, bool sides, int n_threads, int n_reps, ggml_backend_t backend) {
    const context_ptr of_weight = new_context();
    ggml_tensor * w = ggml_new_tensor_2d(of_weight.get(), type, N_IN, N_ROWS);
    const buffer_ptr here = { ggml_backend_alloc_ctx_tensors_from_buft(of_weight.get(),
                                  sides ? ggml_backend_cpu_repack_buffer_type()
                                        : ggml_backend_cpu_buffer_type()),
        ggml_backend_buffer_free };
    if (sides && !w->extra) return;
    put_weight(w);
    for (int n_tokens : { 1, 2, 4, 8, 16, 32, 64 }) {
        const context_ptr ctx = new_context();
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N_IN, n_tokens);
        ggml_tensor * y = ggml_mul_mat(ctx.get(), w, x);
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, y);
        const buffer_ptr there = { ggml_backend_alloc_ctx_tensors(ctx.get(), backend),
            ggml_backend_buffer_free };
        random_source rnd(6);
        for (int i = 0; i < n_tokens * N_IN; ++i) ((float *) x->data)[i] = rnd.normal();
        double theirs = 1e9, ours = 1e9, least = 1e9;
        const bool taken = edgekv_cpu_product_words(y) > 0;
        for (int i = 0; i < n_reps; ++i) {
            least = std::min(least, seconds(n_threads, [&] {
                in_threads(n_threads, [&](int ith) { read_all(w, ith, n_threads); });
            }));
            theirs = std::min(
                theirs, seconds(n_threads, [&] { ggml_backend_graph_compute(backend, graph); }));
            if (!taken) continue;
            std::vector<uint32_t> words(edgekv_cpu_product_words(y));
            edgekv_product_job job = { words.data(), false, nullptr, false, { 0 }, { 0 }, 0,
                false };
            ours = std::min(ours, seconds(n_threads, [&] {
                in_threads(
                    n_threads, [&](int ith) { edgekv_cpu_product(y, ith, n_threads, &job); });
            }));
        }
        printf("{\"type\": \"%s\", \"repacked\": %s, \"n_in\": %d, \"n_rows\": %d, \"tokens\": %d,"
               " \"threads\": %d, \"read_ms\": %.3f, \"llama_cpp_ms\": %.3f, \"edgekv_ms\": ",
            ggml_type_name(type), sides ? "true" : "false", N_IN, N_ROWS, n_tokens, n_threads,
            1e3 * least, 1e3 * theirs);
        printf(taken ? "%.3f}\n" : "null}\n", 1e3 * ours);
        fflush(stdout);
    }
}

} // namespace

int perf(int argc, char ** argv) {
    const int n_threads = argc > 1 ? atoi(argv[1]) : 1, n_reps = argc > 2 ? atoi(argv[2]) : 5;
    const backend_ptr backend(ggml_backend_cpu_init(), ggml_backend_free);
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    for (ggml_type type : TYPES)
        for (bool sides : { true, false }) measure(type, sides, n_threads, n_reps, backend.get());
    return 0;
}
