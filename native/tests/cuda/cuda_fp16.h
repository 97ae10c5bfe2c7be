#pragma once
// Stand-in for CUDA's header of the same name: halves, rounded after every operation as a GPU does.

#include "ggml.h"

#include <cstdint>
#include <cstring>

struct __half {
    uint16_t x;
};
struct __half2 {
    __half x, y;
};

inline float half_to_float(uint16_t h) { // exact; ggml's own is a call into its library
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16, exponent = h >> 10 & 0x1f,
                   mantissa = h & 0x3ff;
    if (exponent == 0) {
        const float y = (float) mantissa * 5.9604644775390625e-8f; // 2^-24
        return sign ? -y : y;
    }
    const uint32_t y =
        sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
    float f;
    memcpy(&f, &y, sizeof(f));
    return f;
}

inline float __half2float(__half x) { return half_to_float(x.x); }
inline __half __float2half_rn(float x) { return { ggml_fp32_to_fp16(x) }; }
inline __half2 __floats2half2_rn(float x, float y) {
    return { __float2half_rn(x), __float2half_rn(y) };
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return __floats2half2_rn(
        __half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
// the double product and sum of halves are exact
inline __half fused(__half a, __half b, __half c) {
    return __float2half_rn((float) ((double) __half2float(a) * __half2float(b) + __half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return { fused(a.x, b.x, c.x), fused(a.y, b.y, c.y) };
}
