// merge on CUDA: which kept row an evicted one resembles most, and folding it in. The definition of
// correct is cpu/edgekv-merge.cpp. Search: kept rows are packed once for the tensor cores, with the
// inverse of their lengths; a block holds 64 evicted rows in registers and walks over all kept
// ones, or over a part of them where few rows were evicted: then the parts' best ones are compared.
// Values are rounded to halves there (2^-11). Fold: a warp sums 32 values of one row in f32, one
// per lane, which is a block of any quantised type, and writes them in that type.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-quantize.cuh"
#include "edgekv-rows.cuh"

namespace edgekv_cuda {
namespace {

constexpr int ROWS = 64; // kept rows of a tile
constexpr int WARPS = 4;
constexpr int WARP_ROWS = 16; // evicted rows of a warp
constexpr int BLOCKS = 512;   // keep any device busy

struct nearest_args {
    edgekv_numbered keys;
    const int32_t *gone, *kept;
    int n_gone, n_kept;
    uint4 * packed;    // [tiles][chunks][ROWS/8][WARP]
    float * inverse;   // [tiles][ROWS] of the length of a kept row; 1 where that is 0
    float * cosine;    // [n_parts][n_gone]
    int32_t * nearest; // the same
};

__host__ __device__ inline int chunks_of(const edgekv_numbered & keys) {
    return (keys.d + CHUNK - 1) / CHUNK;
}
__host__ __device__ inline int tile_size(const edgekv_numbered & keys) {
    return chunks_of(keys) * (ROWS / 8) * WARP;
}

__device__ __forceinline__ float square(const half8 & x) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        const float lo = __half2float(halves(x.w[i]).x), hi = __half2float(halves(x.w[i]).y);
        sum += lo * lo + hi * hi;
    }
    return sum;
}

// four lanes have a row's squares
__device__ __forceinline__ float inverse_length(float sum) {
    const float all = sum_over(sum, 4);
    return all > 0 ? 1.0f / sqrtf(all) : 1.0f;
}

// grid [tiles]; rows behind the last are the last one again, which the search does not look at
__global__ void pack_kept(const nearest_args a) {
    const int lane = threadIdx.x % WARP, n_chunks = chunks_of(a.keys);
    uint4 * to = a.packed + (size_t) blockIdx.x * tile_size(a.keys);
    for (int rows8 = threadIdx.x / WARP; rows8 < ROWS / 8; rows8 += WARPS) {
        const int r = rows8 * 8 + lane / 4, i = min((int) blockIdx.x * ROWS + r, a.n_kept - 1);
        const char * row = a.keys.base + (int64_t) a.kept[i] * a.keys.nb;
        float sum = 0;
        for (int c = 0; c < n_chunks; ++c) {
            const half8 x = read8(a.keys.type, row, c, lane % 4, a.keys.d);
            to[(c * (ROWS / 8) + rows8) * WARP + lane] = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
            sum += square(x);
        }
        const float inverse = inverse_length(sum);
        if (lane % 4 == 0) a.inverse[blockIdx.x * ROWS + r] = inverse;
    }
}

// the highest so far, the first of equal ones
struct best_row {
    float value = -INFINITY;
    int at = 0;

    __device__ void offer(float x, int i) {
        if (x > value || (x == value && i < at)) {
            value = x;
            at = i;
        }
    }
};

// a warp's rows g and g + 8 as the tensor cores take them
template <int D>
struct gone_rows {
    uint4 fragments[D / CHUNK][2];
    float inverse[2];

    __device__ void load(const nearest_args & a, int i0) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        const char * row[2];
        for (int i = 0; i < 2; ++i)
            row[i] = a.keys.base + (int64_t) a.gone[min(i0 + g + 8 * i, a.n_gone - 1)] * a.keys.nb;
        float sum[2] = { 0, 0 };
#pragma unroll
        for (int c = 0; c < D / CHUNK; ++c) {
            const half8 x = read8(a.keys.type, row[0], c, t, a.keys.d),
                        y = read8(a.keys.type, row[1], c, t, a.keys.d);
            for (int half = 0; half < 2; ++half)
                fragments[c][half] =
                    make_uint4(x.w[2 * half], y.w[2 * half], x.w[2 * half + 1], y.w[2 * half + 1]);
            sum[0] += square(x);
            sum[1] += square(y);
        }
        for (int i = 0; i < 2; ++i) inverse[i] = inverse_length(sum[i]);
    }
};

// grid [evicted rows/64, n_parts]
template <int D>
__global__ void __launch_bounds__(WARPS * WARP, 2) find_nearest(const nearest_args a) {
    __shared__ uint4 tile[D / CHUNK * (ROWS / 8) * WARP];
    __shared__ float inverse[ROWS];
    const int lane = threadIdx.x % WARP, i0 = (blockIdx.x * WARPS + threadIdx.x / WARP) * WARP_ROWS,
              n = tile_size(a.keys), n_chunks = chunks_of(a.keys);
    const int n_tiles = (a.n_kept + ROWS - 1) / ROWS,
              begin = (int) ((int64_t) n_tiles * blockIdx.y / gridDim.y) * ROWS;
    const int end = min(a.n_kept, (int) ((int64_t) n_tiles * (blockIdx.y + 1) / gridDim.y) * ROWS);
    gone_rows<D> gone;
    gone.load(a, i0);
    best_row best[2];
    for (int j0 = begin; j0 < end; j0 += ROWS) {
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            tile[i] = a.packed[(size_t) (j0 / ROWS) * n + i];
        if (threadIdx.x < ROWS) inverse[threadIdx.x] = a.inverse[j0 + threadIdx.x];
        __syncthreads();
        for (int rows8 = 0; rows8 < ROWS / 8; ++rows8) {
            __syncwarp(); // tensor cores want all lanes; what was offered may have parted them
            float s[4] = { 0, 0, 0, 0 };
#pragma unroll
            for (int c = 0; c < D / CHUNK; ++c) {
                if (c >= n_chunks) break;
                const uint4 x = tile[(c * (ROWS / 8) + rows8) * WARP + lane];
                mma(s, gone.fragments[c][0], x.x, x.y);
                mma(s, gone.fragments[c][1], x.z, x.w);
            }
            for (int x = 0; x < 4; ++x) {
                const int j = rows8 * 8 + 2 * (lane % 4) + x % 2;
                if (j0 + j < a.n_kept) best[x / 2].offer(s[x] * inverse[j], j0 + j);
            }
        }
        __syncthreads(); // the tile is used
    }
    for (int i = 0; i < 2; ++i) {
        for (int mask = 1; mask < 4; mask *= 2)
            best[i].offer(__shfl_xor_sync(ALL_LANES, best[i].value, mask),
                __shfl_xor_sync(ALL_LANES, best[i].at, mask));
        const int at = i0 + lane / 4 + 8 * i;
        if (lane % 4 || at >= a.n_gone) continue;
        a.cosine[(size_t) blockIdx.y * a.n_gone + at] = best[i].value * gone.inverse[i];
        a.nearest[(size_t) blockIdx.y * a.n_gone + at] = best[i].at;
    }
}

// of each evicted row the best of all parts
__global__ void nearest_of_parts(
    const nearest_args parts, int n_parts, float * cosine, int32_t * nearest) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= parts.n_gone) return;
    best_row best;
    for (int p = 0; p < n_parts; ++p)
        best.offer(parts.cosine[(size_t) p * parts.n_gone + i],
            parts.nearest[(size_t) p * parts.n_gone + i]);
    cosine[i] = best.value;
    nearest[i] = best.at;
}

// ---- fold

struct fold_args {
    edgekv_numbered to;
    edgekv_shares shares;
    const int32_t * begin;
};

// grid [rows/WARPS, chunks]; no row that is read by another warp is written. A row may receive
// thousands: several are on their way at once, which takes a type that is known when this is
// compiled
template <int type>
__global__ void fold_rows(const fold_args a) {
    const int i = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (i >= a.shares.n) return;
    char * chunk = a.to.base + blockIdx.y * chunk_bytes(type);
    const bool there = (int) blockIdx.y * CHUNK + lane < a.to.d;
    const int at = there ? lane : 0; // what nobody wants is read without asking
    auto value = [&](int32_t row) { return read_value(type, chunk + (int64_t) row * a.to.nb, at); };
    float sum = a.shares.own[i] * value(a.shares.rows[i]);
    const int begin = a.begin[i], end = begin + a.shares.counts[i];
#pragma unroll 8
    for (int j = begin; j < end; ++j) sum += a.shares.weights[j] * value(a.shares.sources[j]);
    write_value(type, chunk + (int64_t) a.shares.rows[i] * a.to.nb, lane, sum, there);
}

using fold_kernel = void (*)(const fold_args);

static fold_kernel fold_kernel_for(int type) {
    switch (type) {
        case GGML_TYPE_F16: return fold_rows<GGML_TYPE_F16>;
        case GGML_TYPE_BF16: return fold_rows<GGML_TYPE_BF16>;
        case GGML_TYPE_Q8_0: return fold_rows<GGML_TYPE_Q8_0>;
        case GGML_TYPE_Q5_1: return fold_rows<GGML_TYPE_Q5_1>;
        case GGML_TYPE_Q5_0: return fold_rows<GGML_TYPE_Q5_0>;
        case GGML_TYPE_Q4_1: return fold_rows<GGML_TYPE_Q4_1>;
        case GGML_TYPE_Q4_0: return fold_rows<GGML_TYPE_Q4_0>;
        default: return fold_rows<GGML_TYPE_IQ4_NL>;
    }
}

static int tiles(int n_kept) { return (n_kept + ROWS - 1) / ROWS; }

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

size_t edgekv_cuda_merge_workspace(const edgekv_numbered * keys, int n_kept) {
    return (size_t) tiles(n_kept) * (tile_size(*keys) * sizeof(uint4) + ROWS * sizeof(float)) +
        (size_t) BLOCKS * WARPS * WARP_ROWS * (sizeof(float) + sizeof(int32_t));
}

int edgekv_cuda_merge_nearest(const edgekv_numbered * keys, const int32_t * gone, int n_gone,
    const int32_t * kept, int n_kept, float * cosine, int32_t * nearest, void * workspace,
    void * stream) {
    count(NEAREST);
    if (n_gone <= 0) return cudaSuccess;
    if (n_kept <= 0) return cudaErrorInvalidValue;
    nearest_args a = { *keys, gone, kept, n_gone, n_kept, (uint4 *) workspace, nullptr, cosine,
        nearest };
    a.inverse = (float *) (a.packed + (size_t) tiles(n_kept) * tile_size(*keys));
    const auto kernel = keys->d <= 64 ? find_nearest<64>
        : keys->d <= 128              ? find_nearest<128>
                                      : find_nearest<256>;
    const int n_blocks = (n_gone + WARPS * WARP_ROWS - 1) / (WARPS * WARP_ROWS),
              wanted = BLOCKS / n_blocks,
              n_parts = wanted < 1 ? 1
        : wanted < tiles(n_kept)   ? wanted
                                   : tiles(n_kept);
    if (n_parts > 1) { // of them together no more rows than the workspace has room for
        a.cosine = a.inverse + (size_t) tiles(n_kept) * ROWS;
        a.nearest = (int32_t *) (a.cosine + (size_t) n_parts * n_gone);
    }
    cudaError_t e = launch(pack_kept, dim3(tiles(n_kept)), WARPS * WARP, 0, stream, a);
    if (e == cudaSuccess) e = launch(kernel, dim3(n_blocks, n_parts), WARPS * WARP, 0, stream, a);
    if (e != cudaSuccess || n_parts == 1) return e;
    return launch(nearest_of_parts, dim3((n_gone + WARPS * WARP - 1) / (WARPS * WARP)),
        WARPS * WARP, 0, stream, a, n_parts, cosine, nearest);
}

int edgekv_cuda_merge_fold(const edgekv_numbered * to, const edgekv_shares * shares,
    const int32_t * begin, void * stream) {
    count(FOLD);
    if (shares->n <= 0) return cudaSuccess;
    return launch(fold_kernel_for(to->type), dim3((shares->n + WARPS - 1) / WARPS, chunks_of(*to)),
        WARPS * WARP, 0, stream, fold_args { *to, *shares, begin });
}
