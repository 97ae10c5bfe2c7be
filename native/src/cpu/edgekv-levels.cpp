#include "edgekv-levels.h"

#include "repack.h"
#include "simd-mappings.h"

#include <cstring>

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
void finish(weight_block & b, float scale, float low = 0) {
    int sum = 0;
    for (int8_t u : b.u) sum += u;
    finish(b, scale, low, sum);
}

// 16 bytes have the first half in their low bits, the second in the others
void halves(const uint8_t * q, int less, int8_t * u) {
    for (int i = 0; i < 16; ++i) {
        u[i] = (int8_t) ((q[i] & 15) - less);
        u[i + 16] = (int8_t) ((q[i] >> 4) - less);
    }
}
// ... and a fifth bit elsewhere
void halves(const uint8_t * q, const uint8_t * fifth, int less, int8_t * u) {
    uint32_t bits;
    memcpy(&bits, fifth, sizeof(bits));
    halves(q, less, u);
    for (int i = 0; i < 32; ++i) u[i] = (int8_t) (u[i] + (int) ((bits >> i & 1) << 4));
}

void read(const block_q4_0 & b, weight_block * to) {
    halves(b.qs, 8, to->u);
    finish(*to, f32(b.d));
}
void read(const block_q4_1 & b, weight_block * to) {
    halves(b.qs, 0, to->u);
    const scale_and_low x(&b);
    finish(*to, x.scale, x.low);
}
void read(const block_q5_0 & b, weight_block * to) {
    halves(b.qs, b.qh, 16, to->u);
    finish(*to, f32(b.d));
}
void read(const block_q5_1 & b, weight_block * to) {
    halves(b.qs, b.qh, 0, to->u);
    const scale_and_low x(&b);
    finish(*to, x.scale, x.low);
}
void read(const block_q8_0 & b, weight_block * to) {
    memcpy(to->u, b.qs, sizeof(to->u));
    finish(*to, f32(b.d));
}

// 64 values in the halves of 32 bytes; fifth: null, or 32 bytes with a bit of each block
template <class Block>
void read_K(const Block & b, const uint8_t * fifth, weight_block * to) {
    const scales_K s(b.scales);
    const scale_and_low x(&b);
    for (int i = 0; i < 8; ++i, ++to) {
        for (int j = 0; j < 32; ++j) {
            int level = b.qs[i / 2 * 32 + j] >> i % 2 * 4 & 15;
            if (fifth) level |= (fifth[j] >> i & 1) << 4;
            to->u[j] = (int8_t) level;
        }
        finish(*to, x.scale * s.scale[i], -x.low * s.low[i]);
    }
}
void read(const block_q4_K & b, weight_block * to) { read_K(b, nullptr, to); }
void read(const block_q5_K & b, weight_block * to) { read_K(b, b.qh, to); }

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
    for (int i = 0; i < 8; ++i, ++to) {
        const scales_K s(b.scales + i * 12);
        for (int row = 0; row < 8; ++row) {
            weight_block & block = to[(size_t) row * step];
            int sum = 0;
            for (int j = 0; j < 32; j += 8) {
                const uint64_t x = run(b.qs + ((i / 2 * 4 + j / 8) * 8 + row) * 8, i % 2);
                sum += sum_of(x);
                put(x, block.u + j);
            }
            finish(block, f32(b.d[row]) * s.scale[row], -f32(b.dmin[row]) * s.low[row], sum);
        }
    }
}

template <class Block, class... Step>
void read_all(const char * data, int n, int size, weight_block * to, Step... step) {
    const auto * b = (const Block *) data;
    for (int i = 0; i < n; i += size) read(*b++, to + i / 32, step...);
}

} // namespace

int most_level(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return 8;
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_K: return 15;
        case GGML_TYPE_Q5_0: return 16;
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_K: return 31;
        case GGML_TYPE_Q8_0: return 128;
        default: return 0;
    }
}

bool has_low(ggml_type type) {
    return type != GGML_TYPE_Q4_0 && type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q8_0;
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
