#pragma once
// A row times a Walsh-Hadamard matrix, in registers. llama.cpp turns queries and rows of quantised
// caches so, and takes the first passes value by value. These are the same sums and differences in
// the same order, so the result has the same bits.

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace edgekv {

// A register of N values. pass<LEN>: sums and differences of those that lie LEN apart
#if defined(__AVX512F__)
struct hadamard_register {
    static constexpr int N = 16;
    __m512 x;
    static hadamard_register load(const float * p) { return { _mm512_loadu_ps(p) }; }
    void store(float * p) const { _mm512_storeu_ps(p, x); }
    hadamard_register operator*(float s) const { return { _mm512_mul_ps(x, _mm512_set1_ps(s)) }; }
    hadamard_register operator+(hadamard_register y) const { return { _mm512_add_ps(x, y.x) }; }
    hadamard_register operator-(hadamard_register y) const { return { _mm512_sub_ps(x, y.x) }; }
    template <int LEN>
    hadamard_register pass() const {
        constexpr __mmask16 second = LEN == 1 ? 0xaaaa
            : LEN == 2                        ? 0xcccc
            : LEN == 4                        ? 0xf0f0
                                              : 0xff00;
        __m512 other;
        if constexpr (LEN == 1) other = _mm512_permute_ps(x, 0xb1);
        else if constexpr (LEN == 2) other = _mm512_permute_ps(x, 0x4e);
        else if constexpr (LEN == 4) other = _mm512_shuffle_f32x4(x, x, 0xb1);
        else other = _mm512_shuffle_f32x4(x, x, 0x4e);
        return { _mm512_mask_sub_ps(_mm512_add_ps(x, other), second, other, x) };
    }
    hadamard_register passes() const { return pass<1>().pass<2>().pass<4>().pass<8>(); }
};
#elif defined(__AVX__)
struct hadamard_register {
    static constexpr int N = 8;
    __m256 x;
    static hadamard_register load(const float * p) { return { _mm256_loadu_ps(p) }; }
    void store(float * p) const { _mm256_storeu_ps(p, x); }
    hadamard_register operator*(float s) const { return { _mm256_mul_ps(x, _mm256_set1_ps(s)) }; }
    hadamard_register operator+(hadamard_register y) const { return { _mm256_add_ps(x, y.x) }; }
    hadamard_register operator-(hadamard_register y) const { return { _mm256_sub_ps(x, y.x) }; }
    template <int LEN>
    hadamard_register pass() const {
        constexpr int second = LEN == 1 ? 0xaa : LEN == 2 ? 0xcc : 0xf0;
        __m256 other;
        if constexpr (LEN == 1) other = _mm256_permute_ps(x, 0xb1);
        else if constexpr (LEN == 2) other = _mm256_permute_ps(x, 0x4e);
        else other = _mm256_permute2f128_ps(x, x, 1);
        return { _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), second) };
    }
    hadamard_register passes() const { return pass<1>().pass<2>().pass<4>(); }
};
#endif

#if defined(__AVX__)

// y = x times `scale` times the matrix of size n, a power of two, from hadamard_register::N to MOST
constexpr int HADAMARD_MOST = 512;
inline void hadamard(const float * x, float * y, int n, float scale) {
    using reg = hadamard_register;
    reg all[HADAMARD_MOST / reg::N];
    const int n_regs = n / reg::N;
    for (int i = 0; i < n_regs; ++i) all[i] = (reg::load(x + i * reg::N) * scale).passes();
    for (int half = 1; half < n_regs; half *= 2)
        for (int i = 0; i < n_regs; i += 2 * half)
            for (int j = i; j < i + half; ++j) {
                const reg a = all[j], b = all[j + half];
                all[j] = a + b;
                all[j + half] = a - b;
            }
    for (int i = 0; i < n_regs; ++i) all[i].store(y + i * reg::N);
}

#endif

} // namespace edgekv
