#pragma once
// Products of a quantised weight with a few tokens: dst[t][r] = sum over i of w[r][i] x[t][i].
// edgekv-product.h unpacks a weight for tokens that are many; here a row is read once, where it
// lies: 64 of its values at a time, or 8 of each of eight rows, meet all tokens in registers. Eight
// rows share the scales' and the sums' instructions. Tokens are rounded as
// llama.cpp rounds them for such weights: to 8 bits around 0, with a scale for 32 values, or for
// 256 where the weight's blocks have as many (scales, and the sums that meet the lows of q4_1 and
// q5_1, stay f32; llama.cpp has halves of them). Sums of integers are exact, and those in f32 have
// the same order however many tokens there are: what a token gets does not depend on the others.

#include "edgekv-cpu.h"

#include <thread>

namespace edgekv {

// until all threads of a product have made their words: they run side by side, so it is short
inline void wait_for_words(edgekv_product_job & job, int nth) {
    job.n_ready.fetch_add(1, std::memory_order_acq_rel);
    for (int spins = 0; job.n_ready.load(std::memory_order_acquire) < nth; ++spins)
        if (spins > 1000) std::this_thread::yield();
}

// words of work for a weight and that many tokens, up to EDGEKV_ALIKE_MAX; 0 if they are not taken;
// sides: its rows stand side by side (edgekv-unpack.h)
size_t few_words(const ggml_tensor * w, int64_t n_tokens, bool sides);

// as edgekv_cpu_product, for a MUL_MAT node that `few_words` takes
void few_run(ggml_tensor * node, bool sides, int ith, int nth, edgekv_product_job & job);

} // namespace edgekv
