#pragma once
// Rows of a quantised weight as f32 or as levels, from where the CPU backend keeps them: as in the
// file, or with the blocks of eight rows side by side (ggml-cpu's repack.cpp).

#include "edgekv-levels.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace edgekv {

struct weight_rows {
    static constexpr int AT_ONCE = 8;
    const char * data;
    size_t nb; // bytes of a row
    ggml_type type;
    bool side_by_side;

    // n rows from r0 on, a multiple of 8; out [n][n_in]
    void unpack(int r0, int n, int n_in, float * out) const;
    // [n][n_in/32], of a type that has levels
    void levels(int r0, int n, int n_in, weight_block * to) const;
};

// whether side by side is a form that `unpack` knows; found out once, on rows of known values
bool knows_side_by_side(ggml_type type);

} // namespace edgekv
