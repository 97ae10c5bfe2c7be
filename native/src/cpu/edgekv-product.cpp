// Products of quantised weights with many tokens, for the registers that this file is compiled for
#include "edgekv-cpu.h"
#include "edgekv-fastest.h"
#include "edgekv-product.h"

#include "ggml-backend-impl.h"
#include "repack.h"

#include <thread>
#include <vector>

using namespace edgekv;

constexpr size_t SPARE = LINE / sizeof(uint32_t); // words, so that the others can be aligned

int64_t edgekv_cpu_product_min_repacked(ggml_type type) {
    return with_words(type, [](auto words) -> int64_t {
        return words.TILES ? EDGEKV_PRODUCT_MIN : words.PER > 1 ? 160 : INT64_MAX;
    });
}

size_t edgekv_cpu_product_words(const ggml_tensor * node) {
    const ggml_tensor *w = node->src[0], *x = node->src[1];
    if (node->op != GGML_OP_MUL_MAT || !w->buffer) return 0;
    const bool is_plain = x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) &&
        ggml_is_contiguous(w) && ggml_is_contiguous(node) && w->ne[2] == 1 && w->ne[3] == 1;
    return is_plain ? edgekv_cpu_product_room(w, ggml_nrows(x)) : 0;
}

size_t edgekv_cpu_product_room(const ggml_tensor * w, int64_t n_tokens) {
    if (!ggml_is_quantized(w->type)) return 0;
    if (n_tokens < EDGEKV_PRODUCT_MIN || n_tokens > INT32_MAX / 2) return 0;
    auto * buft = w->buffer ? w->buffer->buft : nullptr;
    const bool repacked = buft && buft == ggml_backend_cpu_repack_buffer_type();
    if (buft && !repacked && !ggml_backend_buft_is_host(buft)) return 0;
    if (repacked && w->extra &&
        (w->ne[1] % 8 || !knows_side_by_side(w->type) ||
            n_tokens < edgekv_cpu_product_min_repacked(w->type)))
        return 0;
    return with_words(w->type, [&](auto words) {
        return product<decltype(words)>::n_all_words((int) w->ne[0], (int) n_tokens) + SPARE;
    });
}

size_t edgekv_cpu_product_unpacked(const ggml_tensor * w) {
    const int64_t n_in = w->ne[0], n_rows = w->ne[1];
    return with_words(w->type, [&](auto words) -> size_t {
        using kernel = product<decltype(words)>;
        // f32 is multiplied so slowly that unpacking is nothing beside it
        if (words.PER == 1 || n_in > INT32_MAX / 2 || n_rows > INT32_MAX / 2) return 0;
        return kernel::n_panels((int) n_rows) * kernel::panel_size((int) n_in) + SPARE;
    });
}

template <class W>
static void run(ggml_tensor * node, int ith, int nth, edgekv_product_job & job) {
    static thread_local typename product<W>::workspace workspace;
    const ggml_tensor *w = node->src[0], *x = node->src[1];
    const bool sides = w->buffer->buft == ggml_backend_cpu_repack_buffer_type() && w->extra;
    const product<W> p = { { (const char *) w->data, w->nb[1], w->type, sides }, (int) w->ne[0],
        (int) w->ne[1], (int) ggml_nrows(x), (const float *) x->data, (float *) node->data,
        aligned(job.words) };
    p.make_words(ith, nth);
    // everybody's words are wanted by all; the threads run side by side, so the wait is short
    job.n_ready.fetch_add(1, std::memory_order_acq_rel);
    for (int spins = 0; job.n_ready.load(std::memory_order_acquire) < nth; ++spins)
        if (spins > 1000) std::this_thread::yield();
    p.run(
        workspace, job.next, nth, job.unpacked ? aligned(job.unpacked) : nullptr, job.is_unpacked);
}

void edgekv_cpu_product(ggml_tensor * dst, int ith, int nth, void * data) {
    auto & job = *(edgekv_product_job *) data;
    const int64_t begin = ggml_time_us();
    with_words(dst->src[0]->type, [&](auto words) {
        run<decltype(words)>(dst, ith, nth, job);
        if (ith == 0) job.levels = words.LEVELS;
    });
    if (ith == 0) job.ms = (double) (ggml_time_us() - begin) / 1e3;
}

double edgekv_cpu_product_peak(bool levels) {
    return with_words(levels ? GGML_TYPE_Q4_0 : GGML_TYPE_COUNT, [](auto words) {
        using kernel = product<decltype(words)>;
        constexpr int N_IN = 128, P = kernel::P, ROWS = decltype(words)::ROWS, TIMES = 100;
        [[maybe_unused]] const typename decltype(words)::scope scope;
        std::vector<uint32_t> tokens(kernel::n_all_words(N_IN, ROWS) + SPARE),
            panel(kernel::panel_size(N_IN) + SPARE);
        std::vector<float> sums((size_t) P * ROWS);
        const kernel p = { {}, N_IN, P, ROWS, nullptr, sums.data(), aligned(tokens.data()) };
        double most = 0;
        for (const int64_t begin = ggml_time_us(); ggml_time_us() < begin + 20000;) {
            const int64_t now = ggml_time_us();
            for (int i = 0; i < TIMES; ++i)
                p.block(aligned(panel.data()), 0, 0, 0, kernel::n_words(N_IN));
            const auto us = (double) std::max<int64_t>(1, ggml_time_us() - now);
            most = std::max(most, 1e6 * TIMES * N_IN * P * ROWS / us);
        }
        return most;
    });
}
