#pragma once
// Words of two integers of 16 bits, for AVX2 and AVX512-VNNI: they multiply and add such pairs at
// twice the rate of f32 (vpmaddwd, vpdpwssd). Values stand in blocks; before the words of a block
// stands its scale, an f32. The words' integers are at most MOST, so that 32 bits hold the sum of a
// block's products: 64 * MOST^2 < 2^31. The largest of a block is exact to 1/11584; bf16 has 1/512
// of every value.

#include "edgekv-lanes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__GNUC__) // with the lanes of edgekv-lanes.h
namespace edgekv {

struct int16_words {
#if defined(__AVX512VNNI__)
    using L = simd_lanes<16, 8, 3>;
#else
    using L = simd_lanes<8, 4, 2>;
#endif
    static constexpr int PER = 2, N = L::N, ROWS = L::ROWS, VECTORS = L::VECTORS;
    static constexpr int BLOCK = 32, SCALES = 1, SPAN = 1;
    static constexpr bool TILES = false, LEVELS = false;
    static constexpr float MOST = 5792, LOG2_MOST = 12.49f; // 2^12.49 = 5752
    struct scope {};
    static int n_words(int d) { return d / (2 * BLOCK) * (BLOCK + 1) + n_rest(d % (2 * BLOCK)); }

    using integers = int32_t __attribute__((vector_size(4 * N)));
    using memory = int32_t __attribute__((vector_size(4 * N), aligned(4), may_alias));
    using reg = integers; // sums of a block
    using operand = integers;
    static reg zero() { return reg {}; }
    static operand load(const uint32_t * p) { return *(const memory *) p; }
    static operand set(const uint32_t * p) { return operand {} + (int32_t) *p; }
    static reg fma(operand a, operand b, reg c) {
        // gcc 12 would do all products of a block of results first and write sums to the stack
#if defined(__AVX512VNNI__)
        __asm__("vpdpwssd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
#elif defined(__AVXVNNI__)
        __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
#else
        operand product;
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
            : "+x"(c), "=&x"(product)
            : "x"(a), "x"(b));
#endif
        return c;
    }
    static L::reg result(reg sum, const uint32_t * a, const uint32_t * b) {
        float scale;
        memcpy(&scale, a, sizeof(scale));
        const auto sums = __builtin_convertvector(sum, typename L::reg);
        return L::mul(sums, L::mul(L::set(scale), L::load((const float *) b)));
    }
    static void store(uint32_t * p, operand a) { *(memory *) p = a; }

    static L::reg power(L::reg x) { return exp2<L>(x); }
    static operand join(const L::reg * x) { return pairs(x[0], x[1], L::set(1)); }
    static reg add_up(operand a, reg c) { return fma(a, operand {} + 0x00010001, c); }

    static void row(const float * x, int n, uint32_t * words) {
        for (; n >= 2 * BLOCK; n -= 2 * BLOCK, x += 2 * BLOCK, words += BLOCK + 1)
            block(x, BLOCK, words);
        if (n == 0) return;
        float rest[2 * BLOCK] = {};
        uint32_t of_rest[BLOCK + 1];
        const int half = (n + 1) / 2;
        std::copy_n(x, half, rest);
        std::copy_n(x + half, n - half, rest + BLOCK);
        block(rest, BLOCK, of_rest);
        std::copy_n(of_rest, half + 1, words);
    }

    // a tile's rows [T][d] as one block of every value: [1 + T/2][d], the scales before the words
    template <int T>
    static void columns(const float * x, int d, uint32_t * words) {
        static_assert(T == 2 * BLOCK, "a tile is a block");
        int j = 0;
        for (; j + N <= d; j += N) columns_at<T>(x + j, d, words + j, d);
        if (j == d) return;
        float rest[T * N] = {};
        uint32_t of_rest[(1 + T / 2) * N];
        for (int r = 0; r < T; ++r) std::copy_n(x + (size_t) r * d + j, d - j, rest + r * N);
        columns_at<T>(rest, N, of_rest, N);
        for (int r = 0; r <= T / 2; ++r)
            std::copy_n(of_rest + r * N, d - j, words + (size_t) r * d + j);
    }

private:
    static int n_rest(int n) { return n == 0 ? 0 : 1 + (n + 1) / 2; }

    // the low bits of x / scale + 1.5 * 2^23 are a whole number
    static operand pairs(L::reg x, L::reg y, L::reg factor) {
        const auto magic = L::set(12582912.0f);
        const auto low = (integers) L::fma(x, factor, magic),
                   high = (integers) L::fma(y, factor, magic);
        return (low & 0xffff) | (high << 16);
    }
    // of their bits, so that what is not a number is more than any number, and stays
    static integers larger(integers most, L::reg x) {
        const auto bits = (integers) x & INT32_MAX;
        return most > bits ? most : bits;
    }
    static float factor(float most) { return most > 0 ? MOST / most : 0; }

    // values i and i + half share a word
    static void block(const float * x, int half, uint32_t * words) {
        auto most = zero();
        for (int i = 0; i < 2 * half; i += N) most = larger(most, L::load(x + i));
        int32_t bits[N];
        store((uint32_t *) bits, most);
        const int32_t largest = *std::max_element(bits, bits + N);
        float value;
        memcpy(&value, &largest, sizeof(value));
        const auto f = L::set(factor(value));
        value /= MOST;
        memcpy(words, &value, sizeof(value));
        for (int i = 0; i < half; i += N)
            store(words + 1 + i, pairs(L::load(x + i), L::load(x + half + i), f));
    }

    template <int T>
    static void columns_at(const float * x, size_t step, uint32_t * words, size_t to_step) {
        auto most = zero();
        for (int r = 0; r < T; ++r) most = larger(most, L::load(x + r * step));
        float value[N], f[N];
        store((uint32_t *) value, most);
        for (int i = 0; i < N; ++i) {
            f[i] = factor(value[i]);
            value[i] /= MOST;
        }
        memcpy(words, value, sizeof(value));
        const auto factors = L::load(f);
        for (int r = 0; r < T; r += 2)
            store(words + (1 + r / 2) * to_step,
                pairs(L::load(x + r * step), L::load(x + (r + 1) * step), factors));
    }
};

} // namespace edgekv
#endif
