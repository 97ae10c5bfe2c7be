// attend on CUDA: few tokens over KV heads of different length. The definition of correct is
// cpu/edgekv-attend.cpp. The heads' rows are cut into tiles of 16, and all tiles of all heads
// evenly into parts: a block reads its part once for the up to 16 queries (tokens x heads of the
// group) that share it, each warp its own tiles, next tile under way while one is multiplied. Then
// one block per query folds the parts. Grids depend on shapes only: the lengths are read on the
// device.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-rows.cuh"

namespace edgekv_cuda {
namespace {

constexpr int ROWS = 16;    // of a tile
constexpr int QUERIES = 16; // of a block
constexpr int MAX_WARPS = 4;
constexpr int STAGES = 2; // tiles of a warp: one in work, one on its way
constexpr int ALIGN = 16;
constexpr int FOLDERS = 16; // warps that fold the parts of a query
constexpr int MAX_D = 256;

struct attend_args {
    edgekv_rows rows;
    edgekv_queries qs;
    float * top;    // [n_slots][n_q][2] maximum and sum
    float * values; // [n_slots][n_q][d_v]
    float * dst;
    int n_parts, n_q; // n_q: queries of a KV head, tokens x group
};

// bytes of n rows at any address, fetched in pieces of 16
__host__ __device__ constexpr size_t tile_bytes(size_t nb) {
    return (ROWS * nb + 2 * ALIGN - 1) / ALIGN * ALIGN;
}

// ---- who does what

struct tiles {
    int first, n;
}; // of one head, in tiles

__device__ __forceinline__ int first_seen(const edgekv_queries & qs) {
    if (!qs.start) return 0;
    int lo = qs.start[0];
    for (int t = 1; t < qs.n_tokens; ++t) lo = min(lo, qs.start[t]);
    return lo;
}

__device__ __forceinline__ tiles tiles_of(const edgekv_rows & rows, int k, int lo) {
    const int first = lo / ROWS;
    return { first, max(0, (rows.len[k] + ROWS - 1) / ROWS - first) };
}

__device__ __forceinline__ int total_tiles(const edgekv_rows & rows, int lo) {
    int n = 0;
    for (int k = 0; k < rows.n_head_kv; ++k) n += tiles_of(rows, k, lo).n;
    return n;
}

// part p is tiles [part_begin(p), part_begin(p + 1)) of all heads; no part is empty
__device__ __forceinline__ int part_begin(int total, int p, int n_parts) {
    return (int) ((int64_t) total * p / n_parts);
}
__device__ __forceinline__ int part_of(int total, int tile, int n_parts) {
    return (int) ((((int64_t) tile + 1) * n_parts - 1) / total);
}

// ---- a tile

// query i of the block's 16: its row of Q and the rows that it sees
struct query {
    const float * q;
    int h, lo, hi;
};

__device__ __forceinline__ query query_of(const attend_args & a, int k, int i) {
    const int G = a.rows.n_head / a.rows.n_head_kv, n = blockIdx.y * QUERIES + i, t = n / G;
    if (n >= a.n_q) return { nullptr, 0, 0, 0 };
    const int hidden = a.qs.n_after ? a.qs.n_after[t] : a.qs.n_tokens - 1 - t, h = k * G + n % G;
    return { a.qs.q + t * a.qs.stride_t + h * a.qs.stride_h, h, a.qs.start ? a.qs.start[t] : 0,
        a.rows.len[k] - hidden };
}

__device__ __forceinline__ void load_queries(const attend_args & a, int k, uint4 * to) {
    const int n = (a.rows.d_k + CHUNK - 1) / CHUNK * 2 * WARP;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int row = i % WARP / 4;
        to[i] = query_fragment(
            a.rows.type_k, a.rows.d_k, i, query_of(a, k, row).q, query_of(a, k, row + 8).q);
    }
}

// where the rows of a tile lie, in memory or in shared memory: bytes in front of the first because
// copies are aligned
struct stretch {
    const char * from;
    int shift, n_bytes;
    __device__ stretch(const char * base, size_t nb, int64_t row, int n_rows) {
        const char * p = base + row * nb;
        shift = (int) ((uintptr_t) p % ALIGN);
        from = p - shift;
        n_bytes = shift + n_rows * (int) nb;
    }
    // n_pieces: of a row in another order, 0 = as they are
    __device__ void fetch(char * to, int n_pieces) const {
        // i*inverse/65536 is i/n_pieces for the at most 16*32 pieces of a tile; a division takes 40
        // instructions
        const int inverse = n_pieces ? 65536 / n_pieces + 1 : 0;
        for (int i = threadIdx.x % WARP; i * ALIGN < n_bytes; i += WARP) {
            // a row has a multiple of eight
            const int at = n_pieces ? i ^ swizzle(i * inverse >> 16) : i;
            copy16(to + at * ALIGN, from + i * ALIGN);
        }
    }

    // rows of a multiple of 128 bytes would all begin in the same bank. With this order neither the
    // lanes that read eight rows of K nor those that read four rows of V meet: rows 2n and 2n + 1
    // differ in bit 2, rows 2n of a tile in bits 1 and 2.
    __device__ static int swizzle(int row) { return (row & 6) ^ (row & 1) * 5; }
    __device__ static int pieces(int type, size_t nb) {
        return (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) && nb % 128 == 0 ? (int) nb / ALIGN
                                                                                  : 0;
    }
};

// logits of 16 queries and 16 rows: s[j] has rows 8j.. of the tile
template <int T, int D>
__device__ __forceinline__ void multiply_keys(
    const attend_args & a, const uint4 * queries, const char * tile, float (&s)[2][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4,
              type = T == ANY_TYPE ? (int) a.rows.type_k : T;
    // row g + 8 has the same
    const int swizzle = stretch::pieces(type, a.rows.nb_k) ? stretch::swizzle(g) : 0;
    for (int j = 0; j < 2; ++j)
        for (int x = 0; x < 4; ++x) s[j][x] = 0;
#pragma unroll
    for (int i = 0; i < D / CHUNK; ++i) {
        if (i * CHUNK >= a.rows.d_k) break;
        const half8 k0 = read8(type, tile + g * a.rows.nb_k, i, t, a.rows.d_k, swizzle);
        const half8 k1 = read8(type, tile + (g + 8) * a.rows.nb_k, i, t, a.rows.d_k, swizzle);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 q = queries[(2 * i + half) * WARP + lane];
            mma(s[0], q, k0.w[2 * half], k0.w[2 * half + 1]);
            mma(s[1], q, k1.w[2 * half], k1.w[2 * half + 1]);
        }
    }
}

// o[8i + e]: values of 64 columns i, eight at a time; p: weights of 16 queries and 16 rows, of
// which n are there
template <int T, int D>
__device__ __forceinline__ void multiply_values(
    const attend_args & a, const uint4 & p, const char * tile, int n, float (&o)[D / 8][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4,
              type = T == ANY_TYPE ? (int) a.rows.type_v : T;
    const bool swizzled = stretch::pieces(type, a.rows.nb_v) > 0;
    int row[4], swizzle[4];
    for (int j = 0; j < 4; ++j) {
        // weights behind n are 0, what lies there need not be
        row[j] = min(2 * t + j % 2 + j / 2 * 8, n - 1);
        swizzle[j] = swizzled ? stretch::swizzle(row[j]) : 0;
    }
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
        if (i * 64 >= a.rows.d_v) break;
        half8 v[4];
        for (int j = 0; j < 4; ++j)
            v[j] = read8(
                type, tile + row[j] * a.rows.nb_v, 2 * i + g / 4, g % 4, a.rows.d_v, swizzle[j]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const uint32_t pick = e % 2 ? 0x7632 : 0x5410;
            mma(o[8 * i + e], p, __byte_perm(v[0].w[e / 2], v[1].w[e / 2], pick),
                __byte_perm(v[2].w[e / 2], v[3].w[e / 2], pick));
        }
    }
}

// column that o[j] holds in lanes of column n (0..7) of the tensor cores' result
__device__ __forceinline__ int value_of(int type, int j, int n) {
    return (2 * (j / 8) + n / 4) * CHUNK + value_column(type, n % 4, j % 8);
}

// ---- a warp's running softmax

template <int D>
struct state {
    float o[D / 8][4];
    float m[2], l[2]; // of queries g and g + 8; l of this lane's rows only

    __device__ void clear() {
        for (int j = 0; j < D / 8; ++j)
            for (int x = 0; x < 4; ++x) o[j][x] = 0;
        for (int i = 0; i < 2; ++i) {
            m[i] = -INFINITY;
            l[i] = 0;
        }
    }

    // the logits become weights, what is there already is scaled; the weights as the next factor
    __device__ uint4 fold(float (&s)[2][4]) {
        float c[2];
        for (int i = 0; i < 2; ++i) {
            const float top = fmaxf(m[i],
                max_over(
                    fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1])),
                    4));
            c[i] = m[i] == top ? 1.0f : exp_below(m[i], top); // of a query that sees nothing too
            m[i] = top;
            l[i] *= c[i];
            for (int j = 0; j < 2; ++j)
                for (int x = 2 * i; x < 2 * i + 2; ++x) l[i] += s[j][x] = exp_below(s[j][x], top);
        }
        if (!__all_sync(ALL_LANES, c[0] == 1.0f && c[1] == 1.0f)) {
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                for (int x = 0; x < 4; ++x) o[j][x] *= c[x / 2];
        }
        return make_uint4(pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]),
            pack(s[1][2], s[1][3]));
    }
};

// ---- a segment: the tiles of one head in one part

// shared memory of a block: Q, then the warps' tiles; after the tiles, in their place, the sums of
// the warps
struct shared_layout {
    size_t queries, tile_k, tile_v, sums;
    __host__ __device__ shared_layout(const edgekv_rows & rows, int D)
        : queries((size_t) D / CHUNK * 2 * WARP * sizeof(uint4)), tile_k(tile_bytes(rows.nb_k)),
          tile_v(tile_bytes(rows.nb_v)),
          sums((QUERIES * D + 2 * MAX_WARPS * QUERIES) * sizeof(float)) {}
    __host__ __device__ size_t stage() const { return tile_k + tile_v; }
    __host__ __device__ size_t total(int n_warps) const {
        const size_t n = n_warps * STAGES * stage();
        return queries + (n > sums ? n : sums);
    }
};

template <int T, int D>
__device__ __forceinline__ void attend_tiles(const attend_args & a, const shared_layout & at,
    uint4 * queries, char * stages, int k, int begin, int end, state<D> & st) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP,
              len = a.rows.len[k], first = a.rows.first[k];
    const query q[2] = { query_of(a, k, lane / 4), query_of(a, k, lane / 4 + 8) };
    const alibi lower[2] = { alibi(a.rows, k, q[0].h, q[0].hi), alibi(a.rows, k, q[1].h, q[1].hi) };
    const int pieces_k = stretch::pieces(T == ANY_TYPE ? (int) a.rows.type_k : T, a.rows.nb_k);
    const int pieces_v = stretch::pieces(T == ANY_TYPE ? (int) a.rows.type_v : T, a.rows.nb_v);
    auto fetch = [&](int tile, int stage) {
        if (tile < end) {
            const int64_t row = (int64_t) first + tile * ROWS;
            const int n = min(ROWS, len - tile * ROWS);
            stretch(a.rows.k, a.rows.nb_k, row, n).fetch(stages + stage * at.stage(), pieces_k);
            stretch(a.rows.v, a.rows.nb_v, row, n)
                .fetch(stages + stage * at.stage() + at.tile_k, pieces_v);
        }
        copy_commit();
    };
    fetch(begin + warp, 0);
    load_queries(a, k, queries);
    __syncthreads();
    int stage = 0;
    for (int tile = begin + warp; tile < end; tile += n_warps, stage = 1 - stage) {
        fetch(tile + n_warps, 1 - stage);
        copy_wait<1>();
        __syncwarp();
        const int64_t row = (int64_t) first + tile * ROWS;
        const char * tile_k =
            stages + stage * at.stage() + stretch(a.rows.k, a.rows.nb_k, row, 0).shift;
        const char * tile_v =
            stages + stage * at.stage() + at.tile_k + stretch(a.rows.v, a.rows.nb_v, row, 0).shift;
        float s[2][4];
        multiply_keys<T, D>(a, queries, tile_k, s);
        for (int j = 0; j < 2; ++j)
            for (int x = 0; x < 4; ++x) {
                const int r = tile * ROWS + 8 * j + 2 * (lane % 4) + x % 2;
                s[j][x] = r >= q[x / 2].lo && r < q[x / 2].hi
                    ? logit(s[j][x], a.rows.scale, a.rows.softcap) + lower[x / 2](r)
                    : -INFINITY;
            }
        multiply_values<T, D>(a, st.fold(s), tile_v, min(ROWS, len - tile * ROWS), st.o);
        __syncwarp(); // the stage is free
    }
    copy_wait<0>();
}

// the warps' sums into one, to the segment's slot
template <int T, int D>
__device__ __forceinline__ void store_segment(
    const attend_args & a, float * sums, int slot, state<D> & st) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP,
              type = T == ANY_TYPE ? (int) a.rows.type_v : T;
    float (*tops)[QUERIES][2] = (float (*)[QUERIES][2])(sums + QUERIES * D);
    for (int i = 0; i < 2; ++i) {
        st.l[i] = sum_over(st.l[i], 4);
        tops[warp][lane / 4 + 8 * i][0] = st.m[i];
        tops[warp][lane / 4 + 8 * i][1] = st.l[i];
    }
    __syncthreads();
    float m[2] = { -INFINITY, -INFINITY }, l[2] = { 0, 0 };
    for (int i = 0; i < 2; ++i) {
        for (int w = 0; w < n_warps; ++w) m[i] = fmaxf(m[i], tops[w][lane / 4 + 8 * i][0]);
        for (int w = 0; w < n_warps; ++w)
            l[i] += tops[w][lane / 4 + 8 * i][1] * exp_below(tops[w][lane / 4 + 8 * i][0], m[i]);
    }
    const int q0 = blockIdx.y * QUERIES, n = min(QUERIES, a.n_q - q0), d = a.rows.d_v;
    for (int w = 0; w < n_warps; ++w) {
        if (w == warp) {
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                for (int x = 0; x < 4; ++x) {
                    if (lane / 4 + x / 2 * 8 >= n) continue; // of no query
                    float & to = sums[(lane / 4 + x / 2 * 8) * D +
                        value_of(type, j, 2 * (lane % 4) + x % 2)];
                    const float y = st.o[j][x] * exp_below(st.m[x / 2], m[x / 2]);
                    to = w ? to + y : y;
                }
        }
        __syncthreads();
    }
    const int64_t at = (int64_t) slot * a.n_q + q0;
    for (int i = threadIdx.x; i < n * d; i += blockDim.x)
        a.values[at * d + i] = sums[i / d * D + i % d];
    for (int i = 0; i < 2; ++i) {
        const int q = lane / 4 + 8 * i;
        if (warp || lane % 4 || q >= n) continue;
        a.top[(at + q) * 2] = m[i];
        a.top[(at + q) * 2 + 1] = l[i];
    }
    __syncthreads(); // the shared memory is free
}

// T: type of K and V, or ANY_TYPE; D: 64, 128 or 256, at least the heads' sizes
template <int T, int D>
__global__ void __launch_bounds__(MAX_WARPS * WARP, D == 256 ? 2 : 3)
    attend_part(const attend_args a) {
    char * shared = dynamic_shared();
    const shared_layout at(a.rows, D);
    const int lo = first_seen(a.qs), total = total_tiles(a.rows, lo),
              n_parts = min(a.n_parts, total), p = blockIdx.x;
    if (p >= n_parts) return;
    const int begin = part_begin(total, p, n_parts), end = part_begin(total, p + 1, n_parts);
    int base = 0;
    for (int k = 0; k < a.rows.n_head_kv; ++k) {
        const tiles t = tiles_of(a.rows, k, lo);
        const int b = max(begin, base) - base, e = min(end, base + t.n) - base;
        base += t.n;
        if (b >= e) continue;
        state<D> st;
        st.clear();
        char * stages = shared + at.queries;
        attend_tiles<T, D>(a, at, (uint4 *) shared,
            stages + threadIdx.x / WARP * STAGES * at.stage(), k, t.first + b, t.first + e, st);
        __syncthreads();
        // p + k grows from segment to segment: a slot for each
        store_segment<T, D>(a, (float *) stages, p + k, st);
    }
}

// One block per head and token. The head's parts are some fifty on a large GPU: the warps share
// them, so that their loads wait together.
__global__ void __launch_bounds__(FOLDERS * WARP) attend_combine(const attend_args a) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int h = blockIdx.x, t = blockIdx.y, G = a.rows.n_head / a.rows.n_head_kv, k = h / G,
              q = t * G + h % G, d = a.rows.d_v;
    const int lo = first_seen(a.qs), total = total_tiles(a.rows, lo),
              n_parts = min(a.n_parts, total);
    int base = 0;
    for (int i = 0; i < k; ++i) base += tiles_of(a.rows, i, lo).n;
    const int n = tiles_of(a.rows, k, lo).n;
    const int p0 = n ? part_of(total, base, n_parts) : 0,
              p1 = n ? part_of(total, base + n - 1, n_parts) + 1 : 0;
    auto slot = [&](int p) { return (int64_t) (p + k) * a.n_q + q; };
    __shared__ float sums[FOLDERS][MAX_D], weights[FOLDERS], tops[FOLDERS];
    float m = a.rows.sinks ? a.rows.sinks[h] : -INFINITY;
    for (int p = p0 + (int) threadIdx.x; p < p1; p += blockDim.x) m = fmaxf(m, a.top[slot(p) * 2]);
    m = max_over(m, WARP);
    if (lane == 0) tops[warp] = m;
    __syncthreads();
    for (int w = 0; w < FOLDERS; ++w) m = fmaxf(m, tops[w]);
    float y[MAX_D / WARP] = {}, l = 0;
    for (int p = p0 + warp; p < p1; p += FOLDERS) {
        const float c = exp_below(a.top[slot(p) * 2], m);
        l += a.top[slot(p) * 2 + 1] * c;
#pragma unroll
        for (int j = 0; j < MAX_D / WARP; ++j)
            if (j * WARP + lane < d) y[j] += a.values[slot(p) * d + j * WARP + lane] * c;
    }
    if (lane == 0) weights[warp] = l;
#pragma unroll
    for (int j = 0; j < MAX_D / WARP; ++j) sums[warp][j * WARP + lane] = y[j];
    __syncthreads();
    float sum = a.rows.sinks ? exp_below(a.rows.sinks[h], m) : 0;
    for (int w = 0; w < FOLDERS; ++w) sum += weights[w];
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float x = 0;
        for (int w = 0; w < FOLDERS; ++w) x += sums[w][i];
        a.dst[((int64_t) t * a.rows.n_head + h) * d + i] = sum > 0 ? x / sum : 0;
    }
}

// ---- launch

typedef void (*attend_kernel)(attend_args);

template <int D>
attend_kernel kernel_for(const edgekv_rows & rows) {
    if (rows.type_k != rows.type_v) return attend_part<ANY_TYPE, D>;
    switch (rows.type_k) {
        case GGML_TYPE_F16: return attend_part<GGML_TYPE_F16, D>;
        case GGML_TYPE_Q8_0: return attend_part<GGML_TYPE_Q8_0, D>;
        case GGML_TYPE_Q4_0: return attend_part<GGML_TYPE_Q4_0, D>;
        default: return attend_part<ANY_TYPE, D>;
    }
}

struct plan {
    int D, n_warps, n_shared;
    attend_kernel kernel;
};

// as many warps as the device's shared memory allows
static cudaError_t make_plan(const edgekv_rows & rows, plan & p) {
    const int d = rows.d_k > rows.d_v ? rows.d_k : rows.d_v;
    int device = 0, limit = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e != cudaSuccess) return told(e);
    p.D = d <= 64 ? 64 : d <= 128 ? 128 : 256;
    p.kernel = p.D == 64 ? kernel_for<64>(rows)
        : p.D == 128     ? kernel_for<128>(rows)
                         : kernel_for<256>(rows);
    const shared_layout at(rows, p.D);
    p.n_warps = MAX_WARPS;
    while (p.n_warps > 1 && at.total(p.n_warps) > (size_t) limit) p.n_warps /= 2;
    p.n_shared = (int) at.total(p.n_warps);
    // the same for every caller
    return told(cudaFuncSetAttribute(
        (const void *) p.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
}

static size_t n_slots(const edgekv_rows & rows, int n_parts) {
    return (size_t) n_parts + rows.n_head_kv;
}

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

bool edgekv_cuda_attend_supports(enum ggml_type type_k, enum ggml_type type_v, int d_k, int d_v) {
    return type_supported(type_k, d_k) && type_supported(type_v, d_v);
}

int edgekv_cuda_attend_parts(const edgekv_rows * rows) {
    plan p;
    int device = 0, n_sm = 0, n_blocks = 0;
    cudaError_t e = make_plan(*rows, p);
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &n_blocks, p.kernel, p.n_warps * WARP, p.n_shared);
    if (told(e) != cudaSuccess) return 1;
    return n_sm * (n_blocks > 0 ? n_blocks : 1);
}

size_t edgekv_cuda_attend_workspace(const edgekv_rows * rows, int n_tokens, int n_parts) {
    const int n_q = n_tokens * (rows->n_head / rows->n_head_kv);
    return n_slots(*rows, n_parts) * n_q * (2 + rows->d_v) * sizeof(float);
}

int edgekv_cuda_attend(const edgekv_rows * rows, const edgekv_queries * qs, float * dst,
    int n_parts, void * workspace, void * stream) {
    count(ATTEND);
    plan p;
    cudaError_t e = make_plan(*rows, p);
    if (e != cudaSuccess) return e;
    attend_args a = { *rows, *qs, nullptr, nullptr, dst, n_parts,
        qs->n_tokens * (rows->n_head / rows->n_head_kv) };
    a.top = (float *) workspace;
    a.values = a.top + n_slots(*rows, n_parts) * a.n_q * 2;
    e = launch(p.kernel, dim3(n_parts, (a.n_q + QUERIES - 1) / QUERIES), p.n_warps * WARP,
        p.n_shared, stream, a);
    if (e != cudaSuccess) return e;
    return launch(attend_combine, dim3(rows->n_head, qs->n_tokens), FOLDERS * WARP, 0, stream, a);
}
