// attend, for a prompt, and score: the kernels for the registers that this file is compiled for
#include "edgekv-columns.h"
#include "edgekv-prompt.h"

using lanes = edgekv::best_lanes;

static edgekv::panels<lanes>::workspace & workspace() {
    static thread_local edgekv::panels<lanes>::workspace w;
    return w;
}

void edgekv_cpu_attend_prompt(const edgekv_rows * rows, const edgekv_queries * qs, float * dst,
    float * norm, std::atomic<int32_t> * next, int nth) {
    edgekv::prompt_attention<lanes>(*rows, *qs, dst, norm).run(workspace(), nth, *next);
}

void edgekv_cpu_score_columns(const edgekv_rows * rows, const edgekv_queries * qs,
    const float * norm, const edgekv_columns * cols, int part, int n_parts) {
    edgekv::column_scores<lanes>(*rows, *qs, norm, *cols).run(workspace(), part, n_parts);
}
