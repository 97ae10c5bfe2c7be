// attend, for a prompt, and score: the kernels for the registers that this file is compiled for
#include "edgekv-columns.h"
#include "edgekv-fastest.h"
#include "edgekv-prompt.h"

using namespace edgekv;

template <class L, class W>
static typename panels<L, W>::workspace & workspace() {
    static thread_local typename panels<L, W>::workspace w;
    return w;
}

// f(lanes, words)
template <class F>
static void with_words(bool rounded, F && f) {
    rounded ? with_fastest(f) : f(best_lanes(), exact_words());
}

void edgekv_cpu_attend_prompt(const edgekv_rows * rows, const edgekv_queries * qs, float * dst,
    float * norm, std::atomic<int32_t> * next, int nth) {
    with_words(rows->rounded, [&](auto l, auto words) {
        using L = decltype(l);
        using W = decltype(words);
        prompt_attention<L, W>(*rows, *qs, dst, norm).run(workspace<L, W>(), nth, *next);
    });
}

void edgekv_cpu_score_columns(const edgekv_rows * rows, const edgekv_queries * qs,
    const float * norm, const edgekv_columns * cols, int part, int n_parts) {
    with_words(rows->rounded, [&](auto l, auto words) {
        using L = decltype(l);
        using W = decltype(words);
        column_scores<L, W>(*rows, *qs, norm, *cols).run(workspace<L, W>(), part, n_parts);
    });
}
