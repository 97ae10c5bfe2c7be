// Scores, moved and merged rows by the functions that the patched Metal backend hands out by name,
// on the device of metal/fake-metal.cpp, against plain loops. The kernels' source runs as C++: no
// Metal compiler has seen it, no Apple GPU run it.
//     test-metal-names [seed] [number of random cases] [few: one of nine fixed cases]
#include "cases.h"
#include "cuda/edgekv-cuda.h"
#include "fibers.h"

#include "ggml-backend.h"
#include "ggml-metal.h"

#include <memory>

extern "C" long fake_metal_fails(long n);

namespace {

// as exact as the kernels are alone (test-metal.cpp)
constexpr double MAX_NMSE = 1e-10, MAX_COSINE_ERROR = 2e-6;
// as fake-metal.cpp numbers them
enum devices { APPLE, REFUSES_SOURCE, FEW_THREADS, OTHER_LANES, LITTLE_MEMORY, N_DEVICES };

ggml_backend_reg_t g_reg;

// types are CUDA's
#define FUNCTION(name)                                                   \
    ((decltype(edgekv_cuda_##name) *) ggml_backend_reg_get_proc_address( \
        g_reg, "edgekv_metal_" #name))

// an array in the device's memory
template <typename T>
struct array {
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx {
        ggml_init({ ggml_tensor_overhead(), nullptr, true }), ggml_free
    };
    std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> buffer { nullptr,
        ggml_backend_buffer_free };
    ggml_tensor * t;
    T * data;
    size_t n;

    explicit array(size_t n)
        : t(ggml_new_tensor_1d(
              ctx.get(), GGML_TYPE_I8, (int64_t) std::max<size_t>(1, n * sizeof(T)))),
          n(n) {
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            ctx.get(), ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(g_reg, APPLE))));
        data = (T *) t->data;
    }
    explicit array(const std::vector<T> & x) : array(x.size()) {
        if (n) ggml_backend_tensor_set(t, x.data(), 0, n * sizeof(T));
    }
    std::vector<T> get() const {
        std::vector<T> x(n);
        if (n) ggml_backend_tensor_get(t, x.data(), 0, n * sizeof(T));
        return x;
    }
    T * or_null() { return n ? data : nullptr; }
};

void must(int error, const void * where, const char * what) {
    check(error == 0, "%s: error %d", what, error);
    check(FUNCTION(wait)(where) == 0, "%s did not finish", what);
}

// ---- score

void test_score(const inputs & in, const columns_reference & expected, int n_calls) {
    columns cols(in);
    array<char> k(in.k.bytes);
    array<int32_t> first(in.first), len(in.len), start(in.start);
    array<float> q(in.q), sinks(in.sinks), pos(in.pos), sum(cols.sum), max(cols.max),
        entropy(cols.entropy), mean(cols.mean), m2(cols.m2);
    edgekv_rows rows = in.rows;
    rows.k = k.data;
    rows.first = first.data;
    rows.len = len.data;
    rows.sinks = sinks.or_null();
    rows.pos = pos.or_null();
    edgekv_columns c = { sum.data, max.data, entropy.data, mean.data, m2.data, cols.c.n_rows, 0 };
    const int n_tokens = in.c.n_tokens, longest = *std::max_element(in.len.begin(), in.len.end());
    for (int call = 0; call < n_calls; ++call) {
        const int t0 = n_tokens * call / n_calls, n = n_tokens * (call + 1) / n_calls - t0;
        std::vector<int32_t> after_here;
        for (int t = t0; t < t0 + n; ++t) after_here.push_back(n_tokens - 1 - t);
        array<int32_t> after(after_here);
        const edgekv_queries qs = { q.data + t0 * in.qs.stride_t, in.qs.stride_t, in.qs.stride_h, n,
            n_calls > 1 ? after.data : nullptr, in.qs.start ? start.data + t0 : nullptr };
        c.n_seen = t0;
        array<char> workspace(FUNCTION(score_workspace)(&rows, n, longest));
        must(FUNCTION(score)(&rows, &qs, &c, longest, workspace.data, nullptr), workspace.data,
            "score");
    }
    cols.sum = sum.get();
    cols.max = max.get();
    cols.entropy = entropy.get();
    cols.mean = mean.get();
    cols.m2 = m2.get();
    compare_columns(n_calls > 1 ? "score, calls" : "score, one call", in, cols, expected, MAX_NMSE);
}

// what is not wanted
void test_score_of_sums_only(const inputs & in, const columns_reference & expected) {
    columns cols(in);
    array<char> k(in.k.bytes), workspace(FUNCTION(score_workspace)(&in.rows, in.c.n_tokens, 4096));
    array<int32_t> first(in.first), len(in.len);
    array<float> q(in.q), sum(cols.sum);
    edgekv_rows rows = in.rows;
    rows.k = k.data;
    rows.first = first.data;
    rows.len = len.data;
    const edgekv_queries qs = { q.data, in.qs.stride_t, in.qs.stride_h, in.c.n_tokens, nullptr,
        nullptr };
    const edgekv_columns c = { sum.data, nullptr, nullptr, nullptr, nullptr, cols.c.n_rows, 0 };
    must(FUNCTION(score)(&rows, &qs, &c, 4096, workspace.data, nullptr), workspace.data, "score");
    nmse e;
    const auto got = sum.get();
    for (size_t i = 0; i < got.size(); ++i)
        if (in.used[i]) e.add(got[i], expected.sum[i]);
    check(e.value() < MAX_NMSE, "score of sums only: NMSE %g", e.value());
}

// ---- evict: from a place on, to a place on; offsets that allow words of 16, 4 and 2 bytes

void test_evict(
    random_source & rnd, size_t n_bytes, int n_rows, int n_kept, bool named, int place) {
    const size_t start = place * (n_bytes + 2);
    std::vector<char> rows(start + n_rows * n_bytes), expected(start + n_kept * n_bytes + 16, 'x');
    for (char & x : rows) x = (char) rnd.below(256);
    std::vector<int32_t> index;
    array<char> from(rows), to(expected);
    for (int i = 0; i < n_kept; ++i) {
        index.push_back(named ? rnd.below(n_rows) : i);
        memcpy(&expected[start + i * n_bytes], &rows[start + index[i] * n_bytes], n_bytes);
    }
    array<int32_t> at(index);
    must(FUNCTION(gather)(from.data + start, to.data + start, n_bytes, named ? at.data : nullptr,
             n_kept, nullptr),
        to.data, "gather");
    check(to.get() == expected, "gather: %d of %d rows of %zu bytes from byte %zu on", n_kept,
        n_rows, n_bytes, start);
}

// what the device did not do is known when it was waited for, whatever was queued behind it, and
// the next thing goes well
void test_failure() {
    const std::vector<char> rows(64, 'a');
    array<char> from(rows), to(rows.size()), other(rows.size());
    for (int n_queued : { 1, 3 }) {
        fake_metal_fails(1);
        for (int i = 0; i < n_queued; ++i)
            check(FUNCTION(gather)(
                      from.data, i ? other.data : to.data, rows.size(), nullptr, 1, nullptr) == 0,
                "gather cannot be queued");
        check(FUNCTION(wait)(to.data) != 0, "the first of %d jobs failed, and nobody says so",
            n_queued);
    }
    must(FUNCTION(gather)(from.data, to.data, rows.size(), nullptr, 1, nullptr), to.data,
        "gather after a failure");
    check(to.get() == rows, "gather after a failure");
    int here;
    check(FUNCTION(gather)(from.data, other.data, rows.size(), nullptr, 1, nullptr) == 0 &&
            FUNCTION(gather)(from.data, (char *) &here, 1, nullptr, 1, nullptr) != 0 &&
            FUNCTION(wait)(to.data) == 0 && other.get() != rows,
        "what was queued before something that cannot be queued has run");
}

// ---- merge

void test_merge(const merge_case & c, random_source & rnd) {
    const merge_inputs in(c, rnd);
    array<char> rows(in.m.bytes);
    const edgekv_numbered view = { rows.data, in.m.nb, c.type, c.d };
    check(FUNCTION(merge_workspace)(&view, c.n_kept) == 0, "merge wants a workspace");
    array<int32_t> gone(in.gone), kept(in.kept), nearest(c.n_gone);
    array<float> cosine(c.n_gone);
    must(FUNCTION(merge_nearest)(&view, gone.data, c.n_gone, kept.data, c.n_kept, cosine.data,
             nearest.data, rows.data, nullptr),
        rows.data, "search");
    judge_nearest(c, in, cosine.get(), nearest.get(), MAX_COSINE_ERROR);
    const merge_shares s(c, in, rnd);
    array<int32_t> targets(s.rows), counts(s.counts), begin(s.begin);
    array<float> own(s.own), weights(s.weights);
    const edgekv_shares shares = { s.view.n, targets.data, own.data, counts.data, gone.data,
        weights.data };
    must(FUNCTION(merge_fold)(&view, &shares, begin.data, nullptr), rows.data, "fold");
    judge_fold(c, in, s, rows.get());
}

// ---- who has them

void test_names() {
    const auto ready = (int (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(
        g_reg, "edgekv_metal_ready");
    if (!check(ready, "no function says whether a device is ready")) return;
    for (int i = 0; i < N_DEVICES; ++i)
        check(ready(ggml_backend_reg_dev_get(g_reg, i)) == (i == APPLE ? 1 : -1),
            "device %d says the wrong thing", i);
    check(!ggml_backend_reg_get_proc_address(g_reg, "edgekv_cuda_score") &&
            !ggml_backend_reg_get_proc_address(g_reg, "edgekv_metal_"),
        "a function of another name");
    check(ggml_backend_reg_get_proc_address(g_reg, "ggml_backend_get_features"),
        "upstream's functions are gone");
    int here;
    check(FUNCTION(wait)(&here) != 0 &&
            FUNCTION(gather)((const char *) &here, (char *) &here, 2, nullptr, 1, nullptr) != 0,
        "memory that is not the device's is taken");
    for (ggml_type type : ON_METAL.types())
        for (int d : HEAD_SIZES)
            if (fits(type, d))
                check(FUNCTION(attend_supports)(type, type, d, d), "%s of %d values",
                    ggml_type_name(type), d);
    check(!FUNCTION(attend_supports)(GGML_TYPE_F16, GGML_TYPE_F32, 64, 64) &&
            !FUNCTION(attend_supports)(GGML_TYPE_F16, GGML_TYPE_F16, 64, 320),
        "what there is no kernel for");
}

} // namespace

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    printf("seed %u\n", seed);
    setenv("GGML_METAL_DEVICES", std::to_string(N_DEVICES).c_str(), 1);
    g_reg = ggml_backend_metal_reg();
    random_source rnd(seed);
    test_names();
    test_failure();
    for (size_t n_bytes : { 36, 54, 68, 80, 128, 136 })
        for (int n_kept : { 0, 1, 17, 90 })
            for (int place : { 0, 1, 8 })
                for (bool named : { false, true }) {
                    test_evict(rnd, n_bytes, 100, n_kept, named, place);
                }
    for (const auto & c : merge_cases(rnd, n_random, ON_METAL)) test_merge(c, rnd);
    each_case(rnd, n_random, asks_few(argc, argv), ON_METAL, [&](const test_case & c) {
        standin::backwards = !standin::backwards;
        const inputs in(c, rnd);
        const columns_reference expected(in, attend_reference(in));
        test_score(in, expected, 1);
        if (c.n_tokens > 2) test_score(in, expected, 3);
        if (!c.window && !c.sinks && !c.alibi) test_score_of_sums_only(in, expected);
    });
    print_table();
    return finish();
}
