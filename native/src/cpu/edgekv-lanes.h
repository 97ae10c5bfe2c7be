#pragma once
// Lanes: one SIMD register of f32, so that a kernel is written once, as a template. gcc and clang
// have such types of any width and choose the instructions; `plain_lanes` is the same for other
// compilers.
//     ROWS x VECTORS: the block of results that a matrix kernel holds in registers (beside it,
//     VECTORS operands and a factor)

#include <cstdint>
#include <cstring>

namespace edgekv {

template <int N_FLOATS, int N_ROWS, int N_VECTORS>
struct plain_lanes {
    static constexpr int N = N_FLOATS, ROWS = N_ROWS, VECTORS = N_VECTORS;
    struct reg {
        float x[N];
    };

    template <typename F>
    static reg each(F && f) {
        reg r;
        for (int i = 0; i < N; ++i) r.x[i] = f(i);
        return r;
    }
    static reg load(const float * p) {
        reg r;
        memcpy(r.x, p, sizeof(r.x));
        return r;
    }
    static void store(float * p, reg a) { memcpy(p, a.x, sizeof(a.x)); }
    static reg set(float x) {
        return each([&](int) { return x; });
    }
    static reg add(reg a, reg b) {
        return each([&](int i) { return a.x[i] + b.x[i]; });
    }
    static reg sub(reg a, reg b) {
        return each([&](int i) { return a.x[i] - b.x[i]; });
    }
    static reg mul(reg a, reg b) {
        return each([&](int i) { return a.x[i] * b.x[i]; });
    }
    static reg div(reg a, reg b) {
        return each([&](int i) { return a.x[i] / b.x[i]; });
    }
    static reg fma(reg a, reg b, reg c) {
        return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
    }
    static reg max(reg a, reg b) {
        return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
    }
    static reg if_less(reg a, reg b, reg x, reg y) {
        return each([&](int i) { return a.x[i] < b.x[i] ? x.x[i] : y.x[i]; });
    }
    static bool any_less(reg a, reg b) {
        bool any = false;
        for (int i = 0; i < N; ++i) any |= a.x[i] < b.x[i];
        return any;
    }
    // a with the low bits of b added to its exponent
    static reg add_exponent(reg a, reg b) {
        uint32_t x[N], y[N];
        memcpy(x, a.x, sizeof(x));
        memcpy(y, b.x, sizeof(y));
        for (int i = 0; i < N; ++i) x[i] += y[i] << 23;
        memcpy(a.x, x, sizeof(x));
        return a;
    }
};

#if defined(__GNUC__)
// spelled out, because gcc takes a vector whose size is a template's parameter for a number in some
// places
template <int N>
struct simd;
template <>
struct simd<4> {
    typedef float reg __attribute__((vector_size(16)));
    typedef uint32_t bits __attribute__((vector_size(16)));
    typedef float memory __attribute__((vector_size(16), aligned(4), may_alias));
};
template <>
struct simd<8> {
    typedef float reg __attribute__((vector_size(32)));
    typedef uint32_t bits __attribute__((vector_size(32)));
    typedef float memory __attribute__((vector_size(32), aligned(4), may_alias));
};
template <>
struct simd<16> {
    typedef float reg __attribute__((vector_size(64)));
    typedef uint32_t bits __attribute__((vector_size(64)));
    typedef float memory __attribute__((vector_size(64), aligned(4), may_alias));
};

template <int N_FLOATS, int N_ROWS, int N_VECTORS>
struct simd_lanes {
    static constexpr int N = N_FLOATS, ROWS = N_ROWS, VECTORS = N_VECTORS;
    using reg = typename simd<N>::reg;
    using bits = typename simd<N>::bits;
    using memory = typename simd<N>::memory;

    static reg load(const float * p) { return *(const memory *) p; }
    static void store(float * p, reg a) { *(memory *) p = a; }
    static reg set(float x) { return x - reg {}; }
    static reg add(reg a, reg b) { return a + b; }
    static reg sub(reg a, reg b) { return a - b; }
    static reg mul(reg a, reg b) { return a * b; }
    static reg div(reg a, reg b) { return a / b; }
    // contracted where the processor can
    static reg fma(reg a, reg b, reg c) { return a * b + c; }
    static reg max(reg a, reg b) { return a > b ? a : b; }
    static reg if_less(reg a, reg b, reg x, reg y) { return a < b ? x : y; }
    static bool any_less(reg a, reg b) {
        bits less = (bits) (a < b);
        uint32_t any = 0;
        for (int i = 0; i < N; ++i) any |= less[i];
        return any != 0;
    }
    static reg add_exponent(reg a, reg b) { return (reg) ((bits) a + ((bits) b << 23)); }
};
#endif

#if !defined(__GNUC__)
using best_lanes = plain_lanes<4, 4, 2>;
#elif defined(__AVX512F__)
using best_lanes = simd_lanes<16, 8, 3>; // 32 registers
#elif defined(__AVX__)
using best_lanes = simd_lanes<8, 4, 3>; // 16
#elif defined(__aarch64__)
// 32; gcc 12 keeps 20 results in them, of 24 it writes some to the stack at every step
using best_lanes = simd_lanes<4, 4, 5>;
#else
using best_lanes = simd_lanes<4, 4, 3>; // 16
#endif

constexpr float LOG2E = 1.44269504f;

// 2^x = 2^k 2^f, |f| <= 1/2, relative error below 2e-7 (a polynomial for the least largest error,
// with 2^0 = 1); 0 below 2^-125
template <class L>
typename L::reg exp2(typename L::reg x) {
    // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits
    const auto magic = L::set(12582912.0f);
    const auto y = L::add(x, magic), f = L::sub(x, L::sub(y, magic));
    auto p = L::fma(f, L::set(1.326472714e-3f), L::set(9.67151264e-3f));
    p = L::fma(p, f, L::set(5.550733743e-2f));
    p = L::fma(p, f, L::set(2.402224209e-1f));
    p = L::fma(p, f, L::set(6.931469776e-1f));
    p = L::fma(p, f, L::set(1.0f));
    return L::if_less(x, L::set(-125.0f), L::set(0.0f), L::add_exponent(p, y));
}

// the sum of a register's values
template <class L>
float sum_of(typename L::reg x) {
    float each[L::N], sum = 0;
    L::store(each, x);
    for (float y : each) sum += y;
    return sum;
}

template <class L>
float dot(const float * x, const float * y, int n) {
    auto sum = L::set(0.0f);
    int i = 0;
    for (; i + L::N <= n; i += L::N) sum = L::fma(L::load(x + i), L::load(y + i), sum);
    float all = sum_of<L>(sum);
    for (; i < n; ++i) all += x[i] * y[i];
    return all;
}

} // namespace edgekv
