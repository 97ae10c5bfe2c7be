#pragma once
// Rows of a quantised weight as the integers that they are: blocks of 32 values scale*u + low, or
// scale*u and, behind the first 16, second*u.

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace edgekv {

struct weight_block {
    float scale, sum; // sum: of scale*u
    union {
        float low, second;
        int16_t lows[2];
    };
    int8_t u[32];
};

// Eight blocks whose lows are step*m, m of 6 bits: block j < 4 has those of blocks 2 j and 2 j + 1
// in `lows`, block 4 the step as `low`; `sum` is of scale*u + low.
void set_lows(weight_block * eight, float step, const uint8_t * m);
float low_of(const weight_block * eight, int i);

// six bits of scale and of low for each of eight blocks, packed into 12 bytes
struct scales_K {
    uint8_t scale[8], low[8];
    explicit scales_K(const uint8_t * s) {
        for (int i = 0; i < 4; ++i) {
            scale[i] = s[i] & 63;
            low[i] = s[4 + i] & 63;
            scale[4 + i] = (uint8_t) ((s[8 + i] & 15) | (s[i] >> 6) << 4);
            low[4 + i] = (uint8_t) (s[8 + i] >> 4 | (s[4 + i] >> 6) << 4);
        }
    }
};

// What the blocks of a type are. most: the largest |u|; 0 for types that are no such blocks. low:
// whether they have one that is not 0; of_eight: llama.cpp rounds tokens for eight of them together
struct level_form {
    int most;
    bool low, two_scales, of_eight;
};
level_form form_of(ggml_type type);

// the n/32 blocks of a row as it is in a file
void read_levels(ggml_type type, const char * row, int n, weight_block * to);

// of the eight rows that begin at data, their blocks side by side (ggml-cpu's repack.cpp); row i is
// at to + i * n/32. false: a form that is not known
bool read_levels_of_eight(ggml_type type, const char * data, int n, weight_block * to);

} // namespace edgekv
