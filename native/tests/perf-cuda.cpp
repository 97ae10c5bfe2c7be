// Times of the CUDA kernels for one layer of Llama-3-8B's shape, beside the card's own speed of
// copying. One line of a table each.
//     test-cuda --perf [rows per head]
#include "device.h"
#include "modes.h"
#include "cuda/edgekv-cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>

namespace {

constexpr int N_HEAD = 32, N_HEAD_KV = 8, D = 128, N_WINDOW = 32;
constexpr int N_RUNS = 12; // of which the median counts
#ifdef EDGEKV_STANDIN
constexpr int N_QUEUED = 1;
constexpr double WARM_UP = 0;
#else
constexpr int N_QUEUED = 20;    // calls of one graph
constexpr double WARM_UP = 0.3; // seconds: a card that has nothing to do lowers its clock
#endif

// So many calls as one graph, which is how llama.cpp's runs them too: launching each takes the host
// as long as a short kernel runs
struct recorded {
    cudaStream_t stream;
#ifdef EDGEKV_STANDIN
    std::function<void()> again;
    template <typename F>
    recorded(F && f, int n)
        : stream(nullptr), again([=] {
              for (int i = 0; i < n; ++i) f(i, nullptr);
          }) {}
    void launch() { again(); }
#else
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    template <typename F>
    recorded(F && f, int n) {
        must(
            cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        must(cudaDeviceSynchronize(), "what came before");
        must(
            cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
        for (int i = 0; i < n; ++i) f(i, stream);
        must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        must(cudaGraphInstantiateWithFlags(&ready, graph, 0), "cudaGraphInstantiateWithFlags");
    }
    ~recorded() {
        cudaGraphExecDestroy(ready);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
    }
    recorded(const recorded &) = delete;
    void launch() { must(cudaGraphLaunch(ready, stream), "cudaGraphLaunch"); }
#endif
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// milliseconds of what f(i, stream) queues, n_queued times in a row
template <typename F>
double time_of(F && f, int n_queued = N_QUEUED) {
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    recorded calls(f, n_queued);
    const double start = seconds();
    for (int i = 0; i < 2 || seconds() - start < WARM_UP; ++i) {
        calls.launch();
        must(cudaEventRecord(end, calls.stream), "cudaEventRecord");
        must(cudaEventSynchronize(end), "a kernel");
    }
    std::vector<double> ms;
    for (int i = 0; i < N_RUNS; ++i) {
        must(cudaEventRecord(begin, calls.stream), "cudaEventRecord");
        calls.launch();
        must(cudaEventRecord(end, calls.stream), "cudaEventRecord");
        must(cudaEventSynchronize(end), "a kernel");
        float x = 0;
        must(cudaEventElapsedTime(&x, begin, end), "cudaEventElapsedTime");
        ms.push_back(x / n_queued);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

// GB/s, bytes read and written
double copy_speed(size_t n) {
    device_array<char> from(n), to(n);
    const double ms = time_of([&](int, void * stream) {
        must(
            cudaMemcpyAsync(to.data, from.data, n, cudaMemcpyDeviceToDevice, (cudaStream_t) stream),
            "cudaMemcpyAsync");
    });
    return 2 * n / ms / 1e6;
}

// places that calls take in turn, so that what one touches is in no cache any more when its turn
// comes again
int n_places(size_t n_bytes_touched) {
    int n_bytes = 0, device = 0;
    must(cudaGetDevice(&device), "cudaGetDevice");
    must(
        cudaDeviceGetAttribute(&n_bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
    return (int) std::min<size_t>(std::max<size_t>(8 * (size_t) n_bytes / n_bytes_touched + 1, 3),
        N_QUEUED > 3 ? N_QUEUED : 3);
}

// rows of random numbers, the same thousand over and over
std::vector<char> some_rows(ggml_type type, size_t n) {
    random_source rnd(1);
    const size_t n_drawn = std::min<size_t>(n, 1000), nb = ggml_row_size(type, D);
    std::vector<float> x(n_drawn * D);
    for (float & y : x) y = rnd.normal();
    std::vector<char> rows(n * nb);
    ggml_quantize_chunk(type, x.data(), rows.data(), 0, n_drawn, D, nullptr);
    for (size_t i = n_drawn * nb; i < rows.size(); ++i) rows[i] = rows[i - n_drawn * nb];
    return rows;
}

// K and V of one layer, several times
struct layer {
    size_t nb;
    std::vector<int32_t> first, len;
    device_array<int32_t> d_first, d_len;
    std::vector<device_array<char> *> kv;
    device_array<float> q;
    edgekv_rows rows;

    // touched: of all bytes the share that a call reads
    layer(ggml_type type, const std::vector<int32_t> & lengths, int n_tokens, double touched = 1)
        : nb(ggml_row_size(type, D)), first(starts(lengths)), len(lengths), d_first(first),
          d_len(len), q((size_t) n_tokens * N_HEAD * D) {
        const std::vector<char> drawn = some_rows(type, n_rows());
        for (int i = 0, n = 2 * n_places((size_t) (touched * n_bytes())); i < n; ++i) {
            kv.push_back(new device_array<char>(n_bytes() / 2));
            if (i == 0) kv[0]->put(drawn);
            else
                must(cudaMemcpy(kv[i]->data, kv[0]->data, n_bytes() / 2, cudaMemcpyDeviceToDevice),
                    "cudaMemcpy");
        }
        random_source rnd(2);
        std::vector<float> queries(q.n);
        for (float & x : queries) x = rnd.normal();
        q.put(queries);
        rows = { nullptr, nullptr, nb, nb, type, type, D, D, N_HEAD, N_HEAD_KV, d_first.data,
            d_len.data, 0.1f, 0, nullptr };
    }
    ~layer() {
        for (auto * x : kv) delete x;
    }

    static std::vector<int32_t> starts(const std::vector<int32_t> & lengths) {
        std::vector<int32_t> x(1, 0);
        for (int32_t n : lengths) x.push_back(x.back() + n);
        x.pop_back();
        return x;
    }
    size_t n_rows() const { return (size_t) first.back() + len.back(); }
    size_t n_bytes() const { return 2 * n_rows() * nb; }
    edgekv_rows copy(int i) const {
        edgekv_rows r = rows;
        r.k = k(i);
        r.v = v(i);
        return r;
    }
    char * k(int i) const { return kv[2 * i % kv.size()]->data; }
    char * v(int i) const { return kv[(2 * i + 1) % kv.size()]->data; }
};

double time_attend(const layer & l, int n_tokens) {
    const int n_blocks = (n_tokens * N_HEAD / N_HEAD_KV + 15) / 16,
              n_parts = std::max(1, edgekv_cuda_attend_parts(&l.rows) / n_blocks);
    device_array<char> workspace(edgekv_cuda_attend_workspace(&l.rows, n_tokens, n_parts));
    device_array<float> dst((size_t) n_tokens * N_HEAD * D);
    const edgekv_queries qs = { l.q.data, N_HEAD * D, D, n_tokens, nullptr, nullptr };
    return time_of([&](int i, void * stream) {
        const edgekv_rows r = l.copy(i);
        must(edgekv_cuda_attend(&r, &qs, dst.data, n_parts, workspace.data, stream), "attend");
    });
}

void bench_attend(int n_rows, double copy) {
    printf("| attend | tokens | ms | GB/s | of the copy's speed |\n|---|---|---|---|---|\n");
    const std::vector<int32_t> even(N_HEAD_KV, n_rows);
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,
             GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL }) {
        for (int n_tokens : { 1, 4, 8 }) {
            const layer l(type, even, n_tokens);
            const double ms = time_attend(l, n_tokens), speed = l.n_bytes() / ms / 1e6;
            printf("| %s | %d | %.3f | %.0f | %.2f |\n", ggml_type_name(type), n_tokens, ms, speed,
                speed / copy);
        }
    }
    printf(
        "\n| ragged heads, the same rows in all | ms even | ms ragged | ratio |\n|---|---|---|---|\n");
    std::vector<int32_t> ragged(N_HEAD_KV, n_rows / 4);
    ragged[3] = n_rows * N_HEAD_KV - (N_HEAD_KV - 1) * (n_rows / 4); // most of them in one head
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        const double a = time_attend(layer(type, even, 1), 1),
                     b = time_attend(layer(type, ragged, 1), 1);
        printf("| %s | %.3f | %.3f | %.2f |\n", ggml_type_name(type), a, b, b / a);
    }
}

void bench_score(int n_rows) {
    printf("\n| one layer of a prompt | ms | |\n|---|---|---|\n");
    const layer l(GGML_TYPE_F16, std::vector<int32_t>(N_HEAD_KV, n_rows), N_WINDOW);
    const size_t n = l.n_rows(), G = N_HEAD / N_HEAD_KV;
    device_array<float> sums(3 * n + 2 * G * n);
    must(cudaMemset(sums.data, 0, sums.n * sizeof(float)), "cudaMemset");
    const edgekv_queries qs = { l.q.data, N_HEAD * D, D, N_WINDOW, nullptr, nullptr };
    device_array<char> workspace(edgekv_cuda_score_workspace(&l.rows, N_WINDOW, n_rows));
    for (bool variance : { false, true }) {
        edgekv_columns c = { sums.data, sums.data + n, sums.data + 2 * n, nullptr, nullptr,
            (int64_t) n, 0 };
        if (variance) {
            c.mean = sums.data + 3 * n;
            c.m2 = c.mean + G * n;
        }
        const double ms = time_of([&](int i, void * stream) {
            const edgekv_rows r = l.copy(i);
            must(edgekv_cuda_score(&r, &qs, &c, n_rows, workspace.data, stream), "score");
        });
        printf(
            "| score, %d queries, f16%s | %.3f | |\n", N_WINDOW, variance ? ", variance" : "", ms);
    }
}

void bench_evict(int n_rows, double copy) {
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        const layer l(type, std::vector<int32_t>(N_HEAD_KV, n_rows), 1, 0.1);
        std::vector<int32_t> kept;
        for (int32_t i = 0; i < (int32_t) l.n_rows(); ++i)
            if ((i * 2654435761u >> 16) % 5 == 0) kept.push_back(i);
        const device_array<int32_t> index(kept);
        std::vector<std::unique_ptr<device_array<char>>> to;
        for (size_t i = 0; i < l.kv.size() / 2; ++i)
            to.push_back(std::make_unique<device_array<char>>(kept.size() * l.nb));
        const double ms = time_of([&](int i, void * stream) {
            must(edgekv_cuda_gather(
                     l.k(i), to[i % to.size()]->data, l.nb, index.data, (int) kept.size(), stream),
                "gather");
        });
        printf("| evict, K, a fifth of the rows, %s | %.3f | %.2f of the copy's speed |\n",
            ggml_type_name(type), ms, 2 * kept.size() * l.nb / ms / 1e6 / copy);
    }
}

// all heads, as the engine asks: one after another
void bench_predict(int n_rows, double copy) {
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        const layer l(type, std::vector<int32_t>(N_HEAD_KV, n_rows), 1);
        const device_array<float> weights(std::vector<float>(D + D / 2 + 4, 0.1f));
        const edgekv_map map = { weights.data, false, 0, 0 };
        device_array<float> out(n_rows), unlike(n_rows);
        auto head = [&](char * base, int k) {
            return edgekv_numbered { base + l.first[k] * l.nb, l.nb, type, D };
        };
        const edgekv_numbered any = head(l.k(0), 0);
        device_array<char> workspace(edgekv_cuda_predict_workspace(&any, n_rows));
        const double ms = time_of([&](int i, void * stream) {
            for (int k = 0; k < N_HEAD_KV; ++k) {
                const edgekv_numbered keys = head(l.k(i), k), values = head(l.v(i), k);
                must(edgekv_cuda_predict(&keys, &values, &map, n_rows, out.data, unlike.data,
                         workspace.data, stream),
                    "predict");
            }
        });
        printf(
            "| predict, %s | %.3f | %.2f of the copy's speed; keys, which it reads twice, counted once |\n",
            ggml_type_name(type), ms, l.n_bytes() / ms / 1e6 / copy);
    }
}

// a fifth of each head's rows stays and receives the four that follow
void bench_merge(int n_rows) {
    const layer l(GGML_TYPE_F16, std::vector<int32_t>(N_HEAD_KV, n_rows), 1);
    const int n_kept = n_rows / 5, n_gone = 4 * n_kept;
    std::vector<int32_t> kept, gone, begin;
    for (int32_t i = 0; i < 5 * n_kept; ++i) (i % 5 ? gone : kept).push_back(i);
    for (int32_t i = 0; i < n_kept; ++i) begin.push_back(4 * i);
    const device_array<int32_t> d_kept(kept), d_gone(gone), d_begin(begin),
        counts(std::vector<int32_t>(n_kept, 4));
    const device_array<float> own(std::vector<float>(n_kept, 0.2f)),
        weights(std::vector<float>(n_gone, 0.2f));
    device_array<float> cosine(n_gone);
    device_array<int32_t> nearest(n_gone);
    auto head = [&](int i, int k) {
        return edgekv_numbered { l.k(i) + l.first[k] * l.nb, l.nb, GGML_TYPE_F16, D };
    };
    const edgekv_numbered any = head(0, 0);
    device_array<char> workspace(edgekv_cuda_merge_workspace(&any, n_kept));
    const double search = time_of(
        [&](int i, void * stream) {
            for (int k = 0; k < N_HEAD_KV; ++k) {
                const edgekv_numbered keys = head(i, k);
                must(edgekv_cuda_merge_nearest(&keys, d_gone.data, n_gone, d_kept.data, n_kept,
                         cosine.data, nearest.data, workspace.data, stream),
                    "nearest");
            }
        },
        1); // long enough
    const edgekv_shares shares = { n_kept, d_kept.data, own.data, counts.data, d_gone.data,
        weights.data };
    const double fold = time_of([&](int i, void * stream) {
        for (int k = 0; k < N_HEAD_KV; ++k) {
            const edgekv_numbered to = head(i, k);
            must(edgekv_cuda_merge_fold(&to, &shares, d_begin.data, stream), "fold");
        }
    });
    printf("| merge, search: four fifths of the rows into one, f16 | %.3f | %.1f TFLOP/s |\n",
        search, 2.0 * D * n_gone * n_kept * N_HEAD_KV / search / 1e9);
    printf("| merge, fold of K: the same | %.3f | |\n", fold);
}

} // namespace

int perf(int argc, char ** argv) {
    const int n_rows = argc > 1 ? atoi(argv[1]) : 32768;
    if (n_rows < 64) {
        printf("give a number of rows per head, 64 or more\n");
        return 2;
    }
    const double copy = copy_speed((size_t) n_rows * 32768);
    printf(
        "%d query heads, %d KV heads of %d, %d rows each; copying: %.0f GB/s (read and written)\n\n",
        N_HEAD, N_HEAD_KV, D, n_rows, copy);
    bench_attend(n_rows, copy);
    bench_score(n_rows);
    bench_evict(n_rows, copy);
    bench_predict(n_rows, copy);
    bench_merge(n_rows);
    printf("\ncopying, once more: %.0f GB/s\n", copy_speed((size_t) n_rows * 32768));
    return 0;
}
