#include "edgekv-few.h"

#include "edgekv-aligned.h"
#include "edgekv-few-rows.h"

#include <array>
#include <utility>

namespace edgekv {

#if EDGEKV_FEW
namespace {

constexpr int ROWS = 32;                          // that a thread takes; a multiple of 8
constexpr size_t SPARE = LINE / sizeof(uint32_t); // words, so that the others can be aligned

template <class K, int... N>
auto kernels_of(std::integer_sequence<int, N...>) {
    return std::array { K::template rows<N + 1>... };
}

// f(token, kernels): of a weight; entry n - 1 is for n tokens at once. Nothing if there are none
template <class K, class F>
void with(F && f) {
    static const auto kernels = kernels_of<K>(std::make_integer_sequence<int, FEW_AT_ONCE>());
    f(typename K::token(), kernels);
}
template <class F>
void with_kernels(ggml_type type, bool sides, F && f) {
    switch (type) {
        case GGML_TYPE_Q4_0: return sides ? with<few_beside_q4_0>(f) : with<few_of_32<few_q4_0>>(f);
        case GGML_TYPE_Q4_K: return sides ? with<few_sides_q4_K>(f) : with<few_of_256<few_q4_K>>(f);
        default: break;
    }
    if (sides) return;
    switch (type) {
        case GGML_TYPE_Q4_1: return with<few_of_32<few_q4_1>>(f);
        case GGML_TYPE_Q5_0: return with<few_of_32<few_q5_0>>(f);
        case GGML_TYPE_Q5_1: return with<few_of_32<few_q5_1>>(f);
        case GGML_TYPE_Q8_0: return with<few_of_32<few_q8_0>>(f);
        case GGML_TYPE_IQ4_NL: return with<few_of_32<few_iq4_nl>>(f);
        case GGML_TYPE_IQ4_XS: return with<few_of_256<few_iq4_xs>>(f);
        case GGML_TYPE_Q2_K: return with<few_of_256<few_q2_K>>(f);
        case GGML_TYPE_Q3_K: return with<few_of_256<few_q3_K>>(f);
        case GGML_TYPE_Q5_K: return with<few_of_256<few_q5_K>>(f);
        case GGML_TYPE_Q6_K: return with<few_of_256<few_q6_K>>(f);
        default: return;
    }
}

// part ith of nth of the pieces of n tokens
template <class P>
void make_tokens(const float * x, int n_in, int n, uint32_t * words, int ith, int nth) {
    const int n_pieces = n_in / P::SIZE;
    auto * pieces = (P *) words;
    for (int i = ith; i < n; i += nth) // a token is one thread's
        for (int p = 0; p < n_pieces; ++p)
            pieces[(size_t) p * n + i].make(x + (size_t) i * n_in + p * P::SIZE);
}

} // namespace

size_t few_words(const ggml_tensor * w, int64_t n_tokens, bool sides) {
    if (n_tokens > EDGEKV_ALIKE_MAX || w->ne[1] < 8 || w->ne[2] != 1 || w->ne[0] > INT32_MAX / 4 ||
        w->ne[1] > INT32_MAX / 2)
        return 0;
    size_t n_words = 0;
    with_kernels(w->type, sides, [&](auto piece, const auto &) {
        using P = decltype(piece);
        if (w->ne[0] % P::SIZE) return;
        n_words = n_tokens * (w->ne[0] / P::SIZE) * sizeof(P) / sizeof(uint32_t);
    });
    return n_words ? n_words + SPARE : 0;
}

void few_run(ggml_tensor * node, bool sides, int ith, int nth, edgekv_product_job & job) {
    const ggml_tensor *weight = node->src[0], *x = node->src[1];
    uint32_t * words = aligned(job.words);
    with_kernels(weight->type, sides, [&](auto piece, const auto & kernels) {
        few_work w = { (const char *) weight->data, weight->nb[1], 0, 0, (int) weight->ne[0],
            (int) ggml_nrows(x), 0, words, (float *) node->data, weight->ne[1] };
        if (!job.has_words) {
            make_tokens<decltype(piece)>((const float *) x->data, w.n_in, w.n, words, ith, nth);
            wait_for_words(job, nth);
        }
        const auto n_rows = (int) w.n_rows;
        for (int r = job.next++ * ROWS; r < n_rows; r = job.next++ * ROWS) {
            w.r0 = r;
            w.r1 = std::min(r + ROWS, n_rows);
            for (w.t0 = 0; w.t0 < w.n; w.t0 += FEW_AT_ONCE)
                kernels[std::min(FEW_AT_ONCE, w.n - w.t0) - 1](w);
        }
    });
}
#else
size_t few_words(const ggml_tensor *, int64_t, bool) { return 0; }
void few_run(ggml_tensor *, bool, int, int, edgekv_product_job &) {}
#endif

} // namespace edgekv
