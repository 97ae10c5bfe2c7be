// attend, for a prompt, and score: the kernels for the registers that this file is compiled for
#include "edgekv-columns.h"
#include "edgekv-prompt.h"

#include <type_traits>

using namespace edgekv;
using lanes = best_lanes;
using exact = f32_words<lanes>;
using fast = std::conditional_t<best_words::N == lanes::N, best_words, exact>;

template <class W>
static typename panels<lanes, W>::workspace & workspace() {
    static thread_local typename panels<lanes, W>::workspace w;
    return w;
}

void edgekv_cpu_attend_prompt(const edgekv_rows * rows, const edgekv_queries * qs, float * dst,
    float * norm, std::atomic<int32_t> * next, int nth) {
    const auto run = [&](auto words) {
        using W = decltype(words);
        prompt_attention<lanes, W>(*rows, *qs, dst, norm).run(workspace<W>(), nth, *next);
    };
    rows->rounded ? run(fast()) : run(exact());
}

void edgekv_cpu_score_columns(const edgekv_rows * rows, const edgekv_queries * qs,
    const float * norm, const edgekv_columns * cols, int part, int n_parts) {
    const auto run = [&](auto words) {
        using W = decltype(words);
        column_scores<lanes, W>(*rows, *qs, norm, *cols).run(workspace<W>(), part, n_parts);
    };
    rows->rounded ? run(fast()) : run(exact());
}
