// attend, for a prompt: the kernel for the registers that this file is compiled for
#include "edgekv-prompt.h"

void edgekv_cpu_attend_prompt(const edgekv_rows * rows, const edgekv_queries * qs, float * dst, std::atomic<int32_t> * next, int nth) {
    using kernel = edgekv::prompt_attention<edgekv::best_lanes>;
    static thread_local kernel::workspace w;
    kernel(*rows, *qs).run(w, dst, nth, *next);
}
