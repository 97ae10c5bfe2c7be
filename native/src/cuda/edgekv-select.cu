// select on CUDA: the rows with the highest scores of each KV head, so that scores need not travel. The definition of correct is `_top` in
// edgekv/select.py: highest first, equal ones in order, NaN counts as the lowest.
// A stable radix sort of (score, row) by one block per head, from the lowest four bits to the highest: a thread owns a stretch of the rows,
// counts its digits, and after a sum over digits and threads knows where each of its rows goes.
#include "edgekv-cuda.h"
#include "edgekv-device.cuh"

namespace edgekv_cuda {
namespace {

constexpr int THREADS = 512;
constexpr int DIGITS = 16;
constexpr int PASSES = 8;   // of four bits

struct alignas(8) entry { uint32_t key; int32_t row; };

struct select_args {
    const float * scores;   // [n_head_kv][stride]
    int64_t stride, stride_out;
    const int32_t * len, * counts;
    int32_t * out;          // [n_head_kv][stride_out]
    entry * work;           // [n_head_kv][2][n_rows_max]
    int n_rows_max;
};

// ascending where scores fall. By bits: arithmetic would take tiny scores for zero.
__device__ __forceinline__ uint32_t key_of(float score) {
    uint32_t x;
    memcpy(&x, &score, sizeof(x));
    if ((x & 0x7fffffff) > 0x7f800000) x = 0xff800000; // NaN as -infinity
    if (x == 0x80000000) x = 0;
    return x & 0x80000000 ? x : 0x7fffffff - x;
}

// sum over the threads in front of this one
__device__ __forceinline__ uint32_t sum_before(uint32_t x, uint32_t (&sums)[THREADS/WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x/WARP;
    uint32_t sum = x;
    for (int i = 1; i < WARP; i *= 2) {
        const uint32_t y = __shfl_up_sync(ALL_LANES, sum, i);
        if (lane >= i) sum += y;
    }
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += sums[w];
    return sum - x;
}

// counters [DIGITS][THREADS] in that order: of each the sum of those in front of it
__device__ __forceinline__ void sum_counters(uint32_t * counters) {
    __shared__ uint32_t sums[THREADS/WARP];
    uint32_t * mine = counters + threadIdx.x*DIGITS, total = 0;
    for (int i = 0; i < DIGITS; ++i) total += mine[i];
    uint32_t before = sum_before(total, sums);
    for (int i = 0; i < DIGITS; ++i) {
        const uint32_t x = mine[i];
        mine[i] = before;
        before += x;
    }
}

// grid [n_head_kv]
__global__ void __launch_bounds__(THREADS) select_rows(const select_args a) {
    __shared__ uint32_t counters[DIGITS*THREADS];
    const int k = blockIdx.x, n = a.len[k], n_out = min(a.counts[k], n);
    if (n_out <= 0) return;
    const int begin = (int) ((int64_t) n*threadIdx.x/THREADS), end = (int) ((int64_t) n*(threadIdx.x + 1)/THREADS);
    const float * scores = a.scores + k*a.stride;
    for (int pass = 0; pass < PASSES; ++pass) {
        const entry * from = a.work + ((int64_t) 2*k + pass % 2)*a.n_rows_max;
        entry * to = a.work + ((int64_t) 2*k + 1 - pass % 2)*a.n_rows_max;
        auto read = [&](int i) { return pass ? from[i] : entry { key_of(scores[i]), i }; };
        auto counter = [&](const entry & e) -> uint32_t & { return counters[(e.key >> 4*pass & (DIGITS - 1))*THREADS + threadIdx.x]; };
        for (int i = 0; i < DIGITS; ++i) counters[i*THREADS + threadIdx.x] = 0;
        for (int i = begin; i < end; ++i) ++counter(read(i));
        __syncthreads();
        sum_counters(counters);
        __syncthreads();
        for (int i = begin; i < end; ++i) {
            const entry e = read(i);
            const uint32_t at = counter(e)++;
            if (pass < PASSES - 1)       to[at] = e;
            else if ((int) at < n_out)   a.out[k*a.stride_out + at] = e.row;
        }
        __syncthreads();
    }
}

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

size_t edgekv_cuda_select_workspace(int n_head_kv, int n_rows_max) { return (size_t) 2*n_head_kv*n_rows_max*sizeof(entry); }

int edgekv_cuda_select(const float * scores, int64_t stride, const int32_t * len, const int32_t * counts, int n_head_kv, int n_rows_max,
        int32_t * out, int64_t stride_out, void * workspace, void * stream) {
    if (n_head_kv <= 0 || n_rows_max <= 0) return cudaSuccess;
    return launch(select_rows, dim3(n_head_kv), THREADS, 0, stream, select_args { scores, stride, stride_out, len, counts, out, (entry *) workspace, n_rows_max });
}
