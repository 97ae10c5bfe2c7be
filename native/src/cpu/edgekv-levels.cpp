#include "edgekv-levels.h"

#include "repack.h"
#include "simd-mappings.h"

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace edgekv {

namespace {

float f32(ggml_fp16_t x) { return GGML_CPU_FP16_TO_FP32(x); }

// what blocks that have both begin with; their names differ between compilers
struct scale_and_low {
    float scale, low;
    explicit scale_and_low(const void * block) {
        ggml_fp16_t x[2];
        memcpy(x, block, sizeof(x));
        scale = f32(x[0]);
        low = f32(x[1]);
    }
};

void finish(weight_block & b, float scale, float low, int sum) {
    b.scale = scale;
    b.low = low;
    b.sum = scale * (float) sum;
}

// 32 levels that are not negative, and what they are stored less
#if defined(__AVX2__)
struct level_bytes {
    __m256i v;
    static level_bytes load(const void * p) { return { _mm256_loadu_si256((const __m256i *) p) }; }
    // bits [shift, shift + n) of each
    level_bytes bits(int shift, int n) const {
        return { _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(shift)),
            _mm256_set1_epi8((char) ((1 << n) - 1))) };
    }
    level_bytes with(level_bytes high, int shift) const {
        return { _mm256_or_si256(v, _mm256_sll_epi16(high.v, _mm_cvtsi32_si128(shift))) };
    }
    // 16 bytes have the first half in their low bits, the second in the others
    static level_bytes halves(const uint8_t * q) {
        const __m128i x = _mm_loadu_si128((const __m128i *) q);
        return level_bytes { _mm256_set_m128i(_mm_srli_epi16(x, 4), x) }.bits(0, 4);
    }
    // a bit of each
    static level_bytes of_bits(const uint8_t * p) {
        uint32_t x;
        memcpy(&x, p, sizeof(x));
        const __m256i byte = _mm256_shuffle_epi8(_mm256_set1_epi32((int) x),
            _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
        const __m256i bit = _mm256_set1_epi64x((long long) 0x8040201008040201);
        return level_bytes { _mm256_cmpeq_epi8(_mm256_and_si256(byte, bit), bit) }.bits(0, 1);
    }
    // puts them there, each less so much; sums of the halves that were put
    void put(int8_t * u, int less, int * sums) const {
        _mm256_storeu_si256((__m256i *) u, _mm256_sub_epi8(v, _mm256_set1_epi8((char) less)));
        const __m256i s = _mm256_sad_epu8(v, _mm256_setzero_si256());
        const __m128i low = _mm256_castsi256_si128(s), high = _mm256_extracti128_si256(s, 1);
        sums[0] = _mm_cvtsi128_si32(low) + _mm_extract_epi32(low, 2) - 16 * less;
        sums[1] = _mm_cvtsi128_si32(high) + _mm_extract_epi32(high, 2) - 16 * less;
    }
};
#else
struct level_bytes {
    uint8_t v[32];
    static level_bytes load(const void * p) {
        level_bytes x;
        memcpy(x.v, p, sizeof(x.v));
        return x;
    }
    level_bytes bits(int shift, int n) const {
        level_bytes x;
        for (int i = 0; i < 32; ++i) x.v[i] = (uint8_t) (v[i] >> shift & ((1 << n) - 1));
        return x;
    }
    level_bytes with(level_bytes high, int shift) const {
        for (int i = 0; i < 32; ++i) high.v[i] = (uint8_t) (v[i] | high.v[i] << shift);
        return high;
    }
    static level_bytes halves(const uint8_t * q) {
        level_bytes x;
        for (int i = 0; i < 16; ++i) x.v[i] = q[i] & 15, x.v[i + 16] = q[i] >> 4;
        return x;
    }
    static level_bytes of_bits(const uint8_t * p) {
        level_bytes x;
        for (int i = 0; i < 32; ++i) x.v[i] = p[i / 8] >> i % 8 & 1;
        return x;
    }
    void put(int8_t * u, int less, int * sums) const {
        for (int half = 0; half < 2; ++half) {
            sums[half] = -16 * less;
            for (int i = 16 * half; i < 16 * half + 16; ++i) {
                u[i] = (int8_t) (v[i] - less);
                sums[half] += v[i];
            }
        }
    }
};
#endif
int put(const level_bytes & x, int less, int8_t * u) {
    int sums[2];
    x.put(u, less, sums);
    return sums[0] + sums[1];
}
level_bytes halves(const uint8_t * q) { return level_bytes::halves(q); }
// ... and a fifth bit elsewhere
level_bytes halves(const uint8_t * q, const uint8_t * fifth) {
    return halves(q).with(level_bytes::of_bits(fifth), 4);
}

void read(const block_q4_0 & b, weight_block * to) {
    finish(*to, f32(b.d), 0, put(halves(b.qs), 8, to->u));
}
void read(const block_q4_1 & b, weight_block * to) {
    const scale_and_low x(&b);
    finish(*to, x.scale, x.low, put(halves(b.qs), 0, to->u));
}
void read(const block_q5_0 & b, weight_block * to) {
    finish(*to, f32(b.d), 0, put(halves(b.qs, b.qh), 16, to->u));
}
void read(const block_q5_1 & b, weight_block * to) {
    const scale_and_low x(&b);
    finish(*to, x.scale, x.low, put(halves(b.qs, b.qh), 0, to->u));
}
void read(const block_q8_0 & b, weight_block * to) {
    uint8_t above[32]; // -128
    for (int i = 0; i < 32; ++i) above[i] = (uint8_t) (b.qs[i] ^ 128);
    finish(*to, f32(b.d), 0, put(level_bytes::load(above), 128, to->u));
}

// 64 values in the halves of 32 bytes; fifth: null, or 32 bytes with a bit of each block
template <class Block>
void read_K(const Block & b, const uint8_t * fifth, weight_block * to) {
    const scales_K s(b.scales);
    const scale_and_low x(&b);
    for (int i = 0; i < 8; ++i, ++to) {
        auto levels = level_bytes::load(b.qs + i / 2 * 32).bits(i % 2 * 4, 4);
        if (fifth) levels = levels.with(level_bytes::load(fifth).bits(i, 1), 4);
        finish(*to, x.scale * s.scale[i], 0, put(levels, 0, to->u));
    }
    set_lows(to - 8, -x.low, s.low);
}
void read(const block_q4_K & b, weight_block * to) { read_K(b, nullptr, to); }
void read(const block_q5_K & b, weight_block * to) { read_K(b, b.qh, to); }

// in each half of the 256 values, two low bits of 32 bytes are the high bits of 32 values
void read(const block_q6_K & b, weight_block * to) {
    for (int i = 0; i < 8; ++i, ++to) {
        const uint8_t *low = b.ql + i / 4 * 64 + i % 2 * 32, *high = b.qh + i / 4 * 32;
        int sums[2];
        level_bytes::load(low)
            .bits(i % 4 / 2 * 4, 4)
            .with(level_bytes::load(high).bits(i % 4 * 2, 2), 4)
            .put(to->u, 32, sums);
        const float d = f32(b.d);
        to->scale = d * b.scales[2 * i];
        to->second = d * b.scales[2 * i + 1];
        to->sum = to->scale * (float) sums[0] + to->second * (float) sums[1];
    }
}

// Values lie as eight bytes of each row in turn: the low bits of a byte are a value of one run of
// eight, the high bits of another. Runs are added up in their register: to read them as a vector
// would wait until they are written.
constexpr uint64_t EACH = 0x0101010101010101;
uint64_t run(const void * bytes, bool high) {
    uint64_t both;
    memcpy(&both, bytes, sizeof(both));
    return both >> (high ? 4 : 0) & 15 * EACH;
}
int sum_of(uint64_t run) { return (int) (run * EACH >> 56); }
void put(uint64_t run, int8_t * u) { memcpy(u, &run, sizeof(run)); }

// repacking turned each value's highest bit
void read(const block_q4_0x8 & b, weight_block * to, int step) {
    for (int row = 0; row < 8; ++row, to += step) {
        int sum = -8 * 32;
        for (int i = 0; i < 32; i += 8) {
            const uint64_t x = run(b.qs + (i % 16 + row) * 8, i >= 16) ^ 8 * EACH;
            sum += sum_of(x);
            put(((x | 128 * EACH) - 8 * EACH) ^ 128 * EACH, to->u + i);
        }
        finish(*to, f32(b.d[row]), 0, sum);
    }
}
// the scales of eight rows are packed as those of a row's eight blocks were
void read(const block_q4_Kx8 & b, weight_block * to, int step) {
    uint8_t lows[8][8];
    for (int i = 0; i < 8; ++i) {
        const scales_K s(b.scales + i * 12);
        for (int row = 0; row < 8; ++row) {
            weight_block & block = to[(size_t) row * step + i];
            int sum = 0;
            for (int j = 0; j < 32; j += 8) {
                const uint64_t x = run(b.qs + ((i / 2 * 4 + j / 8) * 8 + row) * 8, i % 2);
                sum += sum_of(x);
                put(x, block.u + j);
            }
            finish(block, f32(b.d[row]) * s.scale[row], 0, sum);
            lows[row][i] = s.low[row];
        }
    }
    for (int row = 0; row < 8; ++row)
        set_lows(to + (size_t) row * step, -f32(b.dmin[row]), lows[row]);
}

template <class Block, class... Step>
void read_all(const char * data, int n, int size, weight_block * to, Step... step) {
    const auto * b = (const Block *) data;
    for (int i = 0; i < n; i += size) read(*b++, to + i / 32, step...);
}

} // namespace

void set_lows(weight_block * eight, float step, const uint8_t * m) {
    for (int i = 0; i < 8; ++i) eight[i].sum += 32 * step * m[i];
    for (int i = 0; i < 8; ++i) eight[i / 2].lows[i % 2] = m[i];
    eight[4].low = step;
}
float low_of(const weight_block * eight, int i) { return eight[4].low * eight[i / 2].lows[i % 2]; }

level_form form_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return { 8, false, false, false };
        case GGML_TYPE_Q4_1: return { 15, true, false, false };
        case GGML_TYPE_Q5_0: return { 16, false, false, false };
        case GGML_TYPE_Q5_1: return { 31, true, false, false };
        case GGML_TYPE_Q8_0: return { 128, false, false, false };
        case GGML_TYPE_Q4_K: return { 15, true, false, true };
        case GGML_TYPE_Q5_K: return { 31, true, false, true };
        case GGML_TYPE_Q6_K: return { 32, false, true, true };
        default: return {};
    }
}

void read_levels(ggml_type type, const char * row, int n, weight_block * to) {
    switch (type) {
        case GGML_TYPE_Q4_0: return read_all<block_q4_0>(row, n, 32, to);
        case GGML_TYPE_Q4_1: return read_all<block_q4_1>(row, n, 32, to);
        case GGML_TYPE_Q5_0: return read_all<block_q5_0>(row, n, 32, to);
        case GGML_TYPE_Q5_1: return read_all<block_q5_1>(row, n, 32, to);
        case GGML_TYPE_Q8_0: return read_all<block_q8_0>(row, n, 32, to);
        case GGML_TYPE_Q4_K: return read_all<block_q4_K>(row, n, 256, to);
        case GGML_TYPE_Q5_K: return read_all<block_q5_K>(row, n, 256, to);
        case GGML_TYPE_Q6_K: return read_all<block_q6_K>(row, n, 256, to);
        default: return;
    }
}

bool read_levels_of_eight(ggml_type type, const char * data, int n, weight_block * to) {
    switch (type) {
        case GGML_TYPE_Q4_0: read_all<block_q4_0x8>(data, n, 32, to, n / 32); return true;
        case GGML_TYPE_Q4_K: read_all<block_q4_Kx8>(data, n, 256, to, n / 32); return true;
        default: return false;
    }
}

} // namespace edgekv
