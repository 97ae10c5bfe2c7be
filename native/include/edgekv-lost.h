#pragma once
// What summary rows are made of (edgekv/methods/centroid_merge.py says how), in the C API and in
// the CPU's kernel. All rows are f32.

#include <stdint.h>

// rows of one head that are looked at: those that it loses, and those that it keeps
struct edgekv_lost {
    const float * keys;        // [n, d_k]
    const float * values;      // [n, d_v]
    const float * kept;        // keys [n_kept, d_k], no rows if n_kept is 0
    const float * kept_values; // [n_kept, d_v]
    const float * queries;     // [n_queries, d_k], at later positions
    int32_t n, n_kept, n_queries, d_k, d_v;
    float each, each_kept; // how many rows a row of `keys`, of `kept` stands for
};

struct edgekv_centroid_params {
    int32_t n_groups;  // up to n
    int32_t rounds;    // of k-means
    float jitter;      // added to the variances of queries, relative to their mean
    float ridge;       // added to their second moments, relative to their mean
    float worst;       // error of a key, as a logarithm, above which its group is dropped
    float longest;     // so much longer a key or a value may be than those that it stands for
    float fit;         // ridge of the regression of values, relative to the mean of queries' powers
    int32_t n_threads; // that share the work; they change no result
};
