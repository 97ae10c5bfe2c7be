#pragma once
// The kernels of edgekv-few.h. Levels are the integers of a weight's values (edgekv-few-lanes.h).

#include "edgekv-few-lanes.h"

#define GGML_COMMON_IMPL_CPP // kvalues_iq4nl
#include "ggml-common.h"
#include "ggml-impl.h"
#include "repack.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if EDGEKV_FEW
namespace edgekv {

// values in 8 bits around 0, each SIZE of them times a scale
template <int SIZE>
struct rounded {
    int8_t q[SIZE];
    float round(const float * x) { // returns the scale
        float most = 0;
        for (int i = 0; i < SIZE; ++i) most = std::max(most, std::fabs(x[i]));
        const float factor = most > 0 ? 127 / most : 0;
        for (int i = 0; i < SIZE; ++i) {
            const float up =
                x[i] * factor + 12582912.0f; // 1.5 * 2^23: its low bits are the integer
            int32_t bits;
            memcpy(&bits, &up, sizeof(bits));
            q[i] = (int8_t) bits;
        }
        return most / 127;
    }
    int sum(int begin, int n) const {
        int all = 0;
        for (int i = begin; i < begin + n; ++i) all += q[i];
        return all;
    }
};

// Tokens lie piece by piece, [pieces][n] of one of these, so that N of them are near each other.
// For weights in blocks of 32. less: what levels that are ZERO too high are too high by; low: the
// sum that meets the lows of q4_1 and q5_1; both halved, because a row has two lanes
template <int ZERO>
struct few_block {
    static constexpr int SIZE = 32;
    rounded<32> values;
    float scale, low;
    int32_t less;
    void make(const float * x) {
        scale = values.round(x);
        const int sum = values.sum(0, 32);
        low = scale * (float) sum / 2;
        less = -ZERO / 2 * sum;
    }
};
// for weights in blocks of 256; sums: of each OF values, times their scale
template <int OF>
struct few_block_256 {
    static constexpr int SIZE = 256;
    rounded<256> values;
    float sums[16], scale, filling[15];
    void make(const float * x) {
        scale = values.round(x);
        std::fill_n(sums, 16, 0.0f);
        for (int i = 0; i < 256 / OF; ++i) sums[i] = scale * (float) values.sum(i * OF, OF);
    }
};

// rows [r0, r1) of a weight, and N tokens from t0 on of n
struct few_work {
    const char * w;
    size_t nb;
    int r0, r1, n_in, n, t0;
    const uint32_t * words;
    float * dst; // [n][n_rows]
    int64_t n_rows;

    template <class P>
    const P * pieces() const {
        return (const P *) words + t0;
    }
    float * out(int t, int r) const { return dst + (t0 + t) * n_rows + r; }
};

// Brings a block of B from 2 KiB ahead: the processor alone is late where the sums of N tokens keep
// its queue full. With one it is not, and that would be in its way
template <int N, class B>
inline void few_ahead(const B * b) {
    if constexpr (N > 1)
        for (size_t i = 0; i < sizeof(B); i += 64)
            _mm_prefetch((const char *) b + 2048 + i, _MM_HINT_T0);
}

inline float few_f32(ggml_half x) { return GGML_CPU_FP16_TO_FP32(x); }

// ---- blocks of 32 values: eight rows at once. A row has two lanes of a sum

inline __m256 few_eight_of(const ggml_half * d) { return _mm256_cvtph_ps(few_16(d)); }

// Levels are ZERO above the values, or a block has a low (HAS_LOW)
template <class B, int ZERO_>
struct few_above {
    using block = B;
    static constexpr int ZERO = ZERO_;
    static constexpr bool HAS_LOW = false;
};
template <class B>
struct few_lowest : few_above<B, 0> {
    static constexpr bool HAS_LOW = true;
};
template <class BASE>
struct few_four : BASE {
    using B = typename BASE::block;
    static few_bytes levels(const B & a, const B & b) { return few_nibbles(a.qs, b.qs); }
    static few_ints dot(few_ints c, const few_bytes * u, const int8_t * x) {
        return few_dot_rows(c, u, x);
    }
};
template <class BASE>
struct few_five : few_four<BASE> {
    using B = typename BASE::block;
    static few_bytes levels(const B & a, const B & b) {
        uint32_t fifth[2];
        memcpy(&fifth[0], a.qh, sizeof(fifth[0]));
        memcpy(&fifth[1], b.qh, sizeof(fifth[1]));
        return few_add_fifth(few_nibbles(a.qs, b.qs), fifth[0], fifth[1]);
    }
};
template <class B>
struct few_eight_bits : few_above<B, FEW_WHOLE> {
    static few_ints dot(few_ints c, const few_bytes * u, const int8_t * x) {
        return few_dot_rows_whole(c, u, x);
    }
};
struct few_q8_0 : few_eight_bits<block_q8_0> {
    static few_bytes levels(const block & a, const block & b) {
        return few_whole(few_two(few_32(a.qs), few_32(b.qs)));
    }
};
struct few_iq4_nl : few_eight_bits<block_iq4_nl> {
    static few_bytes levels(const block & a, const block & b) {
        return few_looked_up(kvalues_iq4nl, few_nibbles(a.qs, b.qs));
    }
};
using few_q4_0 = few_four<few_above<block_q4_0, 8>>;
using few_q4_1 = few_four<few_lowest<block_q4_1>>;
using few_q5_0 = few_five<few_above<block_q5_0, 16>>;
using few_q5_1 = few_five<few_lowest<block_q5_1>>;

// rows as a file has them
template <class F>
struct few_eight_rows : F {
    using B = typename F::block;
    const char * at;
    size_t nb;
    const char * after; // part by part, the eight rows that follow
    few_eight_rows(const few_work & w, int r) : at(w.w + r * w.nb), nb(w.nb), after(at + 8 * nb) {}
    const B & of(int i) const { return *(const B *) (at + i * nb); }
    // half i of each row's block
    few_floats halves(int i) const {
        alignas(16) ggml_half d[8];
        for (int k = 0; k < 8; ++k) memcpy(&d[k], (const ggml_half *) &of(k) + i, sizeof(d[k]));
        return few_twice(few_eight_of(d));
    }
    few_floats scales() const { return halves(0); }
    few_floats lows() const { return halves(1); }
    // eight bytes of each row in turn
    void levels(few_bytes * u) const {
        u[0] = F::levels(of(0), of(2));
        u[1] = F::levels(of(1), of(3));
        u[2] = F::levels(of(4), of(6));
        u[3] = F::levels(of(5), of(7));
        few_put_beside(u);
    }
    template <int N>
    void next() {
        at += sizeof(B);
        // the nearest cache has no room for long ones beside eight that are read
        if (8 * nb > 12 << 10)
            for (size_t i = 0; i < 8 * sizeof(B); i += 64) _mm_prefetch(after + i, _MM_HINT_T1);
        else
            for (size_t i = 0; i < 8 * sizeof(B); i += 64) _mm_prefetch(after + i, _MM_HINT_T0);
        after += 8 * sizeof(B);
    }
};
// rows that llama.cpp put side by side
struct few_sides_q4_0 : few_q4_0 {
    const block_q4_0x8 * b;
    few_sides_q4_0(const few_work & w, int r) : b((const block_q4_0x8 *) (w.w + r * w.nb)) {}
    few_floats scales() const { return few_twice(few_eight_of(b->d)); }
    void levels(few_bytes * u) const {
        for (int j = 0; j < 2; ++j) {
            // repacking turned each value's highest bit
            const few_bytes v = few_xor(few_load(b->qs + 64 * j), 0x88);
            u[j] = few_low_four(v);
            u[2 + j] = few_high_four(v);
        }
    }
    template <int N>
    void next() {
        few_ahead<N>(++b);
    }
};

// ROWS: one of these two
template <class ROWS>
struct few_products_32 {
    using token = few_block<ROWS::ZERO>;
    template <int N>
    static void rows(const few_work & w);
};
template <class ROWS>
template <int N>
void few_products_32<ROWS>::rows(const few_work & w) {
    for (int r = w.r0; r < w.r1; r += 8) {
        const int first = std::min(r, (int) w.n_rows - 8); // the last ones may be others' too
        ROWS b(w, first);
        const auto * x = w.pieces<token>();
        few_floats sums[N];
        for (auto & s : sums) s = few_set(0);
        for (int i = 0; i < w.n_in; i += 32, b.template next<N>(), x += w.n) {
            few_bytes u[4];
            b.levels(u);
            const few_floats d = b.scales();
            for (int t = 0; t < N; ++t) {
                const few_ints dot = ROWS::dot(few_all(x[t].less), u, x[t].values.q);
                sums[t] = few_fma(few_to_f32(dot), few_mul(d, few_set(x[t].scale)), sums[t]);
            }
            if constexpr (ROWS::HAS_LOW) {
                const few_floats low = b.lows();
                for (int t = 0; t < N; ++t) sums[t] = few_fma(low, few_set(x[t].low), sums[t]);
            }
        }
        for (int t = 0; t < N; ++t) {
            alignas(32) float eight[8];
            _mm256_store_ps(eight, few_sums_of_two(sums[t]));
            std::copy(eight + r - first, eight + std::min(8, w.r1 - first), w.out(t, r));
        }
    }
}

template <class F>
using few_of_32 = few_products_32<few_eight_rows<F>>;
using few_beside_q4_0 = few_products_32<few_sides_q4_0>;

// ---- blocks of 256 values, each 32 or 16 of them with a scale; levels: of 64 values

// eight scales of six bits, then eight lows, packed into 12 bytes
inline __m128i few_six(const uint8_t * packed) {
    uint32_t s[3];
    memcpy(s, packed, sizeof(s));
    constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x03030303;
    return _mm_set_epi32((int) ((s[2] >> 4 & FOUR) | (s[1] >> 6 & TWO) << 4), (int) (s[1] & SIX),
        (int) ((s[2] & FOUR) | (s[0] >> 6 & TWO) << 4), (int) (s[0] & SIX));
}
inline __m256 few_eight_of(__m128i bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// scales: of each 32 or 16 values, an integer; scale: of a block, times these
// low: what is added to a value of each 32 or 16, in lanes
struct few_eight_scales {
    using token = few_block_256<32>;
    static few_scales of(few_scales scales, int i) { return few_eights(scales, i); }
};
struct few_sixteen_scales {
    using token = few_block_256<16>;
    static few_scales of(few_scales scales, int i) { return few_fours(scales, i); }
};
template <class BASE>
struct few_levels : BASE {
    static few_total add(few_total c, few_bytes u, few_bytes x, few_scales by) {
        return few_add(c, u, x, by);
    }
};
// two bits of a value: four values in a byte, in runs of 32
inline few_bytes few_twos(const uint8_t * qs, int i) {
    return few_pairs(qs + i / 2 * 32, i % 2 != 0);
}
struct few_q2_K : few_levels<few_sixteen_scales> {
    using block = block_q2_K;
    static few_bytes levels(const block & b, int i) { return few_twos(b.qs, i); }
    static few_scales scales(const block & b, float & scale, few_floats & low) {
        ggml_half d[2]; // their names differ between compilers
        memcpy(d, (const char *) (&b + 1) - sizeof(d), sizeof(d));
        const __m128i both = few_16(b.scales), four = _mm_set1_epi8(15);
        const __m128i lows = _mm_and_si128(_mm_srli_epi16(both, 4), four);
        scale = few_f32(d[0]);
        low = few_mul(few_from_int8(lows), few_set(-few_f32(d[1])));
        return few_to_scales(_mm_and_si128(both, four), scale);
    }
};
// values are around 0, levels ZERO above them
template <int ZERO>
inline few_scales few_around(__m128i scales, float scale, few_floats & low) {
    low = ZERO ? few_mul(few_from_int8(scales), few_set(-ZERO * scale)) : few_set(0);
    return few_to_scales(scales, scale);
}
struct few_q3_K : few_levels<few_sixteen_scales> {
    using block = block_q3_K;
    static few_bytes levels(const block & b, int i) {
        return few_add_bits<4>(few_twos(b.qs, i), b.hmask, 2 * i);
    }
    static few_scales scales(const block & b, float & scale, few_floats & low) {
        uint32_t s[3]; // the low four bits of 16, then the two above of each
        memcpy(s, b.scales, sizeof(s));
        constexpr uint32_t FOUR = 0x0f0f0f0f, TWO = 0x03030303;
        const __m128i all = _mm_set_epi32((int) ((s[1] >> 4 & FOUR) | (s[2] >> 6 & TWO) << 4),
            (int) ((s[0] >> 4 & FOUR) | (s[2] >> 4 & TWO) << 4),
            (int) ((s[1] & FOUR) | (s[2] >> 2 & TWO) << 4),
            (int) ((s[0] & FOUR) | (s[2] & TWO) << 4));
        scale = few_f32(b.d);
        return few_around<4>(_mm_sub_epi8(all, _mm_set1_epi8(32)), scale, low);
    }
};
struct few_q4_K : few_levels<few_eight_scales> {
    using block = block_q4_K;
    static few_bytes levels(const block & b, int i) { return few_nibbles(b.qs + 32 * i); }
    template <class B>
    static few_scales scales(const B & b, float & scale, few_floats & low) {
        ggml_half d[2]; // their names differ between compilers
        memcpy(d, &b, sizeof(d));
        const __m128i both = few_six(b.scales);
        const __m256 lows = few_eight_of(_mm_srli_si128(both, 8));
        scale = few_f32(d[0]);
        low = few_from_eight(_mm256_mul_ps(lows, _mm256_set1_ps(-few_f32(d[1]))));
        return few_to_scales(both, scale);
    }
};
struct few_q5_K : few_q4_K {
    using block = block_q5_K;
    static few_bytes levels(const block & b, int i) {
        return few_add_bits<16>(few_nibbles(b.qs + 32 * i), b.qh, 2 * i);
    }
};
struct few_q6_K : few_levels<few_sixteen_scales> {
    using block = block_q6_K;
    // in each half of a block two bits of 32 bytes are the high ones of 32 values
    static few_bytes levels(const block & b, int i) {
        const few_bytes ql = few_load(b.ql + i / 2 * 64);
        return few_add_pairs(
            i % 2 ? few_high_four(ql) : few_low_four(ql), b.qh + i / 2 * 32, i % 2 != 0);
    }
    static few_scales scales(const block & b, float & scale, few_floats & low) {
        scale = few_f32(b.d);
        return few_around<32>(few_16(b.scales), scale, low);
    }
};
struct few_iq4_xs : few_eight_scales {
    using block = block_iq4_xs;
    static few_bytes levels(const block & b, int i) {
        return few_looked_up(kvalues_iq4nl, few_nibbles(b.qs + 32 * i, b.qs + 32 * i + 16));
    }
    static few_total add(few_total c, few_bytes u, few_bytes x, few_scales by) {
        return few_add_whole(c, u, x, by);
    }
    static few_scales scales(const block & b, float & scale, few_floats & low) {
        uint32_t four;
        memcpy(&four, b.scales_l, sizeof(four));
        const __m256i at = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
        const auto bits = [](uint32_t x, __m256i from, int mask) {
            return _mm256_and_si256(
                _mm256_srlv_epi32(_mm256_set1_epi32((int) x), from), _mm256_set1_epi32(mask));
        };
        const __m256i high = bits(b.scales_h, _mm256_srli_epi32(at, 1), 3);
        const __m256i all = _mm256_sub_epi32(
            _mm256_or_si256(bits(four, at, 15), _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        const __m128i words =
            _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        scale = few_f32(b.d);
        return few_around<FEW_WHOLE>(_mm_packs_epi16(words, _mm_setzero_si128()), scale, low);
    }
};

template <class F>
struct few_of_256 {
    using token = typename F::token;
    template <int N>
    static void rows(const few_work & w);
};
template <class F>
template <int N>
void few_of_256<F>::rows(const few_work & w) {
    const auto * first = w.pieces<typename F::token>();
    for (int r = w.r0; r < w.r1; ++r) {
        const auto * b = (const typename F::block *) (w.w + r * w.nb);
        const auto * x = first;
        few_floats sums[N];
        for (auto & s : sums) s = few_set(0);
        for (int i = 0; i < w.n_in; i += 256, ++b, x += w.n) {
            few_ahead<N>(b);
            float scale;
            few_floats low;
            few_total here[N];
            const few_scales scales = F::scales(*b, scale, low);
            for (auto & s : here) s = few_nothing();
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const few_bytes u = F::levels(*b, j);
                const few_scales by = F::of(scales, j);
                for (int t = 0; t < N; ++t)
                    here[t] = F::add(here[t], u, few_load(x[t].values.q + 64 * j), by);
            }
            for (int t = 0; t < N; ++t)
                sums[t] = few_fma(few_to_f32(here[t]), few_step(x[t].scale, scale),
                    few_fma(low, few_load(x[t].sums), sums[t]));
        }
        for (int t = 0; t < N; ++t) *w.out(t, r) = few_sum(sums[t]);
    }
}

// ---- blocks of 256 values of rows side by side

struct few_sides_q4_K {
    using token = few_block_256<32>;
    template <int N>
    static void rows(const few_work & w);
};
template <int N>
void few_sides_q4_K::rows(const few_work & w) {
    for (int r = w.r0; r < w.r1; r += 8) {
        const auto * b = (const block_q4_Kx8 *) (w.w + r * w.nb);
        const auto * x = w.pieces<few_block_256<32>>();
        few_floats sums[N];
        __m256 lows[N];
        for (auto & s : sums) s = few_set(0);
        for (auto & s : lows) s = _mm256_setzero_ps();
        for (int i = 0; i < w.n_in; i += 256, ++b, x += w.n) {
            few_ahead<N>(b);
            const __m256 d = few_eight_of(b->d), d_low = few_eight_of(b->dmin);
            few_floats here[N];
            for (auto & s : here) s = few_set(0);
            for (int j = 0; j < 8; ++j) {
                few_bytes u[4];
                for (int k = 0; k < 4; ++k) {
                    const few_bytes v = few_load(b->qs + j / 2 * 256 + 64 * k);
                    u[k] = j % 2 ? few_high_four(v) : few_low_four(v);
                }
                const __m128i six = few_six(b->scales + 12 * j);
                const few_floats s = few_twice(_mm256_mul_ps(few_eight_of(six), d));
                const __m256 low = _mm256_mul_ps(few_eight_of(_mm_srli_si128(six, 8)), d_low);
                for (int t = 0; t < N; ++t) {
                    const few_ints dot = few_dot_rows(few_all(0), u, x[t].values.q + 32 * j);
                    here[t] = few_fma(few_to_f32(dot), s, here[t]);
                    lows[t] = _mm256_fnmadd_ps(low, _mm256_set1_ps(x[t].sums[j]), lows[t]);
                }
            }
            for (int t = 0; t < N; ++t) sums[t] = few_fma(here[t], few_set(x[t].scale), sums[t]);
        }
        for (int t = 0; t < N; ++t)
            _mm256_storeu_ps(w.out(t, r), _mm256_add_ps(few_sums_of_two(sums[t]), lows[t]));
    }
}

} // namespace edgekv
#endif
