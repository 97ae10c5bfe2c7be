#pragma once
// Tiles of bf16, Intel's AMX: 16 rows of 16 words (edgekv-words.h) with 16 words of 16 columns give
// 16 x 16 sums in f32. The instructions are written out: GCC 12 drops stores that a configuration
// needs (native/amx.cmake), and no compiler has them without flags that the rest of a file, which
// runs on other processors too, must not get.

#include "edgekv-words.h"

#if defined(__AVX512BF16__) && defined(__x86_64__) && defined(__linux__) && \
    __has_include(<amxtileintrin.h>) // a compiler that knows them
#define EDGEKV_TILES 1
#include <cpuid.h>
#include <cstdlib>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define EDGEKV_TILES 0
#endif

namespace edgekv {

#if EDGEKV_TILES

inline bool processor_has_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned XSAVE = 1u << 27, BF16 = 1u << 22, TILE = 1u << 24, STATE = 3u << 17;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE))
        return false;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & STATE) == STATE;
}

// Linux keeps room for tiles only for a process that has asked
inline bool may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// EDGEKV_TILES=0: the processor's other instructions
inline bool has_tiles() {
    static const bool have = [] {
        const char * set = std::getenv("EDGEKV_TILES");
        return !(set && *set == '0') && processor_has_tiles() && may_use_tiles();
    }();
    return have;
}

#define EDGEKV_TILE_CODE __attribute__((noinline, target("amx-tile,amx-bf16")))

// While it lives the thread's tiles are as the functions below want them.
class tiles_configured {
public:
    EDGEKV_TILE_CODE tiles_configured() {
        configuration ours = {};
        ours.palette = 1;
        // 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns; each is whole
        for (int i = 0; i < 8; ++i) {
            ours.bytes[i] = 64;
            ours.rows[i] = 16;
        }
        __asm__ volatile("sttilecfg %0" : "=m"(before));
        __asm__ volatile("ldtilecfg %0" : : "m"(ours));
    }
    // as they were: ggml takes its own configuration for granted
    EDGEKV_TILE_CODE ~tiles_configured() { __asm__ volatile("ldtilecfg %0" : : "m"(before)); }
    tiles_configured(const tiles_configured &) = delete;
    tiles_configured & operator=(const tiles_configured &) = delete;

private:
    struct configuration {
        unsigned char palette, start, unused[14];
        unsigned short bytes[16];
        unsigned char rows[16];
    };
    configuration before;
};

// Blocks of 32 x 32 sums: two tiles of rows, two of columns
struct tile_words : bf16_words {
    static constexpr int ROWS = 32, VECTORS = 2;
    static constexpr bool TILES = true;
    using scope = tiles_configured;
    // bf16_words' is not measured on Intel's processors
    static L::reg power(L::reg x) { return exp2<L>(x); }
    static int n_words(int d) { return (d + 31) / 32 * 16; } // whole tiles
    static void row(const float * x, int d, uint32_t * words) {
        bf16_words::row(x, d, words);
        for (int i = (d + 1) / 2; i < n_words(d); ++i) words[i] = 0;
    }
};

// c[i][j] = (c[i][j], if ADD) + sum over k of a[i][k] b[k][j], i and j below 32; n words, a
// multiple of 16. Steps are in words of 4 bytes.
template <bool ADD = false>
EDGEKV_TILE_CODE void multiply_tiles(const uint32_t * a, size_t step_a, size_t next_a,
    const uint32_t * b, size_t step_b, int n, float * c, size_t step_c) {
    const size_t to_a = step_a * sizeof(*a), to_b = step_b * sizeof(*b), to_c = step_c * sizeof(*c);
    float * c_below = c + 16 * step_c;
    if constexpr (ADD)
        __asm__ volatile("tileloadd (%[c],%[to_c],1), %%tmm0\n\t"
                         "tileloadd 64(%[c],%[to_c],1), %%tmm1\n\t"
                         "tileloadd (%[below],%[to_c],1), %%tmm2\n\t"
                         "tileloadd 64(%[below],%[to_c],1), %%tmm3"
            :
            : [c] "r"(c), [below] "r"(c_below), [to_c] "r"(to_c)
            : "memory");
    else __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    for (int k = 0; k < n; k += 16, a += next_a, b += 16 * step_b)
        __asm__ volatile("tileloadd (%[a],%[to_a],1), %%tmm4\n\t"
                         "tileloadd (%[b],%[to_b],1), %%tmm6\n\t"
                         "tileloadd 64(%[b],%[to_b],1), %%tmm7\n\t"
                         "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
                         "tileloadd (%[below],%[to_a],1), %%tmm5\n\t"
                         "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
                         "tdpbf16ps %%tmm7, %%tmm5, %%tmm3"
            :
            :
            [a] "r"(a), [below] "r"(a + 16 * step_a), [to_a] "r"(to_a), [b] "r"(b), [to_b] "r"(to_b)
            : "memory");
    __asm__ volatile("tilestored %%tmm0, (%[c],%[to_c],1)\n\t"
                     "tilestored %%tmm1, 64(%[c],%[to_c],1)\n\t"
                     "tilestored %%tmm2, (%[below],%[to_c],1)\n\t"
                     "tilestored %%tmm3, 64(%[below],%[to_c],1)"
        :
        : [c] "r"(c), [below] "r"(c_below), [to_c] "r"(to_c)
        : "memory");
}

// lanes of the panels (edgekv-panel.h) that are multiplied so
using tile_lanes = simd_lanes<16, 32, 2>;

#else

inline bool has_tiles() { return false; }

#endif

} // namespace edgekv
