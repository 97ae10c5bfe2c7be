// attend on CUDA: few tokens over KV heads of different length. The definition of correct is
// cpu/edgekv-attend.cpp. The heads' rows are cut into tiles of 16, and all tiles of all heads
// evenly into parts: a block reads its part once for the up to 16 queries (tokens x heads of the
// group) that share it, each warp its own tiles, next tile under way while one is multiplied. Then
// one block per query folds the parts. Grids depend on shapes only: the lengths are read on the
// device.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-rows.cuh"

#include <climits>

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
    int n_warps;      // of a block that reads a part
};

// bytes of n rows at any address, fetched in pieces of 16
__host__ __device__ constexpr size_t tile_bytes(size_t nb) {
    return (ROWS * nb + 2 * ALIGN - 1) / ALIGN * ALIGN;
}

// What rows are like. A kernel for a type T is for heads of exactly D values: its loops have a
// known length, which is half of the instructions.
template <int T, int D>
struct row_kind {
    int type, d;
    int nb;
    __host__ __device__ static row_kind keys(const edgekv_rows & rows) {
        if (T != ANY_TYPE) return { T, D, (int) row_bytes(T, D) };
        return { (int) rows.type_k, rows.d_k, (int) rows.nb_k };
    }
    __host__ __device__ static row_kind values(const edgekv_rows & rows) {
        if (T != ANY_TYPE) return { T, D, (int) row_bytes(T, D) };
        return { (int) rows.type_v, rows.d_v, (int) rows.nb_v };
    }
    // of 16 bytes, where they lie in another order: 0 = as they are
    __device__ int pieces() const { return !has_blocks(type) && nb % 128 == 0 ? nb / ALIGN : 0; }
};

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

// of the heads before k, by all lanes of a warp
__device__ __forceinline__ int tiles_before(const edgekv_rows & rows, int k, int lo) {
    int n = 0;
    for (int i = threadIdx.x % WARP; i < k; i += WARP) n += tiles_of(rows, i, lo).n;
    for (int i = 1; i < WARP; i *= 2) n += __shfl_xor_sync(ALL_LANES, n, i);
    return n;
}

// a tile for each warp of a part, where there are so many
__device__ __forceinline__ int parts_of(const attend_args & a, int total) {
    return min(a.n_parts, max(1, total / a.n_warps));
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

template <int T, int D>
__device__ __forceinline__ void load_queries(
    const attend_args & a, const row_kind<T, D> & keys, int k, uint4 * to) {
    const int n = (keys.d + CHUNK - 1) / CHUNK * 2 * WARP;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int row = i % WARP / 4;
        to[i] =
            query_fragment(keys.type, keys.d, i, query_of(a, k, row).q, query_of(a, k, row + 8).q);
    }
}

// The rows of a head from a tile's first one on: bytes in front of it because copies are aligned. A
// tile has a multiple of 16 bytes, so `shift` is that of all tiles.
struct stretch {
    const char * from;
    int shift;

    template <int T, int D>
    __device__ stretch(const char * base, const row_kind<T, D> & kind, int64_t row) {
        const char * p = base + row * kind.nb;
        // rows without blocks are read as pieces where they lie
        shift = has_blocks(kind.type) ? (int) ((uintptr_t) p % ALIGN) : 0;
        from = p - shift;
    }
    // n rows of a tile; i: its number from `from` on
    template <int T, int D>
    __device__ void fetch(char * to, const row_kind<T, D> & kind, int i, int n) const {
        const int nb = kind.nb, n_pieces = kind.pieces(), lane = threadIdx.x % WARP,
                  n_bytes = shift + n * nb;
        const int n_turns =
            (int) ((n_pieces ? ROWS * nb : tile_bytes(nb)) / ALIGN + WARP - 1) / WARP;
        const char * p = from + (int64_t) i * ROWS * nb + lane * ALIGN;
#pragma unroll(T == ANY_TYPE ? 1 : 4)
        for (int turn = 0; turn < n_turns; ++turn) {
            const int piece = turn * WARP + lane;
            // a row has a multiple of eight
            const int at = n_pieces ? piece ^ swizzle(piece / n_pieces) : piece;
            if (piece * ALIGN < n_bytes) copy16(to + at * ALIGN, p + turn * WARP * ALIGN);
        }
    }

    // rows of a multiple of 128 bytes would all begin in the same bank. With this order neither the
    // lanes that read eight rows of K nor those that read four rows of V meet: rows 2n and 2n + 1
    // differ in bit 2, rows 2n of a tile in bits 1 and 2.
    __device__ static int swizzle(int row) { return (row & 6) ^ (row & 1) * 5; }
};

// logits of 16 queries and 16 rows: s[j] has rows 8j.. of the tile
template <int T, int D>
__device__ __forceinline__ void multiply_keys(
    const row_kind<T, D> & keys, const uint4 * queries, const char * tile, float (&s)[2][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    // row g + 8 has the same
    const int swizzle = keys.pieces() ? stretch::swizzle(g) : 0;
    for (int j = 0; j < 2; ++j)
        for (int x = 0; x < 4; ++x) s[j][x] = 0;
#pragma unroll
    for (int i = 0; i < D / CHUNK; ++i) {
        if (i * CHUNK >= keys.d) break;
        const half8 k0 = read8(keys.type, tile + g * keys.nb, i, t, keys.d, swizzle);
        const half8 k1 = read8(keys.type, tile + (g + 8) * keys.nb, i, t, keys.d, swizzle);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 q = queries[(2 * i + half) * WARP + lane];
            mma(s[0], q, k0.w[2 * half], k0.w[2 * half + 1]);
            mma(s[1], q, k1.w[2 * half], k1.w[2 * half + 1]);
        }
    }
}

// the four rows of a tile whose values this lane multiplies; weights behind its n rows are 0, what
// lies there need not be
struct value_rows {
    int row[4];
    __device__ explicit value_rows(int n) {
        for (int j = 0; j < 4; ++j)
            row[j] = min(2 * (int) (threadIdx.x % 4) + j % 2 + j / 2 * 8, n - 1);
    }
};

// o[8i + e]: values of 64 columns i, eight at a time; p: weights of 16 queries and 16 rows
template <int T, int D>
__device__ __forceinline__ void multiply_values(const row_kind<T, D> & values, const uint4 & p,
    const char * tile, const value_rows & rows, float (&o)[D / 8][4]) {
    const int g = threadIdx.x % WARP / 4;
    const bool swizzled = values.pieces() > 0;
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
        if (i * 64 >= values.d) break;
        half8 v[4];
        for (int j = 0; j < 4; ++j)
            v[j] = read8(values.type, tile + rows.row[j] * values.nb, 2 * i + g / 4, g % 4,
                values.d, swizzled ? stretch::swizzle(rows.row[j]) : 0);
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
    __host__ __device__ shared_layout(size_t nb_k, size_t nb_v, int D)
        : queries((size_t) D / CHUNK * 2 * WARP * sizeof(uint4)), tile_k(tile_bytes(nb_k)),
          tile_v(tile_bytes(nb_v)), sums((QUERIES * D + 2 * MAX_WARPS * QUERIES) * sizeof(float)) {}
    __host__ __device__ size_t stage() const { return tile_k + tile_v; }
    __host__ __device__ size_t total(int n_warps) const {
        const size_t n = n_warps * STAGES * stage();
        return queries + (n > sums ? n : sums);
    }
};

// what a lane's two queries see, and what becomes of their logits
struct sight {
    query q[2];
    alibi lower[2];
    int lo, hi; // rows that all queries of the block see, where none is lowered

    __device__ sight(const attend_args & a, int k)
        : q { query_of(a, k, threadIdx.x % WARP / 4), query_of(a, k, threadIdx.x % WARP / 4 + 8) },
          lower { alibi(a.rows, k, q[0].h, q[0].hi), alibi(a.rows, k, q[1].h, q[1].hi) }, lo(0),
          hi(INT_MAX) {
        for (int i = 0; i < 2; ++i) {
            if (!q[i].q) continue;
            lo = max(lo, q[i].lo);
            hi = min(hi, q[i].hi);
        }
        for (int i = 4; i < WARP; i *= 2) {
            lo = max(lo, __shfl_xor_sync(ALL_LANES, lo, i));
            hi = min(hi, __shfl_xor_sync(ALL_LANES, hi, i));
        }
        if (a.rows.max_bias != 0.0f) hi = 0;
    }

    // s[j][x]: of rows first + 8j.. A loop for each case: branches in a loop over registers nest
    __device__ void operator()(const attend_args & a, float (&s)[2][4], int first) const {
        const float scale = a.rows.scale, softcap = a.rows.softcap;
        if (softcap == 0.0f) each([&](int, int, float y) { return y * scale; }, s);
        else each([&](int, int, float y) { return logit(y, scale, softcap); }, s);
        if (first >= lo && first + ROWS <= hi) return;
        const int r0 = first + 2 * (int) (threadIdx.x % 4);
        if (lower[0].pos || lower[1].pos)
            each([&](int i, int r,
                     float y) { return y + (r0 + r < q[i].hi ? lower[i](r0 + r) : 0); },
                s);
        each([&](int i, int r,
                 float y) { return r0 + r >= q[i].lo && r0 + r < q[i].hi ? y : -INFINITY; },
            s);
    }

    // f(query, row from the lane's first on, logit)
    template <typename F>
    __device__ static void each(F f, float (&s)[2][4]) {
        for (int j = 0; j < 2; ++j)
            for (int x = 0; x < 4; ++x) s[j][x] = f(x / 2, 8 * j + x % 2, s[j][x]);
    }
};

template <int T, int D>
__device__ __forceinline__ void attend_tiles(const attend_args & a, const shared_layout & at,
    uint4 * queries, char * stages, int k, int begin, int end, state<D> & st) {
    const int warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP, len = a.rows.len[k];
    const auto keys = row_kind<T, D>::keys(a.rows), values = row_kind<T, D>::values(a.rows);
    const int64_t row = (int64_t) a.rows.first[k] + begin * ROWS;
    const stretch from_k(a.rows.k, keys, row), from_v(a.rows.v, values, row);
    auto fetch = [&](int tile, int stage) {
        if (tile < end) {
            const int n = min(ROWS, len - tile * ROWS);
            from_k.fetch(stages + stage * at.stage(), keys, tile - begin, n);
            from_v.fetch(stages + stage * at.stage() + at.tile_k, values, tile - begin, n);
        }
        copy_commit();
    };
    fetch(begin + warp, 0);
    load_queries(a, keys, k, queries);
    const sight see(a, k);
    __syncthreads();
    int stage = 0;
    for (int tile = begin + warp; tile < end; tile += n_warps, stage = 1 - stage) {
        fetch(tile + n_warps, 1 - stage);
        copy_wait<1>();
        __syncwarp();
        const char * tile_k = stages + stage * at.stage() + from_k.shift;
        const char * tile_v = stages + stage * at.stage() + at.tile_k + from_v.shift;
        float s[2][4];
        multiply_keys(keys, queries, tile_k, s);
        see(a, s, tile * ROWS);
        const value_rows rows(min(ROWS, len - tile * ROWS));
        multiply_values(values, st.fold(s), tile_v, rows, st.o);
        __syncwarp(); // the stage is free
    }
    copy_wait<0>();
}

// the warps' sums into one, to the segment's slot
template <int T, int D>
__device__ __forceinline__ void store_segment(
    const attend_args & a, float * sums, int slot, state<D> & st) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const auto values = row_kind<T, D>::values(a.rows);
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
    const int q0 = blockIdx.y * QUERIES, n = min(QUERIES, a.n_q - q0), d = values.d;
    for (int w = 0; w < n_warps; ++w) {
        if (w == warp) {
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                for (int x = 0; x < 4; ++x) {
                    if (lane / 4 + x / 2 * 8 >= n) continue; // of no query
                    float & to = sums[(lane / 4 + x / 2 * 8) * D +
                        value_of(values.type, j, 2 * (lane % 4) + x % 2)];
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

// T: type of K and V, of D values each, or ANY_TYPE; D: 64, 128 or 256, at least the heads' sizes
template <int T, int D>
__global__ void __launch_bounds__(MAX_WARPS * WARP, D == 256 ? 2 : 3)
    attend_part(const attend_args a) {
    char * shared = dynamic_shared();
    const shared_layout at(row_kind<T, D>::keys(a.rows).nb, row_kind<T, D>::values(a.rows).nb, D);
    const int lo = first_seen(a.qs), total = tiles_before(a.rows, a.rows.n_head_kv, lo),
              n_parts = parts_of(a, total), p = blockIdx.x;
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
        attend_tiles<T>(a, at, (uint4 *) shared, stages + threadIdx.x / WARP * STAGES * at.stage(),
            k, t.first + b, t.first + e, st);
        __syncthreads();
        // p + k grows from segment to segment: a slot for each
        store_segment<T>(a, (float *) stages, p + k, st);
    }
}

// One block per head and token. The head's parts are some fifty on a large GPU: the warps share
// them, so that their loads wait together.
__global__ void __launch_bounds__(FOLDERS * WARP, 2) attend_combine(const attend_args a) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int h = blockIdx.x, t = blockIdx.y, G = a.rows.n_head / a.rows.n_head_kv, k = h / G,
              q = t * G + h % G, d = a.rows.d_v;
    const int lo = first_seen(a.qs), total = tiles_before(a.rows, a.rows.n_head_kv, lo),
              n_parts = parts_of(a, total), base = tiles_before(a.rows, k, lo);
    const int n = tiles_of(a.rows, k, lo).n;
    const int p0 = n ? part_of(total, base, n_parts) : 0,
              p1 = n ? part_of(total, base + n - 1, n_parts) + 1 : 0;
    auto slot = [&](int p) { return (int64_t) (p + k) * a.n_q + q; };
    const float * recalled = a.qs.recalled
        ? a.qs.recalled + ((int64_t) t * a.rows.n_head + h) * (2 + d)
        : nullptr; // a part more
    __shared__ float sums[FOLDERS][MAX_D], weights[FOLDERS], tops[FOLDERS];
    float m = a.rows.sinks ? a.rows.sinks[h] : -INFINITY;
    if (recalled) m = fmaxf(m, recalled[0]);
    for (int p = p0 + (int) threadIdx.x; p < p1; p += blockDim.x) m = fmaxf(m, a.top[slot(p) * 2]);
    m = max_over(m, WARP);
    if (lane == 0) tops[warp] = m;
    __syncthreads();
    for (int w = 0; w < FOLDERS; ++w) m = fmaxf(m, tops[w]);
    float y[MAX_D / WARP] = {}, l = 0;
#pragma unroll 4
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
    const float c = recalled ? exp_below(recalled[0], m) : 0;
    if (recalled) sum += recalled[1] * c;
    for (int w = 0; w < FOLDERS; ++w) sum += weights[w];
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float x = recalled ? recalled[2 + i] * c : 0;
        for (int w = 0; w < FOLDERS; ++w) x += sums[w][i];
        a.dst[((int64_t) t * a.rows.n_head + h) * d + i] = sum > 0 ? x / sum : 0;
    }
}

// ---- launch

typedef void (*attend_kernel)(attend_args);

template <int D>
attend_kernel kernel_for(const edgekv_rows & rows) {
    const int type = rows.type_k;
    const size_t nb = row_bytes(type, D);
    const bool alike =
        rows.type_v == type && rows.d_k == D && rows.d_v == D && rows.nb_k == nb && rows.nb_v == nb;
    if (alike && type == GGML_TYPE_F16) return attend_part<GGML_TYPE_F16, D>;
    if (alike && type == GGML_TYPE_Q8_0) return attend_part<GGML_TYPE_Q8_0, D>;
    if (alike && type == GGML_TYPE_Q4_0) return attend_part<GGML_TYPE_Q4_0, D>;
    return attend_part<ANY_TYPE, D>;
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
    const shared_layout at(rows.nb_k, rows.nb_v, p.D);
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
        qs->n_tokens * (rows->n_head / rows->n_head_kv), p.n_warps };
    a.top = (float *) workspace;
    a.values = a.top + n_slots(*rows, n_parts) * a.n_q * 2;
    e = launch(p.kernel, dim3(n_parts, (a.n_q + QUERIES - 1) / QUERIES), p.n_warps * WARP,
        p.n_shared, stream, a);
    if (e != cudaSuccess) return e;
    return launch(attend_combine, dim3(rows->n_head, qs->n_tokens), FOLDERS * WARP, 0, stream, a);
}
