#pragma once
// What the native tests share: counted checks, a seeded random source, NMSE.

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdint>
#include <random>

inline int g_passed = 0, g_failed = 0;

// counts; says what was wrong
inline bool check(bool ok, const char * format, ...) {
    ++(ok ? g_passed : g_failed);
    if (!ok) {
        va_list args;
        va_start(args, format);
        printf("FAILED: ");
        vprintf(format, args);
        printf("\n");
        fflush(stdout);
        va_end(args);
    }
    return ok;
}

// last line of a test program and its exit code
inline int finish() {
    printf("%d passed, %d failed\n", g_passed, g_failed);
    return g_failed ? 1 : 0;
}

struct random_source {
    std::mt19937 g;
    explicit random_source(uint32_t seed) : g(seed) {}
    int below(int n) { return (int) (g() % (uint32_t) n); }
    int range(int a, int b) { return a + below(b - a + 1); } // both ends included
    float normal() { return std::normal_distribution<float>(0, 1)(g); }
    template <typename C>
    auto one_of(const C & c) {
        return c[below((int) std::size(c))];
    }
};

// normalised mean squared error, summed as it goes; a value that is not finite makes it infinite
struct nmse {
    double err = 0, ref = 0;
    void add(double got, double expected) { add(got, expected, expected); }
    // size: what the error stands beside
    void add(double got, double expected, double size) {
        if (!std::isfinite(got)) {
            err = INFINITY;
            return;
        }
        err += (got - expected) * (got - expected);
        ref += size * size;
    }
    double value() const { return ref > 0 ? err / ref : err; }
};
