#pragma once
// The cases that the CPU kernels are held against: every type, head size, group, length, then random ones.
#include "kernel-cases.h"

namespace {

const ggml_type TYPES[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };
const int HEAD_SIZES[] = { 64, 80, 96, 128, 256 };
const int GROUPS[]     = { 1, 3, 4, 7, 16 };
const int N_TOKENS[]   = { 1, 2, 8, 65, 300 };
const int LENGTHS[]    = { 0, 1, 31, 32, 33, 255, 256, 257, 1000, 4096 };

std::vector<test_case> fixed_cases() {
    std::vector<test_case> all;
    auto add = [&](auto && change) { test_case c; change(c); all.push_back(c); };
    for (ggml_type type : TYPES) for (int d : HEAD_SIZES) for (int n : { 1, 8, 65 }) {
        if (fits(type, d)) add([&](test_case & c) { c.type_k = c.type_v = type; c.d_k = c.d_v = d; c.n_tokens = n; });
    }
    for (auto [k, v] : { std::pair<ggml_type, ggml_type>(GGML_TYPE_F16, GGML_TYPE_Q8_0), { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }, { GGML_TYPE_Q4_0, GGML_TYPE_F16 },
                         { GGML_TYPE_BF16, GGML_TYPE_IQ4_NL }, { GGML_TYPE_Q5_1, GGML_TYPE_Q4_1 }, { GGML_TYPE_F32, GGML_TYPE_Q5_0 } }) {
        for (int n : { 1, 65 }) add([&](test_case & c) { c.type_k = k; c.type_v = v; c.d_k = 96; c.d_v = 128; c.n_tokens = n; });
    }
    for (auto [d_k, d_v] : { std::pair<int, int>(192, 128), { 64, 256 }, { 80, 96 }, { 72, 40 } }) {
        for (int n : { 1, 65 }) add([&](test_case & c) { c.d_k = d_k; c.d_v = d_v; c.n_tokens = n; });
    }
    for (int group : GROUPS) for (int n : N_TOKENS) add([&](test_case & c) { c.group = group; c.n_tokens = n; c.len = { 310, 0, 577 }; });
    for (int n_len : LENGTHS) for (int n : { 1, 2, 65 }) add([&](test_case & c) { c.group = 2; c.n_tokens = n; c.len = { n_len, 33, 0 }; });
    add([&](test_case & c) { c.len.assign(std::begin(LENGTHS), std::end(LENGTHS)); });
    add([&](test_case & c) { c.len = { 0, 0 }; });
    for (int n : { 1, 8, 300 }) for (int bits = 1; bits < 32; ++bits) add([&](test_case & c) {
        c.n_tokens = n; c.len = { 333, 40, 300 }; c.group = 3;
        c.window = bits & 1; c.sinks = bits & 2; c.gaps = bits & 4; c.softcap = bits & 8 ? 3.0f : 0.0f; c.alibi = bits & 16;
    });
    for (int n : { 8, 300 }) for (float softcap : { 0.0f, 20.0f }) add([&](test_case & c) { // maxima grow by far, most weights vanish
        c.n_tokens = n; c.len = { 700, 300 }; c.spread = 40; c.softcap = softcap; c.sinks = true;
    });
    for (int n : { 63, 64, 129 }) add([&](test_case & c) { c.n_tokens = n; c.group = 1; c.len = { n, n + 64, n + 1 }; c.window = true; });
    return all;
}

test_case random_case(random_source & rnd) {
    test_case c;
    do { c.type_k = rnd.one_of(TYPES); c.d_k = rnd.one_of(HEAD_SIZES); } while (!fits(c.type_k, c.d_k));
    do { c.type_v = rnd.one_of(TYPES); c.d_v = rnd.one_of(HEAD_SIZES); } while (!fits(c.type_v, c.d_v));
    c.group    = rnd.one_of(GROUPS);
    c.n_tokens = rnd.one_of(N_TOKENS);
    c.len.clear();
    for (int i = rnd.range(1, c.n_tokens > 8 ? 2 : 5); i > 0; --i) c.len.push_back(rnd.below(2) ? rnd.one_of(LENGTHS) : c.n_tokens + rnd.below(400));
    c.window = rnd.below(2); c.sinks = rnd.below(2); c.gaps = rnd.below(2); c.alibi = rnd.below(3) == 0;
    c.spread = rnd.below(4) ? 1.0f : 30.0f;
    c.softcap = rnd.below(3) ? 0.0f : 0.5f + rnd.below(30);
    return c;
}

} // namespace
