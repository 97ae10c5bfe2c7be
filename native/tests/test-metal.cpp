// The Metal kernels, compiled as C++, against plain loops in double precision, and what the host
// says of them. This shows their logic only: no Metal compiler has seen them.
//     test-metal [seed] [number of random cases] [few: one of nine fixed cases]
//     test-metal --support
#include "cases.h"
#include "modes.h"
#include "fibers.h"
#include "metal/kernels.h"

#include <cstddef>
#include <iterator>
#include <sstream>

namespace {

using edgekv_metal::call;

// f32 throughout: measured worst 3e-13 (attend), 7e-13 (score: m2)
constexpr double MAX_NMSE_ATTEND = 1e-10, MAX_NMSE_SCORE = 1e-10, MAX_COSINE_ERROR = 2e-6;

template <typename Args>
void queue(const call & c, const Args & args, const std::vector<const void *> & buffers) {
    check(metal_standin::run(c, &args, sizeof(args), buffers),
        "%s does not take this call, or wrote behind its memory", c.kernel);
}

// ---- attend

void test_attend(const inputs & in, const std::vector<double> & expected) {
    if (!check(edgekv_metal::supports(in.c.type_k, in.c.d_k) &&
                edgekv_metal::supports(in.c.type_v, in.c.d_v),
            "attend: %s is not supported", in.c.name().c_str()))
        return;
    for (int n_parts : { 1, 7 }) {
        std::vector<float> before;
        for (bool backwards : { false, true }) {
            standin::backwards = backwards;
            const auto a =
                edgekv_metal::attend_args(edgekv_metal::layer_of(in.rows, in.qs), n_parts);
            std::vector<float> parts(edgekv_metal::attend_workspace(a) / sizeof(float), NAN),
                out(expected.size(), NAN);
            queue(edgekv_metal::attend_part(a), a,
                { in.k.bytes.data(), in.v.bytes.data(), in.first.data(), in.len.data(),
                    in.pos.data(), in.q.data(), in.start.data(), nullptr, parts.data() });
            queue(edgekv_metal::attend_combine(a), a,
                { parts.data(), in.sinks.data(), in.recalled.data(), out.data() });
            if (backwards)
                check(!memcmp(out.data(), before.data(), out.size() * sizeof(float)),
                    "attend: %s: %d parts: two runs differ", in.c.name().c_str(), n_parts);
            else judge("attend", in, compare(out, expected), MAX_NMSE_ATTEND);
            before = out;
        }
    }
}

// ---- score

// all tokens in n_calls calls, as chunks of a prompt come
columns run_score(const inputs & in, int n_calls) {
    columns cols(in);
    const int n_tokens = in.c.n_tokens, longest = *std::max_element(in.len.begin(), in.len.end());
    for (int call = 0; call < n_calls; ++call) {
        const int t0 = n_tokens * call / n_calls, n = n_tokens * (call + 1) / n_calls - t0;
        std::vector<int32_t> after; // the rows of later calls are there already
        for (int t = t0; t < t0 + n; ++t) after.push_back(n_tokens - 1 - t);
        edgekv_queries qs = in.qs;
        qs.q += t0 * qs.stride_t;
        qs.n_tokens = n;
        qs.n_after = n_calls > 1 ? after.data() : nullptr;
        if (qs.start) qs.start += t0;
        cols.c.n_seen = t0;
        const auto a = edgekv_metal::score_args(in.rows, qs, cols.c, longest);
        std::vector<float> norm(edgekv_metal::score_norm_bytes(a) / sizeof(float), NAN),
            lse(edgekv_metal::score_lse_bytes(a) / sizeof(float), NAN);
        queue(edgekv_metal::score_norm(a), a,
            { in.rows.k, in.first.data(), in.len.data(), in.pos.data(), qs.q, qs.start, qs.n_after,
                norm.data() });
        queue(edgekv_metal::score_fold(a), a, { norm.data(), in.sinks.data(), lse.data() });
        queue(edgekv_metal::score_columns(a, longest), a,
            { in.rows.k, in.first.data(), in.len.data(), in.pos.data(), qs.q, qs.start, qs.n_after,
                lse.data(), cols.c.sum, cols.c.max, cols.c.entropy, cols.c.mean, cols.c.m2 });
    }
    return cols;
}

void test_score(const inputs & in, const std::vector<attention> & a) {
    const columns_reference expected(in, a);
    standin::backwards = false;
    const columns once = run_score(in, 1);
    compare_columns("score, one call", in, once, expected, MAX_NMSE_SCORE);
    standin::backwards = true;
    const columns again = run_score(in, 1);
    for (auto x :
        { &columns::sum, &columns::max, &columns::entropy, &columns::mean, &columns::m2 }) {
        check(!memcmp((once.*x).data(), (again.*x).data(), (once.*x).size() * sizeof(float)),
            "score: %s: two runs differ", in.c.name().c_str());
    }
    if (in.c.n_tokens > 2)
        compare_columns("score, calls", in, run_score(in, 3), expected, MAX_NMSE_SCORE);
}

// ---- evict

void test_evict(random_source & rnd, size_t n_bytes, int n_rows, int n_kept, bool named) {
    std::vector<char> rows(n_rows * n_bytes), to(n_kept * n_bytes + 16, '\xff'), expected = to;
    for (char & x : rows) x = (char) rnd.below(256);
    std::vector<int32_t> index;
    for (int i = 0; i < n_kept; ++i) {
        index.push_back(named ? rnd.below(n_rows) : i);
        memcpy(&expected[i * n_bytes], &rows[index[i] * n_bytes], n_bytes);
    }
    const edgekv_metal_gather a = { n_bytes, n_kept, named };
    queue(edgekv_metal::gather(a, 0), a, { rows.data(), to.data(), index.data() });
    check(to == expected, "gather: %d of %d rows of %zu bytes", n_kept, n_rows, n_bytes);
}

// ---- merge

void test_merge(const merge_case & c, random_source & rnd) {
    const merge_inputs in(c, rnd);
    std::vector<float> before;
    for (bool backwards : { false, true }) {
        standin::backwards = backwards;
        std::vector<float> cosine(c.n_gone + 1, NAN);
        std::vector<int32_t> nearest(c.n_gone + 1, -7);
        const auto a = edgekv_metal::nearest_args(in.view, c.n_gone, c.n_kept);
        queue(edgekv_metal::merge_nearest(a), a,
            { in.m.bytes.data(), in.gone.data(), in.kept.data(), cosine.data(), nearest.data() });
        check(std::isnan(cosine.back()) && nearest.back() == -7,
            "nearest: %s: written behind the end", c.name().c_str());
        cosine.pop_back();
        nearest.pop_back();
        if (backwards) check(cosine == before, "nearest: %s: two runs differ", c.name().c_str());
        else judge_nearest(c, in, cosine, nearest, MAX_COSINE_ERROR);
        before = cosine;
    }
    const merge_shares s(c, in, rnd);
    auto bytes = in.m.bytes;
    const auto a = edgekv_metal::fold_args(in.view, s.view.n);
    queue(edgekv_metal::merge_fold(a), a,
        { bytes.data(), s.view.rows, s.view.own, s.view.counts, s.begin.data(), s.view.sources,
            s.view.weights });
    judge_fold(c, in, s, bytes);
}

// ---- what the host says of the kernels

struct member {
    const char * name;
    size_t at, n_bytes;
};

#define MEMBER(type, name) { #type "." #name, offsetof(type, name), sizeof(type::name) }

// members follow each other at multiples of their sizes, so that any compiler lays them out alike
void test_layout(
    const char * name, size_t n_bytes, size_t align, const std::vector<member> & members) {
    size_t end = 0;
    for (const auto & m : members) {
        check(
            m.at == end, "%s begins at byte %zu, what is before it ends at %zu", m.name, m.at, end);
        check(m.at % std::min<size_t>(m.n_bytes, 8) == 0 && (m.n_bytes == 4 || m.n_bytes % 8 == 0),
            "%s does not lie at a multiple of its size", m.name);
        end = m.at + m.n_bytes;
    }
    check(end == n_bytes && n_bytes % align == 0, "%s has %zu bytes, its members %zu", name,
        n_bytes, end);
}

void test_layouts() {
    using L = edgekv_metal_layer;
    using A = edgekv_metal_attend;
    using S = edgekv_metal_score;
    using G = edgekv_metal_gather;
    using N = edgekv_metal_nearest;
    using F = edgekv_metal_fold;
    test_layout("layer", sizeof(L), alignof(L),
        { MEMBER(L, nb_k), MEMBER(L, nb_v), MEMBER(L, stride_t), MEMBER(L, stride_h),
            MEMBER(L, type_k), MEMBER(L, type_v), MEMBER(L, d_k), MEMBER(L, d_v), MEMBER(L, n_head),
            MEMBER(L, n_head_kv), MEMBER(L, n_tokens), MEMBER(L, scale), MEMBER(L, softcap),
            MEMBER(L, max_bias), MEMBER(L, has_sinks), MEMBER(L, has_start), MEMBER(L, has_after),
            MEMBER(L, has_recalled) });
    test_layout("attend", sizeof(A), alignof(A),
        { MEMBER(A, layer), MEMBER(A, n_parts), MEMBER(A, n_blocks) });
    test_layout("score", sizeof(S), alignof(S),
        { MEMBER(S, layer), MEMBER(S, n_rows), MEMBER(S, n_seen), MEMBER(S, n_parts),
            MEMBER(S, n_blocks), MEMBER(S, has_sum), MEMBER(S, has_max), MEMBER(S, has_entropy),
            MEMBER(S, has_moments) });
    test_layout("gather", sizeof(G), alignof(G),
        { MEMBER(G, n_bytes), MEMBER(G, n_rows), MEMBER(G, has_index) });
    test_layout("nearest", sizeof(N), alignof(N),
        { MEMBER(N, nb), MEMBER(N, type), MEMBER(N, d), MEMBER(N, n_gone), MEMBER(N, n_kept) });
    test_layout("fold", sizeof(F), alignof(F),
        { MEMBER(F, nb), MEMBER(F, type), MEMBER(F, d), MEMBER(F, n), MEMBER(F, n_chunks) });
}

// the host's table against the kernels as compiled; tests/test_metal.py holds it against their text
void test_table() {
    for (const auto & k : edgekv_metal::KERNELS) {
        const auto * is = metal_standin::find(k.kernel);
        if (!check(is, "there is no kernel %s", k.kernel)) continue;
        std::istringstream words(k.buffers);
        const size_t n = (size_t) std::distance(
            std::istream_iterator<std::string>(words), std::istream_iterator<std::string>());
        check(is->n_args == k.n_args && is->n_buffers == n,
            "%s: arguments of %zu bytes and %zu buffers, not %zu and %zu", k.kernel, is->n_args,
            is->n_buffers, k.n_args, n);
    }
}

void run(const test_case & c, random_source & rnd) {
    inputs in(c, rnd);
    const auto a = attend_reference(in);
    test_attend(in, values_reference(in, a));
    test_score(in, a);
    if (c.n_tokens > EDGEKV_ALIKE_MAX) return;
    in.recall(rnd);
    test_attend(in, recalled_reference(in, a));
}

} // namespace

int main(int argc, char ** argv) {
    if (print_support(argc, argv, ON_METAL.types(), edgekv_metal::supports)) return 0;
    asked(argc, argv, "--test");
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    printf("seed %u\n", seed);
    random_source rnd(seed);
    test_layouts();
    test_table();
    for (size_t n_bytes : { 36, 54, 68, 80, 128, 136 })
        for (int n_kept : { 0, 1, 17, 100 })
            for (bool named : { false, true }) test_evict(rnd, n_bytes, 100, n_kept, named);
    for (const auto & c : merge_cases(rnd, n_random, ON_METAL)) test_merge(c, rnd);
    each_case(
        rnd, n_random, asks_few(argc, argv), ON_METAL, [&](const test_case & c) { run(c, rnd); });
    print_table();
    return finish();
}
