// score on CUDA: column statistics of the attention of some queries. The definition of correct is
// cpu/edgekv-score.cpp. Two passes over K, no attention matrix: each query's log of the sum of
// exponentials, over parts of the rows and then folded; then the columns, where a block owns 64
// rows and walks over all queries of their KV head. Queries are packed for the tensor cores
// beforehand.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-rows.cuh"

namespace edgekv_cuda {
namespace {

constexpr int ROWS = 64;              // of a tile
constexpr int COLUMNS = ROWS / 8 * 2; // of a tile in one lane
constexpr int TOKENS = 16;            // of one head, multiplied at once
constexpr int WARPS = 4;

struct score_args {
    edgekv_rows rows;
    edgekv_queries qs;
    edgekv_columns cols;
    uint4 * queries; // [n_head][n_token_tiles][fragments]
    float * norm;    // [n_parts][n_head][n_tokens][2] maximum and sum
    // [n_head][n_tokens] log of the sum of exponentials, +infinity where nothing is seen
    float * lse;
    int n_parts, n_token_tiles;
};

__host__ __device__ inline int fragments(const edgekv_rows & rows) {
    return (rows.d_k + CHUNK - 1) / CHUNK * 2 * WARP;
}

// grid [n_head, n_token_tiles]
__global__ void score_queries(const score_args a) {
    const int h = blockIdx.x, n = fragments(a.rows);
    uint4 * to = a.queries + ((size_t) h * a.n_token_tiles + blockIdx.y) * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int t = blockIdx.y * TOKENS + i % WARP / 4;
        const float * q = a.qs.q + t * a.qs.stride_t + h * a.qs.stride_h;
        to[i] = query_fragment(a.rows.type_k, a.rows.d_k, i, t < a.qs.n_tokens ? q : nullptr,
            t + 8 < a.qs.n_tokens ? q + 8 * a.qs.stride_t : nullptr);
    }
}

// ---- logits of 16 tokens of a head and 64 rows

// rows of the tile as the tensor cores take them: for each chunk and eight rows what the 32 lanes
// hold
__device__ __forceinline__ void load_keys(const score_args & a, int k, int tile, uint4 * to) {
    const int n = (a.rows.d_k + CHUNK - 1) / CHUNK * (ROWS / 8) * WARP, last = a.rows.len[k] - 1;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int lane = i % WARP, rows8 = i / WARP % (ROWS / 8), chunk = i / WARP / (ROWS / 8);
        // none behind the head's last is used
        const int64_t row = a.rows.first[k] + min(tile * ROWS + rows8 * 8 + lane / 4, last);
        const half8 x =
            read8(a.rows.type_k, a.rows.k + row * a.rows.nb_k, chunk, lane % 4, a.rows.d_k);
        to[i] = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
    }
}

// s[j]: rows 8j.. of the tile; -infinity where a token does not see the row or does not exist
struct logits {
    float s[ROWS / 8][4];

    __device__ void compute(
        const score_args & a, const uint4 * keys, int k, int h, int token_tile, int tile) {
        __syncwarp(); // tensor cores want all lanes; the last tile's ends may have parted them
        const int lane = threadIdx.x % WARP, n_chunks = (a.rows.d_k + CHUNK - 1) / CHUNK;
        const uint4 * q =
            a.queries + ((size_t) h * a.n_token_tiles + token_tile) * fragments(a.rows) + lane;
        for (int j = 0; j < ROWS / 8; ++j)
            for (int x = 0; x < 4; ++x) s[j][x] = 0;
        for (int i = 0; i < n_chunks; ++i) {
            const uint4 q0 = q[2 * i * WARP], q1 = q[(2 * i + 1) * WARP];
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j) {
                const uint4 x = keys[(i * (ROWS / 8) + j) * WARP + lane];
                mma(s[j], q0, x.x, x.y);
                mma(s[j], q1, x.z, x.w);
            }
        }
        for (int half = 0; half < 2; ++half) {
            const int t = token_tile * TOKENS + lane / 4 + 8 * half;
            const bool there = t < a.qs.n_tokens;
            const int lo = !there ? 0 : a.qs.start ? a.qs.start[t] : 0;
            const int hi = !there
                ? 0
                : a.rows.len[k] - (a.qs.n_after ? a.qs.n_after[t] : a.qs.n_tokens - 1 - t);
            const alibi lower(a.rows, k, h, hi);
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j)
                for (int x = 2 * half; x < 2 * half + 2; ++x) {
                    const int r = tile * ROWS + 8 * j + 2 * (lane % 4) + x % 2;
                    s[j][x] = r >= lo && r < hi
                        ? logit(s[j][x], a.rows.scale, a.rows.softcap) + lower(r)
                        : -INFINITY;
                }
        }
    }
};

// ---- first pass

// grid [n_head_kv * blocks, n_parts]: each warp has 16 tokens of one head of the group
template <int D>
__global__ void __launch_bounds__(WARPS * WARP, 2) score_norm(const score_args a) {
    __shared__ uint4 keys[D / CHUNK * (ROWS / 8) * WARP];
    const int G = a.rows.n_head / a.rows.n_head_kv, n_units = G * a.n_token_tiles,
              n_blocks = (n_units + WARPS - 1) / WARPS;
    const int lane = threadIdx.x % WARP, k = blockIdx.x / n_blocks,
              unit = blockIdx.x % n_blocks * WARPS + threadIdx.x / WARP;
    const int h = k * G + unit / a.n_token_tiles, token_tile = unit % a.n_token_tiles,
              p = blockIdx.y;
    const int n_tiles = (a.rows.len[k] + ROWS - 1) / ROWS;
    float m[2] = { -INFINITY, -INFINITY }, l[2] = { 0, 0 };
    for (int tile = (int) ((int64_t) n_tiles * p / a.n_parts);
        tile < (int) ((int64_t) n_tiles * (p + 1) / a.n_parts); ++tile) {
        load_keys(a, k, tile, keys);
        __syncthreads();
        if (unit < n_units) {
            logits x;
            x.compute(a, keys, k, h, token_tile, tile);
            for (int i = 0; i < 2; ++i) {
                float top = m[i];
#pragma unroll
                for (int j = 0; j < ROWS / 8; ++j)
                    top = fmaxf(top, fmaxf(x.s[j][2 * i], x.s[j][2 * i + 1]));
                l[i] *= exp_below(m[i], top);
                m[i] = top;
#pragma unroll
                for (int j = 0; j < ROWS / 8; ++j)
                    l[i] += exp_below(x.s[j][2 * i], top) + exp_below(x.s[j][2 * i + 1], top);
            }
        }
        __syncthreads(); // the keys are used
    }
    if (unit >= n_units) return;
    for (int i = 0; i < 2; ++i) {
        const float top = max_over(m[i], 4), sum = sum_over(l[i] * exp_below(m[i], top), 4);
        const int t = token_tile * TOKENS + lane / 4 + 8 * i;
        if (lane % 4 || t >= a.qs.n_tokens) continue;
        float * to = a.norm + (((size_t) p * a.rows.n_head + h) * a.qs.n_tokens + t) * 2;
        to[0] = top;
        to[1] = sum;
    }
}

// grid [n_head, tokens/128]
__global__ void score_fold(const score_args a) {
    const int h = blockIdx.x, t = blockIdx.y * blockDim.x + threadIdx.x;
    if (t >= a.qs.n_tokens) return;
    const float sink = a.rows.sinks ? a.rows.sinks[h] : -INFINITY;
    auto part = [&](int p) {
        return a.norm + (((size_t) p * a.rows.n_head + h) * a.qs.n_tokens + t) * 2;
    };
    float m = sink;
    for (int p = 0; p < a.n_parts; ++p) m = fmaxf(m, part(p)[0]);
    float sum = exp_below(sink, m);
    for (int p = 0; p < a.n_parts; ++p) sum += part(p)[1] * exp_below(part(p)[0], m);
    a.lse[(size_t) h * a.qs.n_tokens + t] = sum > 0 ? m + logf(sum) : INFINITY;
}

// ---- second pass

// number, mean and sum of squared deviations of some values
struct moments {
    float n, mean, m2;

    __device__ void add(const moments & b) { // Chan's formula
        const float total = n + b.n, delta = b.mean - mean;
        if (b.n == 0) return;
        mean += delta * b.n / total;
        m2 += b.m2 + delta * delta * n * b.n / total;
        n = total;
    }
};

__device__ __forceinline__ moments other_lane(const moments & x, int mask) {
    return { __shfl_xor_sync(ALL_LANES, x.n, mask), __shfl_xor_sync(ALL_LANES, x.mean, mask),
        __shfl_xor_sync(ALL_LANES, x.m2, mask) };
}

// what a lane has seen of its columns (2c + i: of rows 8c.. of the tile)
struct column_sums {
    float sum[COLUMNS], top[COLUMNS], entropy[COLUMNS];
    float mean[COLUMNS], m2[COLUMNS], n; // of one head

    __device__ void clear() {
        for (int c = 0; c < COLUMNS; ++c) sum[c] = top[c] = entropy[c] = 0;
    }
    __device__ void clear_head() {
        n = 0;
        for (int c = 0; c < COLUMNS; ++c) mean[c] = m2[c] = 0;
    }

    // tokens g and g + 8 of the tile
    __device__ void add(const score_args & a, const logits & x, int h, int token_tile) {
        for (int half = 0; half < 2; ++half) {
            const int t = token_tile * TOKENS + threadIdx.x % WARP / 4 + 8 * half;
            if (t >= a.qs.n_tokens) continue;
            const float lse = a.lse[(size_t) h * a.qs.n_tokens + t];
            n += 1;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const float s = x.s[c / 2][2 * half + c % 2], p = exp_below(s, lse),
                            delta = p - mean[c];
                sum[c] += p;
                top[c] = fmaxf(top[c], p);
                if (p > 0) entropy[c] -= p * (s - lse);
                mean[c] += delta / n;
                m2[c] += delta * (p - mean[c]);
            }
        }
    }
};

// of one row in each warp
struct warp_sums {
    float sum[WARPS][ROWS], top[WARPS][ROWS], entropy[WARPS][ROWS];
    moments moment[WARPS][ROWS];
};

__device__ __forceinline__ int row_of(int lane, int c) {
    return c / 2 * 8 + 2 * (lane % 4) + c % 2;
}

// mean and squared deviations of query head g of the group, over lanes, warps and earlier calls
__device__ __forceinline__ void store_moments(
    const score_args & a, const column_sums & mine, warp_sums & all, int k, int g, int tile) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = tile * ROWS + threadIdx.x;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        moments x = { mine.n, mine.mean[c], mine.m2[c] };
        for (int mask = 4; mask < WARP; mask *= 2) x.add(other_lane(x, mask));
        if (lane < 4) all.moment[warp][row_of(lane, c)] = x;
    }
    __syncthreads();
    if (threadIdx.x < ROWS && r < a.rows.len[k]) {
        const int64_t at = g * a.cols.n_rows + a.rows.first[k] + r;
        moments x = { (float) a.cols.n_seen, a.cols.mean[at], a.cols.m2[at] };
        for (int w = 0; w < WARPS; ++w) x.add(all.moment[w][threadIdx.x]);
        a.cols.mean[at] = x.mean;
        a.cols.m2[at] = x.m2;
    }
    __syncthreads();
}

__device__ __forceinline__ void store_columns(
    const score_args & a, const column_sums & mine, warp_sums & all, int k, int tile) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = tile * ROWS + threadIdx.x;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float sum = mine.sum[c], top = mine.top[c], entropy = mine.entropy[c];
        for (int mask = 4; mask < WARP; mask *= 2) {
            sum += __shfl_xor_sync(ALL_LANES, sum, mask);
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, mask));
            entropy += __shfl_xor_sync(ALL_LANES, entropy, mask);
        }
        if (lane >= 4) continue;
        all.sum[warp][row_of(lane, c)] = sum;
        all.top[warp][row_of(lane, c)] = top;
        all.entropy[warp][row_of(lane, c)] = entropy;
    }
    __syncthreads();
    if (threadIdx.x >= ROWS || r >= a.rows.len[k]) return;
    float sum = 0, top = 0, entropy = 0;
    for (int w = 0; w < WARPS; ++w) {
        sum += all.sum[w][threadIdx.x];
        top = fmaxf(top, all.top[w][threadIdx.x]);
        entropy += all.entropy[w][threadIdx.x];
    }
    const int64_t at = a.rows.first[k] + r;
    if (a.cols.sum) a.cols.sum[at] += sum * a.rows.n_head_kv / a.rows.n_head;
    if (a.cols.max) a.cols.max[at] = fmaxf(a.cols.max[at], top);
    if (a.cols.entropy) a.cols.entropy[at] += entropy;
}

// grid [tiles of the longest head, n_head_kv]
template <int D>
__global__ void __launch_bounds__(WARPS * WARP, 2) score_columns(const score_args a) {
    __shared__ uint4 keys[D / CHUNK * (ROWS / 8) * WARP];
    __shared__ warp_sums all;
    const int k = blockIdx.y, tile = blockIdx.x, G = a.rows.n_head / a.rows.n_head_kv;
    if (tile * ROWS >= a.rows.len[k]) return;
    load_keys(a, k, tile, keys);
    __syncthreads();
    column_sums mine;
    mine.clear();
    mine.clear_head();
    // moments are those of a head
    const int n_units = G * a.n_token_tiles, n_together = a.cols.m2 ? a.n_token_tiles : n_units;
    for (int first = 0; first < n_units; first += n_together) {
        for (int unit = first + threadIdx.x / WARP; unit < first + n_together; unit += WARPS) {
            const int g = unit / a.n_token_tiles, token_tile = unit % a.n_token_tiles;
            logits x;
            x.compute(a, keys, k, k * G + g, token_tile, tile);
            mine.add(a, x, k * G + g, token_tile);
        }
        if (!a.cols.m2) continue;
        store_moments(a, mine, all, k, first / a.n_token_tiles, tile);
        mine.clear_head();
    }
    store_columns(a, mine, all, k, tile);
}

// ---- launch

static int token_tiles(int n_tokens) { return (n_tokens + TOKENS - 1) / TOKENS; }

// enough blocks for any device without more sums than rows are worth
static int row_parts(int n_rows_max) {
    const int n = (n_rows_max + 1023) / 1024;
    return n < 1 ? 1 : n > 64 ? 64 : n;
}

static size_t query_bytes(const edgekv_rows & rows, int n_tokens) {
    return (size_t) rows.n_head * token_tiles(n_tokens) * fragments(rows) * sizeof(uint4);
}

template <int D>
cudaError_t launch_score(const score_args & a, int n_rows_max, void * stream) {
    const int G = a.rows.n_head / a.rows.n_head_kv,
              n_blocks = (G * a.n_token_tiles + WARPS - 1) / WARPS, n_threads = WARPS * WARP;
    cudaError_t e =
        launch(score_queries, dim3(a.rows.n_head, a.n_token_tiles), n_threads, 0, stream, a);
    if (e == cudaSuccess)
        e = launch(
            score_norm<D>, dim3(a.rows.n_head_kv * n_blocks, a.n_parts), n_threads, 0, stream, a);
    if (e == cudaSuccess)
        e = launch(score_fold, dim3(a.rows.n_head, (a.qs.n_tokens + n_threads - 1) / n_threads),
            n_threads, 0, stream, a);
    if (e == cudaSuccess)
        e = launch(score_columns<D>, dim3((n_rows_max + ROWS - 1) / ROWS, a.rows.n_head_kv),
            n_threads, 0, stream, a);
    return e;
}

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

size_t edgekv_cuda_score_workspace(const edgekv_rows * rows, int n_tokens, int n_rows_max) {
    return query_bytes(*rows, n_tokens) +
        (size_t) rows->n_head * n_tokens * (2 * row_parts(n_rows_max) + 1) * sizeof(float);
}

int edgekv_cuda_score(const edgekv_rows * rows, const edgekv_queries * qs,
    const edgekv_columns * cols, int n_rows_max, void * workspace, void * stream) {
    count(SCORE);
    if (n_rows_max <= 0 || qs->n_tokens <= 0) return cudaSuccess;
    score_args a = { *rows, *qs, *cols, (uint4 *) workspace, nullptr, nullptr,
        row_parts(n_rows_max), token_tiles(qs->n_tokens) };
    a.norm = (float *) ((char *) workspace + query_bytes(*rows, qs->n_tokens));
    a.lse = a.norm + (size_t) a.n_parts * rows->n_head * qs->n_tokens * 2;
    if (rows->d_k <= 64) return launch_score<64>(a, n_rows_max, stream);
    if (rows->d_k <= 128) return launch_score<128>(a, n_rows_max, stream);
    return launch_score<256>(a, n_rows_max, stream);
}
