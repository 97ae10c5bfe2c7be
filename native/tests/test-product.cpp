// Products of quantised weights with many tokens, from every form in which the CPU backend keeps
// weights, against plain loops in double precision
#include "check.h"
#include "modes.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-cpu.h"
#include "repack.h"

#include <array>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// operands have 8 bits where pairs of bf16 are multiplied; measured worst 5.8e-6
constexpr double MAX_NMSE = 1e-5;
// of tokens that bf16 holds: a weight is rounded by at most 2^-8 of itself, which q2_K comes near
constexpr double MAX_NMSE_WEIGHTS = 1.0 / (1 << 16);
// in 8 bits nothing of a weight is rounded, but sums in f32 (q5_K 4.1e-12), and tokens are, block
// by block
constexpr double MAX_NMSE_LEVELS = 1e-11, MAX_NMSE_TOKENS = 1e-4;

using work = std::vector<uint32_t>;

// whether it was multiplied in 8 bits
bool run(ggml_tensor * node, work & words, int nth, bool has_words = false,
    uint32_t * unpacked = nullptr, bool is_unpacked = false) {
    edgekv_product_job job = { words.data(), has_words, unpacked, is_unpacked, { 0 }, { 0 }, 0,
        false };
    std::vector<std::thread> threads;
    for (int ith = 0; ith < nth; ++ith)
        threads.emplace_back([&, ith] { edgekv_cpu_product(node, ith, nth, &job); });
    for (auto & t : threads) t.join();
    return job.levels;
}

// w as it is in rows of a type, and these
std::vector<char> quantised(ggml_type type, std::vector<float> & w, int n_in) {
    const auto n_rows = (int64_t) w.size() / n_in;
    std::vector<char> rows(n_rows * ggml_row_size(type, n_in));
    const std::vector<float> weights(n_in, 1.0f);
    ggml_quantize_chunk(type, w.data(), rows.data(), 0, n_rows, n_in, weights.data());
    ggml_get_type_traits(type)->to_float(rows.data(), w.data(), (int64_t) w.size());
    return rows;
}

// a weight that stays unpacked gives the same sums, when it is unpacked and later; so do tokens
// that another product has made words of
void test_kept(ggml_tensor * node, work & words, int nth) {
    auto * got = (float *) node->data;
    const std::vector<float> expected(got, got + ggml_nelements(node));
    const ggml_tensor * weight = node->src[0];
    std::vector<uint32_t> unpacked(edgekv_cpu_product_unpacked(weight, ggml_nrows(node)));
    const bool is_fast = edgekv_cpu_product_min_repacked(weight->type) != INT64_MAX;
    check(
        !is_fast || !unpacked.empty(), "%s: does not stay unpacked", ggml_type_name(weight->type));
    for (bool is_unpacked : { false, true }) {
        if (unpacked.empty()) break;
        std::fill_n(got, expected.size(), NAN);
        run(node, words, nth, false, unpacked.data(), is_unpacked);
        check(!memcmp(got, expected.data(), ggml_nbytes(node)), "%s, %d threads: %s differs",
            ggml_type_name(weight->type), nth, is_unpacked ? "an unpacked weight" : "unpacking");
    }
    std::fill_n(got, expected.size(), NAN);
    run(node, words, nth, true);
    check(!memcmp(got, expected.data(), ggml_nbytes(node)), "%s, %d threads: another's words",
        ggml_type_name(weight->type), nth);
}

// whole: tokens that 8 bits hold, with which any rounding of weights would show
void test(ggml_type type, ggml_backend_buffer_type_t buft, int n_in, int n_rows, int n_tokens,
    bool whole) {
    random_source rnd(3);
    std::vector<float> w((size_t) n_rows * n_in), x((size_t) n_tokens * n_in);
    for (auto * all : { &w, &x })
        for (float & value : *all) value = rnd.normal();
    for (size_t i = 0; whole && i < x.size(); ++i)
        x[i] = (float) (i % 32 < 2 ? i % 2 * 254 - 127 : rnd.range(-127, 127));
    const std::vector<char> rows = quantised(type, w, n_in);

    const ggml_init_params params = { 8 * ggml_tensor_overhead(), nullptr, true };
    ggml_context *of_weight = ggml_init(params), *ctx = ggml_init(params);
    ggml_tensor * weight = ggml_new_tensor_2d(of_weight, type, n_in, n_rows);
    ggml_tensor * tokens = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, n_tokens);
    ggml_tensor * node = ggml_mul_mat(ctx, weight, tokens);
    auto * here = ggml_backend_alloc_ctx_tensors_from_buft(of_weight, buft);
    auto * there = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    const bool repacked = buft == ggml_backend_cpu_repack_buffer_type();
    if (!repacked || weight->extra) {
        ggml_backend_tensor_set(weight, rows.data(), 0, rows.size());
        memcpy(tokens->data, x.data(), x.size() * sizeof(float));
        const size_t n_words = edgekv_cpu_product_words(node);
        // repacked weights are left to llama.cpp where its products are faster
        const bool taken = !repacked || n_tokens >= edgekv_cpu_product_min_repacked(type);
        const bool known = !repacked || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_K;
        check(!known || (n_words > 0) == taken, "%d tokens of %s in %s: %s", n_tokens,
            ggml_type_name(type), ggml_backend_buft_name(buft), taken ? "not taken" : "taken");
        const auto * got = (const float *) node->data;
        for (int nth = 1; n_words && nth <= 3; nth += 2) {
            work words(n_words);
            const bool levels = run(node, words, nth);
            nmse error;
            for (int t = 0; t < n_tokens; ++t)
                for (int r = 0; r < n_rows; ++r) {
                    double sum = 0;
                    for (int i = 0; i < n_in; ++i)
                        sum += (double) w[(size_t) r * n_in + i] * x[(size_t) t * n_in + i];
                    error.add(got[(size_t) t * n_rows + r], sum);
                }
            const double most = whole ? (levels ? MAX_NMSE_LEVELS : MAX_NMSE_WEIGHTS)
                                      : (levels ? MAX_NMSE_TOKENS : MAX_NMSE);
            check(error.value() < most, "%s in %s, %d threads: NMSE %g", ggml_type_name(type),
                ggml_backend_buft_name(buft), nth, error.value());
            test_kept(node, words, nth);
        }
    }
    for (auto * buffer : { here, there }) ggml_backend_buffer_free(buffer);
    for (auto * c : { of_weight, ctx }) ggml_free(c);
}

#if defined(__GNUC__)
const bool HAS_FEW = ggml_cpu_has_avx2() && ggml_cpu_has_fma() && ggml_cpu_has_f16c();
#else
constexpr bool HAS_FEW = false;
#endif

// whether a few tokens of a type have a kernel wherever its rows are as in the file
bool has_few(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS: return HAS_FEW;
        default: return false;
    }
}

// A few tokens: what each gets, and that it does not depend on how many others there are
void test_few(ggml_type type, ggml_backend_buffer_type_t buft, int n_in, int n_rows) {
    constexpr int MOST = EDGEKV_ALIKE_MAX;
    random_source rnd(7);
    std::vector<float> w((size_t) n_rows * n_in), x((size_t) MOST * n_in);
    for (auto * all : { &w, &x })
        for (float & value : *all) value = rnd.normal();
    std::fill_n(x.begin() + n_in, n_in, 0.0f); // a token of nothing
    const ggml_init_params params = { 40 * ggml_tensor_overhead(), nullptr, true };
    ggml_context *of_weight = ggml_init(params), *ctx = ggml_init(params);
    ggml_tensor * weight = ggml_new_tensor_2d(of_weight, type, n_in, n_rows);
    ggml_tensor * tokens = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, MOST);
    std::vector<ggml_tensor *> nodes; // of the first 1, 2, ... tokens
    for (int n = 1; n <= MOST; ++n)
        nodes.push_back(
            ggml_mul_mat(ctx, weight, ggml_view_2d(ctx, tokens, n_in, n, tokens->nb[1], 0)));
    auto * here = ggml_backend_alloc_ctx_tensors_from_buft(of_weight, buft);
    auto * there = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    const bool is_there = buft != ggml_backend_cpu_repack_buffer_type() || weight->extra;
    if (buft == ggml_backend_cpu_buffer_type())
        check((edgekv_cpu_product_words(nodes[0]) > 0) == (has_few(type) && n_rows >= 8),
            "a token of %s, %d rows: %s", ggml_type_name(type), n_rows,
            has_few(type) ? "not taken" : "taken");
    if (is_there && edgekv_cpu_product_words(nodes.back()) > 0) {
        const std::vector<char> rows = quantised(type, w, n_in);
        ggml_backend_tensor_set(weight, rows.data(), 0, rows.size());
        memcpy(tokens->data, x.data(), x.size() * sizeof(float));
        const auto * alone = (const float *) nodes.back()->data; // each token's, among all others
        for (int n = MOST; n > 0; --n) {
            ggml_tensor * node = nodes[n - 1];
            const size_t n_words = edgekv_cpu_product_words(node);
            if (n_words == 0) break;
            for (int nth = 1; nth <= 3; nth += 2) {
                work words(n_words);
                std::fill_n((float *) node->data, ggml_nelements(node), NAN);
                run(node, words, nth);
                nmse error;
                for (int t = 0; t < n; ++t)
                    for (int r = 0; r < n_rows; ++r) {
                        double sum = 0;
                        for (int i = 0; i < n_in; ++i)
                            sum += (double) w[(size_t) r * n_in + i] * x[(size_t) t * n_in + i];
                        error.add(((const float *) node->data)[(size_t) t * n_rows + r], sum);
                    }
                check(error.value() < MAX_NMSE_TOKENS, "%d tokens of %s in %s: NMSE %g", n,
                    ggml_type_name(type), ggml_backend_buft_name(buft), error.value());
            }
            const bool alike = !memcmp(node->data, alone, ggml_nbytes(node));
            check(alike || edgekv_cpu_product_words(nodes[0]) == 0,
                "%s in %s: a token of %d has other results", ggml_type_name(type),
                ggml_backend_buft_name(buft), n);
        }
    }
    for (auto * buffer : { here, there }) ggml_backend_buffer_free(buffer);
    for (auto * c : { of_weight, ctx }) ggml_free(c);
}

// each token meets the weights of the experts that it chose, experts that nobody chose among them
void test_experts(ggml_type type, ggml_backend_buffer_type_t buft, bool each_its_own) {
    constexpr int n_in = 256, n_rows = 40, n_expert = 5, n_used = 3, n_tokens = 70, n = 210;
    random_source rnd(5);
    std::vector<float> w(n_expert * n_rows * n_in), x((each_its_own ? n : n_tokens) * n_in);
    for (auto * all : { &w, &x })
        for (float & value : *all) value = rnd.normal();
    const std::vector<char> rows = quantised(type, w, n_in);

    const ggml_init_params params = { 8 * ggml_tensor_overhead(), nullptr, true };
    ggml_context *of_weight = ggml_init(params), *ctx = ggml_init(params);
    ggml_tensor * weight = ggml_new_tensor_3d(of_weight, type, n_in, n_rows, n_expert);
    ggml_tensor * tokens =
        ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, each_its_own ? n_used : 1, n_tokens);
    // the first of a sorted list of all experts, as in a model
    ggml_tensor * sorted = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_expert, n_tokens);
    ggml_tensor * chosen = ggml_view_2d(ctx, sorted, n_used, n_tokens, sorted->nb[1], 0);
    ggml_tensor * node = ggml_mul_mat_id(ctx, weight, tokens, chosen);
    auto * here = ggml_backend_alloc_ctx_tensors_from_buft(of_weight, buft);
    auto * there = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    const bool repacked = buft == ggml_backend_cpu_repack_buffer_type();
    if (!repacked || weight->extra) {
        ggml_backend_tensor_set(weight, rows.data(), 0, rows.size());
        memcpy(tokens->data, x.data(), x.size() * sizeof(float));
        auto * ids = (int32_t *) sorted->data;
        for (int t = 0; t < n_tokens; ++t)
            for (int j = 0; j < n_expert; ++j) // everybody has expert 4, nobody 1
                ids[t * n_expert + j] = std::array { 4, t % 3 ? 0 : 3, 2, 1, 0 }[j];
        const size_t n_words = edgekv_cpu_product_words(node);
        // f32, which does not stay unpacked, is too slow
        const ggml_tensor * one = ggml_view_2d(ctx, weight, n_in, n_rows, weight->nb[1], 0);
        const bool is_f32 = edgekv_cpu_product_unpacked(one, n_tokens) == 0;
        check(repacked || (n_words > 0) == !is_f32, "%s: experts are %s", ggml_type_name(type),
            n_words ? "taken" : "not taken");
        for (int nth = 1; n_words && nth <= 3; nth += 2) {
            std::fill_n((float *) node->data, n * n_rows, NAN);
            work words(n_words);
            const bool levels = run(node, words, nth);
            nmse error;
            for (int i = 0; i < n; ++i)
                for (int r = 0; r < n_rows; ++r) {
                    const int e = ids[i / n_used * n_expert + i % n_used];
                    double sum = 0;
                    for (int k = 0; k < n_in; ++k)
                        sum += (double) w[(e * n_rows + r) * n_in + k] *
                            x[(each_its_own ? i : i / n_used) * n_in + k];
                    error.add(((const float *) node->data)[i * n_rows + r], sum);
                }
            check(error.value() < (levels ? MAX_NMSE_TOKENS : MAX_NMSE),
                "experts of %s in %s, %d threads: NMSE %g", ggml_type_name(type),
                ggml_backend_buft_name(buft), nth, error.value());
        }
    }
    for (auto * buffer : { here, there }) ggml_backend_buffer_free(buffer);
    for (auto * c : { of_weight, ctx }) ggml_free(c);
}

} // namespace

int main(int argc, char ** argv) {
    ggml_cpu_init();
    if (asked(argc, argv, "--perf")) return perf(argc, argv);
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = (ggml_type) i;
        const auto * traits = ggml_get_type_traits(type);
        if (!ggml_is_quantized(type) || !traits->to_float || !traits->from_float_ref) continue;
        for (auto * buft :
            { ggml_backend_cpu_buffer_type(), ggml_backend_cpu_repack_buffer_type() }) {
            for (int n_tokens : { 70, 200 })
                for (bool whole : { true, false }) test(type, buft, 512, 40, n_tokens, whole);
            for (int n_in : { 64, 512, 768 })
                if (n_in % ggml_blck_size(type) == 0)
                    for (int n_rows : { 40, 37, 7 }) test_few(type, buft, n_in, n_rows);
            test_few(type, buft, 33 * 1024, 8);
            for (bool each_its_own : { false, true }) test_experts(type, buft, each_its_own);
        }
    }
    return finish();
}
