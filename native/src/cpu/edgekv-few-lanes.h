#pragma once
// Registers of 64 bytes for edgekv-few-rows.h: one of AVX-512 with VNNI, or two of AVX2.
//     few_bytes: 64 levels of a weight, or a token's values
//     few_ints: sums of products of four of them
//     few_floats: 16 lanes
//     few_total: sums of few_ints that were multiplied by integers of 8 bits, few_scales
// Levels are not negative. AVX2 holds the sum of two products in 16 bits, so levels that need all 8
// bits (few_whole) are values with a sign there, and a token's values take that on.

#define GGML_COMMON_DECL_CPP // ggml_half
#include "ggml-common.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define EDGEKV_FEW 512
#elif defined(__GNUC__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define EDGEKV_FEW 256
#else
#define EDGEKV_FEW 0
#endif

#if EDGEKV_FEW
#include <immintrin.h>

namespace edgekv {

inline __m128i few_16(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
inline __m256i few_32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }

#if EDGEKV_FEW == 512
using few_bytes = __m512i;
using few_ints = __m512i;
using few_floats = __m512;
constexpr int FEW_AT_ONCE = 8; // tokens that meet a row while registers have room for their sums
constexpr int FEW_WHOLE = 128; // what few_whole adds

inline few_bytes few_load(const void * p) { return _mm512_loadu_si512(p); }
inline few_bytes few_two(__m256i a, __m256i b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
inline few_bytes few_low_four(few_bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline few_bytes few_high_four(few_bytes x) { return few_low_four(_mm512_srli_epi16(x, 4)); }
inline few_bytes few_xor(few_bytes x, int byte) {
    return _mm512_xor_si512(x, _mm512_set1_epi8((char) byte));
}
// 16 bytes at each of two places: the low four bits of the first, its high ones, ...
inline few_bytes few_nibbles(const void * a, const void * b) {
    const __m256i two = _mm256_inserti128_si256(_mm256_castsi128_si256(few_16(a)), few_16(b), 1);
    const __m512i twice = _mm512_permutexvar_epi64(
        _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(two));
    return few_low_four(_mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)));
}
// 32 bytes: their low four bits, then their high ones
inline few_bytes few_nibbles(const void * a) {
    const __m512i twice = _mm512_broadcast_i64x4(few_32(a));
    return few_low_four(_mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)));
}
// 32 bytes: bits 0 and 1, then bits 2 and 3; of the upper four bits
inline few_bytes few_pairs(const void * p, bool upper) {
    const __m512i shift =
        upper ? _mm512_set_epi64(6, 6, 6, 6, 4, 4, 4, 4) : _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
    const __m512i all = _mm512_broadcast_i64x4(few_32(p));
    return _mm512_and_si512(_mm512_srlv_epi64(all, shift), _mm512_set1_epi8(3));
}
// low, and few_pairs as bits 4 and 5
inline few_bytes few_add_pairs(few_bytes low, const void * p, bool upper) {
    return _mm512_or_si512(low, _mm512_slli_epi16(few_pairs(p, upper), 4));
}
// x, and MORE where bit i of 32 bytes is set, then bit i + 1
template <int MORE>
inline few_bytes few_add_bits(few_bytes x, const void * p, int i) {
    const __m512i bit =
        few_two(_mm256_set1_epi8((char) (1 << i)), _mm256_set1_epi8((char) (2 << i)));
    return _mm512_mask_add_epi8(x, _mm512_test_epi8_mask(_mm512_broadcast_i64x4(few_32(p)), bit), x,
        _mm512_set1_epi8(MORE));
}
// x, and 16 where a bit is set
inline few_bytes few_add_fifth(few_bytes x, uint32_t a, uint32_t b) {
    return _mm512_mask_add_epi8(x, (uint64_t) b << 32 | a, x, _mm512_set1_epi8(16));
}
// of 16 values with a sign, those that nibbles say, as levels from all 8 bits
inline few_bytes few_whole(few_bytes x) { return few_xor(x, FEW_WHOLE); }
inline few_bytes few_looked_up(const int8_t * values, few_bytes nibbles) {
    return few_whole(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(few_16(values)), nibbles));
}

inline few_ints few_all(int x) { return _mm512_set1_epi32(x); }
inline few_ints few_dot(few_ints c, few_bytes levels, few_bytes x) {
    return _mm512_dpbusd_epi32(c, levels, x);
}
// eight values of a token for eight rows side by side, four times; levels have up to five bits
inline few_ints few_dot_rows(few_ints c, const few_bytes * levels, const int8_t * x) {
    for (int j = 0; j < 4; ++j) {
        int64_t eight;
        memcpy(&eight, x + 8 * j, sizeof(eight));
        c = few_dot(c, levels[j], _mm512_set1_epi64(eight));
    }
    return c;
}
inline few_ints few_dot_rows_whole(few_ints c, const few_bytes * levels, const int8_t * x) {
    return few_dot_rows(c, levels, x);
}
// 32 bytes each of rows 0 and 2, 1 and 3, 4 and 6, 5 and 7: eight of each row, then the next eight
inline void few_put_beside(few_bytes * u) {
    const few_bytes a = _mm512_unpacklo_epi64(u[0], u[1]), b = _mm512_unpackhi_epi64(u[0], u[1]),
                    c = _mm512_unpacklo_epi64(u[2], u[3]), d = _mm512_unpackhi_epi64(u[2], u[3]);
    u[0] = _mm512_shuffle_i64x2(a, c, 0x88);
    u[1] = _mm512_shuffle_i64x2(b, d, 0x88);
    u[2] = _mm512_shuffle_i64x2(a, c, 0xdd);
    u[3] = _mm512_shuffle_i64x2(b, d, 0xdd);
}
inline few_floats few_to_f32(few_ints x) { return _mm512_cvtepi32_ps(x); }

inline few_floats few_set(float x) { return _mm512_set1_ps(x); }
inline few_floats few_load(const float * p) { return _mm512_loadu_ps(p); }
inline few_floats few_from_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline few_floats few_from_eight(__m256 x) { return _mm512_zextps256_ps512(x); }
inline few_floats few_mul(few_floats a, few_floats b) { return _mm512_mul_ps(a, b); }
inline few_floats few_fma(few_floats a, few_floats b, few_floats c) {
    return _mm512_fmadd_ps(a, b, c);
}
inline float few_sum(few_floats x) { return _mm512_reduce_add_ps(x); }

using few_total = few_floats;
using few_scales = few_floats;
inline few_total few_nothing() { return few_set(0); }
inline few_floats few_to_f32(few_total x) { return x; }
// integers, times what few_step leaves out
inline few_scales few_to_scales(__m128i x, float scale) {
    return few_mul(few_from_int8(x), few_set(scale));
}
inline few_floats few_step(float of_token, float) { return few_set(of_token); }
// scales 2i and 2i + 1 of eight, for 32 levels each; scales 4i to 4i + 3 of 16, for 16 levels each
inline few_scales few_eights(few_scales x, int i) {
    const __m512i two = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(_mm512_add_epi32(two, few_all(2 * i)), x);
}
inline few_scales few_fours(few_scales x, int i) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(_mm512_add_epi32(four, few_all(4 * i)), x);
}
inline few_total few_add(few_total c, few_bytes levels, few_bytes x, few_scales by) {
    return few_fma(few_to_f32(few_dot(few_all(0), levels, x)), by, c);
}
inline few_total few_add_whole(few_total c, few_bytes levels, few_bytes x, few_scales by) {
    return few_add(c, levels, x, by);
}

// each of eight in two lanes, and the sums of two lanes each
inline few_floats few_twice(__m256 x) {
    return _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0),
        _mm512_castps256_ps512(x));
}
inline __m256 few_sums_of_two(few_floats x) {
    const __m512 both = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    const __m512i even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(even, both));
}
#else
struct few_bytes {
    __m256i a, b;
};
using few_ints = few_bytes;
struct few_floats {
    __m256 a, b;
};
constexpr int FEW_AT_ONCE = 4;
constexpr int FEW_WHOLE = 0;

inline few_bytes few_load(const void * p) { return { few_32(p), few_32((const char *) p + 32) }; }
inline few_bytes few_two(__m256i a, __m256i b) { return { a, b }; }
inline __m256i few_low_four(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline few_bytes few_low_four(few_bytes x) { return { few_low_four(x.a), few_low_four(x.b) }; }
inline few_bytes few_high_four(few_bytes x) {
    return few_low_four({ _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4) });
}
inline few_bytes few_xor(few_bytes x, int byte) {
    const __m256i all = _mm256_set1_epi8((char) byte);
    return { _mm256_xor_si256(x.a, all), _mm256_xor_si256(x.b, all) };
}
inline few_bytes few_nibbles(const void * a, const void * b) {
    const auto halves = [](const void * p) {
        const __m128i x = few_16(p);
        return few_low_four(_mm256_set_m128i(_mm_srli_epi16(x, 4), x));
    };
    return { halves(a), halves(b) };
}
inline few_bytes few_nibbles(const void * a) {
    const __m256i x = few_32(a);
    return few_low_four({ x, _mm256_srli_epi16(x, 4) });
}
inline few_bytes few_pairs(const void * p, bool upper) {
    const __m256i x = upper ? _mm256_srli_epi16(few_32(p), 4) : few_32(p);
    const __m256i three = _mm256_set1_epi8(3);
    return { _mm256_and_si256(x, three), _mm256_and_si256(_mm256_srli_epi16(x, 2), three) };
}
inline few_bytes few_add_pairs(few_bytes low, const void * p, bool upper) {
    const __m256i x = upper ? few_32(p) : _mm256_slli_epi16(few_32(p), 4);
    const __m256i y = _mm256_srli_epi16(upper ? few_32(p) : x, 2), bits = _mm256_set1_epi8(0x30);
    return { _mm256_or_si256(low.a, _mm256_and_si256(x, bits)),
        _mm256_or_si256(low.b, _mm256_and_si256(y, bits)) };
}
template <int MORE>
inline few_bytes few_add_bits(few_bytes x, const void * p, int i) {
    constexpr int AT = MORE == 4 ? 2 : 4;
    static_assert(MORE == 1 << AT, "a bit of each byte");
    const auto bits = [p](int i) {
        const __m256i all = few_32(p);
        return _mm256_and_si256(
            i < AT ? _mm256_slli_epi16(all, AT - i) : _mm256_srli_epi16(all, i - AT),
            _mm256_set1_epi8(MORE));
    };
    return { _mm256_or_si256(x.a, bits(i)), _mm256_or_si256(x.b, bits(i + 1)) };
}
inline few_bytes few_add_fifth(few_bytes x, uint32_t a, uint32_t b) {
    const __m256i byte =
        _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x((long long) 0x8040201008040201);
    const auto bits = [&](uint32_t x) {
        return _mm256_shuffle_epi8(_mm256_set1_epi32((int) x), byte);
    };
    const auto add = [&](__m256i x, __m256i bits) {
        const __m256i where = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        return _mm256_or_si256(x, _mm256_and_si256(where, _mm256_set1_epi8(16)));
    };
    return { add(x.a, bits(a)), add(x.b, bits(b)) };
}
inline few_bytes few_whole(few_bytes x) { return x; }
inline few_bytes few_looked_up(const int8_t * values, few_bytes nibbles) {
    const __m256i all = _mm256_broadcastsi128_si256(few_16(values));
    return few_whole({ _mm256_shuffle_epi8(all, nibbles.a), _mm256_shuffle_epi8(all, nibbles.b) });
}

inline few_ints few_all(int x) { return { _mm256_set1_epi32(x), _mm256_set1_epi32(x) }; }
#if defined(__AVXVNNI__)
inline __m256i few_dot(__m256i c, __m256i levels, __m256i x) {
    return _mm256_dpbusd_avx_epi32(c, levels, x);
}
inline __m256i few_dot_rows(__m256i c, const __m256i * levels, const __m256i * x) {
    for (int j = 0; j < 4; ++j) c = few_dot(c, levels[j], x[j]);
    return c;
}
#else
// c, and the sums of two
inline __m256i few_add_two(__m256i c, __m256i x) {
    return _mm256_add_epi32(c, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
}
inline __m256i few_dot(__m256i c, __m256i levels, __m256i x) {
    return few_add_two(c, _mm256_maddubs_epi16(levels, x));
}
// 16 bits hold the sum of eight products: 8 * 31 * 127 < 2^15
inline __m256i few_dot_rows(__m256i c, const __m256i * levels, const __m256i * x) {
    __m256i sum = _mm256_maddubs_epi16(levels[0], x[0]);
    for (int j = 1; j < 4; ++j) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(levels[j], x[j]));
    return few_add_two(c, sum);
}
#endif
inline few_ints few_dot(few_ints c, few_bytes levels, few_bytes x) {
    return { few_dot(c.a, levels.a, x.a), few_dot(c.b, levels.b, x.b) };
}
inline few_bytes few_abs(few_bytes x) { return { _mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b) }; }
inline few_bytes few_sign(few_bytes x, few_bytes of) {
    return { _mm256_sign_epi8(x.a, of.a), _mm256_sign_epi8(x.b, of.b) };
}
inline few_ints few_dot_rows(few_ints c, const few_bytes * levels, const int8_t * x) {
    __m256i a[4], b[4], eight[4];
    for (int j = 0; j < 4; ++j) {
        int64_t q;
        memcpy(&q, x + 8 * j, sizeof(q));
        eight[j] = _mm256_set1_epi64x(q);
        a[j] = levels[j].a;
        b[j] = levels[j].b;
    }
    return { few_dot_rows(c.a, a, eight), few_dot_rows(c.b, b, eight) };
}
inline few_ints few_dot_rows_whole(few_ints c, const few_bytes * values, const int8_t * x) {
    for (int j = 0; j < 4; ++j) {
        int64_t q;
        memcpy(&q, x + 8 * j, sizeof(q));
        const __m256i eight = _mm256_set1_epi64x(q);
        c = few_dot(c, few_abs(values[j]), few_sign({ eight, eight }, values[j]));
    }
    return c;
}
inline void few_put_beside(few_bytes * u) {
    // of rows 0, 1, 2, 3
    const auto put = [](__m256i * r) {
        const __m256i a = _mm256_unpacklo_epi64(r[0], r[1]), b = _mm256_unpackhi_epi64(r[0], r[1]),
                      c = _mm256_unpacklo_epi64(r[2], r[3]), d = _mm256_unpackhi_epi64(r[2], r[3]);
        r[0] = _mm256_permute2x128_si256(a, c, 0x20);
        r[1] = _mm256_permute2x128_si256(b, d, 0x20);
        r[2] = _mm256_permute2x128_si256(a, c, 0x31);
        r[3] = _mm256_permute2x128_si256(b, d, 0x31);
    };
    __m256i a[4] = { u[0].a, u[1].a, u[0].b, u[1].b }, b[4] = { u[2].a, u[3].a, u[2].b, u[3].b };
    put(a);
    put(b);
    for (int j = 0; j < 4; ++j) u[j] = { a[j], b[j] };
}
inline few_floats few_to_f32(few_ints x) {
    return { _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b) };
}

inline few_floats few_set(float x) { return { _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
inline few_floats few_load(const float * p) {
    return { _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) };
}
inline few_floats few_from_int8(__m128i x) {
    return few_to_f32({ _mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)) });
}
inline few_floats few_from_eight(__m256 x) { return { x, _mm256_setzero_ps() }; }
inline few_floats few_mul(few_floats x, few_floats y) {
    return { _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) };
}
inline few_floats few_fma(few_floats x, few_floats y, few_floats z) {
    return { _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}
inline float few_sum(few_floats x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

using few_total = few_ints;
using few_scales = few_bytes; // of 16 bits: eight, and eight; then those of each level's word
inline few_total few_nothing() { return few_all(0); }
inline few_floats few_step(float of_token, float scale) { return few_set(of_token * scale); }
inline few_scales few_to_scales(__m128i x, float) {
    const __m256i all = _mm256_cvtepi8_epi16(x);
    return { _mm256_permute4x64_epi64(all, 0x44), _mm256_permute4x64_epi64(all, 0xee) };
}
inline __m256i few_scales_at(__m256i from, int low, int high) {
    const auto bytes = [](int i) { return (short) (2 * i | (2 * i + 1) << 8); };
    return _mm256_shuffle_epi8(
        from, _mm256_set_m128i(_mm_set1_epi16(bytes(high)), _mm_set1_epi16(bytes(low))));
}
inline few_scales few_eights(few_scales x, int i) {
    return { few_scales_at(x.a, 2 * i, 2 * i), few_scales_at(x.a, 2 * i + 1, 2 * i + 1) };
}
inline few_scales few_fours(few_scales x, int i) {
    const __m256i from = i < 2 ? x.a : x.b;
    const int at = 4 * i % 8;
    return { few_scales_at(from, at, at + 1), few_scales_at(from, at + 2, at + 3) };
}
inline few_total few_add(few_total c, few_bytes levels, few_bytes x, few_scales by) {
    const auto add = [](__m256i c, __m256i levels, __m256i x, __m256i by) {
        return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, x), by));
    };
    return { add(c.a, levels.a, x.a, by.a), add(c.b, levels.b, x.b, by.b) };
}
inline few_total few_add_whole(few_total c, few_bytes values, few_bytes x, few_scales by) {
    return few_add(c, few_abs(values), few_sign(x, values), by);
}

inline few_floats few_twice(__m256 x) {
    const __m256i low = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    return { _mm256_permutevar8x32_ps(x, low),
        _mm256_permutevar8x32_ps(x, _mm256_add_epi32(low, _mm256_set1_epi32(4))) };
}
inline __m256 few_sums_of_two(few_floats x) {
    const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(x.a, x.b));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
}
#endif

} // namespace edgekv
#endif
