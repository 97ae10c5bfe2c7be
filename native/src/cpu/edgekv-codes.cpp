// codes: keys in a few bits, by which a token finds those that it needs
#include "edgekv-tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

using namespace edgekv;

namespace {

constexpr int LEARNED_FROM = 2048, TURNS = 10, ROUNDS = 8;

float dot(const float * a, const float * b, int n) {
    float x = 0;
    ggml_vec_dot_f32(n, &x, 0, a, 0, b, 0, 1);
    return x;
}

// ---- the basis

// [d][d] of keys less the mean
std::vector<float> covariance(const std::vector<float> & keys, int d) {
    std::vector<float> c((size_t) d * d);
    for (size_t r = 0; r < keys.size(); r += d)
        for (int i = 0; i < d; ++i) ggml_vec_mad_f32(d, &c[(size_t) i * d], &keys[r], keys[r + i]);
    return c;
}

// Directions in which the keys differ most: orthogonal iteration. Those that are about as good as
// each other may be mixed. Where keys differ in fewer directions, the others are 0
std::vector<float> directions(const std::vector<float> & c, int d, int n) {
    std::vector<int> order(d);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
        [&](int i, int j) { return c[(size_t) i * d + i] > c[(size_t) j * d + j]; });
    std::vector<float> b((size_t) n * d), next(d);
    for (int i = 0; i < n; ++i) b[(size_t) i * d + order[i]] = 1;
    for (int turn = 0; turn < TURNS; ++turn)
        for (int i = 0; i < n; ++i) {
            float * x = &b[(size_t) i * d];
            for (int j = 0; j < d; ++j) next[j] = dot(&c[(size_t) j * d], x, d);
            const float before = dot(next.data(), next.data(), d);
            for (int j = 0; j < i; ++j)
                ggml_vec_mad_f32(
                    d, next.data(), &b[(size_t) j * d], -dot(next.data(), &b[(size_t) j * d], d));
            const float size = dot(next.data(), next.data(), d);
            const float by = size > 1e-10f * before ? 1 / std::sqrt(size) : 0;
            for (int j = 0; j < d; ++j) x[j] = by * next[j];
        }
    return b;
}

void basis_to_f32(const edgekv_codebook & book, std::vector<float> & out) {
    out.resize((size_t) book.n_dims * book.d);
    edgekv_cpu_rows_to_f32(book.type, book.basis, ggml_row_size(book.type, book.d), 0, book.n_dims,
        book.d, out.data());
}

// Largest deviations first. Each part has about the same share of their sum: so the errors of parts
// are about alike
void cut_into_parts(const std::vector<float> & deviation, int n_parts, int32_t * ends) {
    const int n = (int) deviation.size();
    float rest = std::accumulate(deviation.begin(), deviation.end(), 0.0f);
    for (int p = 0, i = 0; p < n_parts; ++p) {
        const float share = rest / (float) (n_parts - p);
        float sum = 0;
        const int most = n - (n_parts - 1 - p); // each of the others has one
        while (i < most && (sum == 0 || p == n_parts - 1 || sum + deviation[i] / 2 < share))
            sum += deviation[i++];
        rest -= sum;
        ends[p] = i;
    }
}

// ---- centres

// of a part, [n_dims][16] and half of their squared lengths
struct centres {
    int n_dims;
    std::vector<float> at = std::vector<float>((size_t) n_dims * EDGEKV_CENTRES);
    float half[EDGEKV_CENTRES];

    void measure() {
        std::fill(half, half + EDGEKV_CENTRES, 0.0f);
        for (size_t i = 0; i < at.size(); ++i) half[i % EDGEKV_CENTRES] += at[i] * at[i] / 2;
    }

    // of EDGEKV_TILE vectors, value i of them at x + i*stride
    void nearest(const float * x, size_t stride, int32_t * which) const {
        float most[EDGEKV_TILE], near[EDGEKV_TILE];
        std::fill(most, most + EDGEKV_TILE, -INFINITY);
        std::fill(which, which + EDGEKV_TILE, 0);
        for (int c = 0; c < EDGEKV_CENTRES; ++c) {
            std::fill(near, near + EDGEKV_TILE, -half[c]);
            for (int i = 0; i < n_dims; ++i)
                for (int r = 0; r < EDGEKV_TILE; ++r)
                    near[r] += at[i * EDGEKV_CENTRES + c] * x[i * stride + r];
            for (int r = 0; r < EDGEKV_TILE; ++r) {
                which[r] = most[r] < near[r] ? c : which[r];
                most[r] = most[r] < near[r] ? near[r] : most[r];
            }
        }
    }
};

// Values of keys in a basis, [n_dims][n in whole tiles]
struct projected {
    int n = 0;
    size_t stride = 0;
    std::vector<float> x;

    void set(const float * keys, int n_keys, int d, const float * mean,
        const std::vector<float> & basis) {
        const int n_dims = (int) basis.size() / d;
        n = n_keys;
        stride = (size_t) (n + EDGEKV_TILE - 1) / EDGEKV_TILE * EDGEKV_TILE;
        x.assign(n_dims * stride, 0.0f);
        std::vector<float> tile((size_t) EDGEKV_TILE * d);
        std::vector<const float *> rows(n_dims);
        std::vector<float *> to(n_dims);
        for (int first = 0, some; first < n; first += some) {
            some = std::min(EDGEKV_TILE, n - first);
            for (int r = 0; r < some; ++r)
                ggml_vec_sub_f32(d, &tile[(size_t) r * d], keys + (size_t) (first + r) * d, mean);
            for (int i = 0; i < n_dims; ++i) {
                rows[i] = &basis[(size_t) i * d];
                to[i] = &x[i * stride + first];
            }
            tile_dot(tile.data(), rows.data(), n_dims, some, d, to.data());
        }
    }

    std::vector<float> deviations() const {
        std::vector<float> all;
        for (size_t i = 0; i < x.size(); i += stride)
            all.push_back(std::sqrt(dot(&x[i], &x[i], (int) stride)));
        return all;
    }
};

// k-means of the values from `first` on. A centre without any stays where it is
centres find_centres(const projected & keys, int first, int n_dims) {
    centres found { n_dims };
    const float * x = &keys.x[first * keys.stride];
    for (int c = 0; c < EDGEKV_CENTRES; ++c)
        for (int i = 0; i < n_dims; ++i)
            found.at[i * EDGEKV_CENTRES + c] =
                x[i * keys.stride + (size_t) c * keys.n / EDGEKV_CENTRES];
    for (int round = 0; round < ROUNDS; ++round) {
        found.measure();
        std::vector<float> sum(found.at.size()), size(EDGEKV_CENTRES);
        for (int r = 0; r < keys.n; r += EDGEKV_TILE) {
            int32_t which[EDGEKV_TILE];
            found.nearest(x + r, keys.stride, which);
            for (int j = 0; j < std::min(EDGEKV_TILE, keys.n - r); ++j) {
                size[which[j]] += 1;
                for (int i = 0; i < n_dims; ++i)
                    sum[i * EDGEKV_CENTRES + which[j]] += x[i * keys.stride + r + j];
            }
        }
        for (size_t i = 0; i < sum.size(); ++i)
            if (const float m = size[i % EDGEKV_CENTRES]) found.at[i] = sum[i] / m;
    }
    return found;
}

int begin_of(const edgekv_codebook & book, int part) { return part ? book.ends[part - 1] : 0; }

} // namespace

void edgekv_cpu_codes_learn(const edgekv_codebook * given, const float * all, int n_all,
    char * basis, ggml_fp16_t * to, float * mean, int32_t * ends) {
    edgekv_codebook book = *given;
    const int d = book.d, step = std::max(1, n_all / LEARNED_FROM);
    std::vector<float> keys, rows;
    for (int r = 0; r < n_all; r += step)
        keys.insert(keys.end(), all + (size_t) r * d, all + (size_t) (r + 1) * d);
    const int n = (int) keys.size() / d;
    std::fill(mean, mean + d, 0.0f);
    for (int r = 0; r < n; ++r) ggml_vec_acc_f32(d, mean, &keys[(size_t) r * d]);
    ggml_vec_scale_f32(d, mean, 1.0f / (float) n);
    for (int r = 0; r < n; ++r)
        for (int i = 0; i < d; ++i) keys[(size_t) r * d + i] -= mean[i];

    rows = directions(covariance(keys, d), d, book.n_dims);
    const std::vector<float> none(d);
    projected values;
    values.set(keys.data(), n, d, none.data(), rows);
    const auto unordered = values.deviations();
    std::vector<int> order(book.n_dims);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(
        order.begin(), order.end(), [&](int i, int j) { return unordered[i] > unordered[j]; });
    const size_t row_bytes = ggml_row_size(book.type, d);
    for (int i = 0; i < book.n_dims; ++i)
        ggml_get_type_traits(book.type)->from_float_ref(
            &rows[(size_t) order[i] * d], basis + i * row_bytes, d);
    book.basis = basis;
    basis_to_f32(book, rows); // as it was rounded
    values.set(keys.data(), n, d, none.data(), rows);
    cut_into_parts(values.deviations(), book.n_parts, ends);
    book.ends = ends;
    for (int p = 0; p < book.n_parts; ++p) {
        const int first = begin_of(book, p);
        const auto found = find_centres(values, first, ends[p] - first);
        ggml_cpu_fp32_to_fp16(
            found.at.data(), to + first * EDGEKV_CENTRES, (int64_t) found.at.size());
    }
}

void edgekv_cpu_codes_put(
    const edgekv_codebook * book, const float * keys, int n, int64_t first, uint8_t * codes) {
    std::vector<float> basis;
    projected values;
    basis_to_f32(*book, basis);
    values.set(keys, n, book->d, book->mean, basis);
    for (int p = 0; p < book->n_parts; ++p) {
        const int begin = begin_of(*book, p);
        centres c { book->ends[p] - begin };
        ggml_cpu_fp16_to_fp32(
            book->centres + begin * EDGEKV_CENTRES, c.at.data(), (int64_t) c.at.size());
        c.measure();
        int32_t which[EDGEKV_TILE];
        for (int r = 0; r < n; ++r) {
            if (r % EDGEKV_TILE == 0)
                c.nearest(&values.x[begin * values.stride + r], values.stride, which);
            const int64_t key = first + r, block = key / EDGEKV_BLOCK;
            const int shift = key % EDGEKV_BLOCK < 16 ? 0 : 4;
            uint8_t & byte = codes[(block * book->n_parts + p) * 16 + key % 16];
            byte = (uint8_t) ((byte & ~(15 << shift)) | which[r % EDGEKV_TILE] << shift);
        }
    }
}

// ---- scores

namespace {

// what each code adds to a logit, in steps of 1/255 of the largest difference within a part
struct tables {
    std::vector<float> exact;
    std::vector<uint8_t> rounded; // [n_query][n_parts][16]

    void set(const edgekv_codebook & book, const std::vector<float> & basis,
        const std::vector<float> & centres, const float * q, uint8_t * to, float & step) {
        exact.assign(book.n_parts * EDGEKV_CENTRES, 0.0f);
        float most = 0;
        for (int p = 0; p < book.n_parts; ++p) {
            float * x = &exact[p * EDGEKV_CENTRES];
            for (int i = begin_of(book, p); i < book.ends[p]; ++i)
                ggml_vec_mad_f32(EDGEKV_CENTRES, x, &centres[i * EDGEKV_CENTRES],
                    dot(&basis[(size_t) i * book.d], q, book.d));
            const float least = *std::min_element(x, x + EDGEKV_CENTRES);
            for (int c = 0; c < EDGEKV_CENTRES; ++c) most = std::max(most, x[c] -= least);
        }
        step = most / 255;
        const float by = most > 0 ? 255 / most : 0;
        for (size_t i = 0; i < exact.size(); ++i) to[i] = (uint8_t) lrintf(exact[i] * by);
    }
};

#if defined(__AVX2__)
// a block's codes apart, a byte each: [n_parts][32]
void unpack(const uint8_t * codes, int n_parts, uint8_t * out) {
    const __m128i low = _mm_set1_epi8(15);
    for (int p = 0; p < n_parts; ++p) {
        const __m128i x = _mm_loadu_si128((const __m128i *) (codes + p * 16));
        _mm_storeu_si128((__m128i *) (out + p * 32), _mm_and_si128(x, low));
        _mm_storeu_si128((__m128i *) (out + p * 32 + 16), _mm_and_si128(_mm_srli_epi16(x, 4), low));
    }
}

void add_up(const uint8_t * codes, const uint8_t * table, int n_parts, uint16_t * out) {
    const __m256i low = _mm256_set1_epi16(255);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int p = 0; p < n_parts; ++p) {
        const __m256i t =
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) (table + p * 16)));
        const __m256i x =
            _mm256_shuffle_epi8(t, _mm256_loadu_si256((const __m256i *) (codes + p * 32)));
        even = _mm256_add_epi16(even, _mm256_and_si256(x, low));
        odd = _mm256_add_epi16(odd, _mm256_srli_epi16(x, 8));
    }
    const __m256i a = _mm256_unpacklo_epi16(even, odd), b = _mm256_unpackhi_epi16(even, odd);
    _mm256_storeu_si256((__m256i *) out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *) (out + 16), _mm256_permute2x128_si256(a, b, 0x31));
}
#else
void unpack(const uint8_t * codes, int n_parts, uint8_t * out) {
    for (int p = 0; p < n_parts; ++p)
        for (int j = 0; j < 16; ++j) {
            out[p * 32 + j] = codes[p * 16 + j] & 15;
            out[p * 32 + 16 + j] = codes[p * 16 + j] >> 4;
        }
}

void add_up(const uint8_t * codes, const uint8_t * table, int n_parts, uint16_t * out) {
    std::fill(out, out + EDGEKV_BLOCK, (uint16_t) 0);
    for (int p = 0; p < n_parts; ++p)
        for (int j = 0; j < EDGEKV_BLOCK; ++j)
            out[j] = (uint16_t) (out[j] + table[p * 16 + codes[p * 32 + j]]);
}
#endif

} // namespace

void edgekv_cpu_codes_score(const edgekv_codebook * book, const uint8_t * codes, int n,
    const float * q, int64_t stride, int n_query, uint16_t * out, float * step) {
    static thread_local tables t;
    static thread_local std::vector<float> basis, centres;
    static thread_local std::vector<uint8_t> block;
    const size_t table = (size_t) book->n_parts * EDGEKV_CENTRES;
    basis_to_f32(*book, basis);
    centres.resize((size_t) book->n_dims * EDGEKV_CENTRES);
    ggml_cpu_fp16_to_fp32(book->centres, centres.data(), (int64_t) centres.size());
    t.rounded.resize(n_query * table);
    for (int h = 0; h < n_query; ++h)
        t.set(*book, basis, centres, q + h * stride, &t.rounded[h * table], step[h]);
    block.resize((size_t) book->n_parts * EDGEKV_BLOCK);
    for (int r = 0; r < n; r += EDGEKV_BLOCK) {
        unpack(codes + (size_t) r / 2 * book->n_parts, book->n_parts, block.data());
        for (int h = 0; h < n_query; ++h)
            add_up(block.data(), &t.rounded[h * table], book->n_parts, out + (size_t) h * n + r);
    }
}
