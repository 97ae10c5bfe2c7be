#pragma once
// What a prompt is multiplied with on this processor, where rounding is allowed.

#include "edgekv-int16.h"
#include "edgekv-tiles.h"

#if defined(__AVX512BF16__)
#include <cpuid.h>
#endif

namespace edgekv {

using exact_words = f32_words<best_lanes>;

// AVX-512 without VNNI multiplies f32 as fast
#if defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512VNNI__)) && defined(__GNUC__)
#define EDGEKV_INT16 1
#else
#define EDGEKV_INT16 0
#endif

// Intel's processors multiply pairs of bf16 at half the rate of f32, AMD's at twice
inline bool has_fast_pairs() {
#if defined(__AVX512BF16__)
    static const bool fast = [] {
        unsigned a, b, c, d;
        return !(__get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx);
    }();
    return fast;
#else
    return EDGEKV_PAIRS; // ARM's have twice as many products in an instruction
#endif
}

// f(lanes, words)
template <class F>
auto with_fastest(F && f) {
#if EDGEKV_TILES
    if (has_tiles()) return f(tile_lanes(), tile_words());
#endif
#if EDGEKV_PAIRS
    if (has_fast_pairs()) return f(best_lanes(), bf16_words());
#endif
#if EDGEKV_INT16
    return f(int16_words::L(), int16_words());
#else
    return f(best_lanes(), exact_words());
#endif
}

} // namespace edgekv
