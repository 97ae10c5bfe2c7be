#pragma once
// ALiBi (Press et al., 2022): the logit of head h falls by slope(h) for each token that a row lies
// before the query. Slopes as ggml has them, for any number of heads.

#include <math.h>

#ifdef __CUDACC__
#define EDGEKV_ANYWHERE __host__ __device__
#else
#define EDGEKV_ANYWHERE
#endif

EDGEKV_ANYWHERE inline float edgekv_alibi_slope(float max_bias, int n_head, int h) {
    int n = 1; // the largest power of two that is no more than n_head
    while (2 * n <= n_head) n *= 2;
    return exp2f(h < n ? -max_bias * (float) (h + 1) / (float) n
                       : -max_bias * (float) (2 * (h - n) + 1) / (float) (2 * n));
}
