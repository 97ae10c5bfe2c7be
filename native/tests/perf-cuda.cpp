// Times of the CUDA kernels for one layer of Llama-3-8B's shape, beside the card's own speed of copying. One line of a table each.
//     test-cuda --perf [rows per head]
#include "device.h"
#include "modes.h"
#include "cuda/edgekv-cuda.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace {

constexpr int N_HEAD = 32, N_HEAD_KV = 8, D = 128, N_WINDOW = 32;
constexpr int N_COPIES = 3;  // of K and V, taken in turn: together larger than any cache
constexpr int N_RUNS = 12;   // of which the median counts
#ifdef EDGEKV_STANDIN
constexpr int N_QUEUED = 1;
#else
constexpr int N_QUEUED = 20; // calls between two events: launching takes the host as long as a short kernel runs, and the device waits for the first only
#endif

// milliseconds of what f(i) queues, n_queued times in a row
template <typename F> double time_of(F && f, int n_queued = N_QUEUED) {
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<double> ms;
    for (int i = 0; i < N_RUNS + 2; ++i) {
        must(cudaEventRecord(begin, nullptr), "cudaEventRecord");
        for (int j = 0; j < n_queued; ++j) f(i*n_queued + j);
        must(cudaEventRecord(end, nullptr), "cudaEventRecord");
        must(cudaEventSynchronize(end), "a kernel");
        float x = 0;
        must(cudaEventElapsedTime(&x, begin, end), "cudaEventElapsedTime");
        if (i >= 2) ms.push_back(x/n_queued); // the first two warm up
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size()/2];
}

// GB/s, bytes read and written
double copy_speed(size_t n) {
    device_array<char> from(n), to(n);
    const double ms = time_of([&](int) { must(cudaMemcpyAsync(to.data, from.data, n, cudaMemcpyDeviceToDevice, nullptr), "cudaMemcpyAsync"); });
    return 2*n/ms/1e6;
}

// K and V of one layer with every byte the same: speed does not depend on values, but halves must be numbers
struct layer {
    size_t nb;
    std::vector<int32_t> first, len;
    device_array<int32_t> d_first, d_len;
    std::vector<device_array<char> *> kv;
    device_array<float> q;
    edgekv_rows rows;

    layer(ggml_type type, const std::vector<int32_t> & lengths, int n_tokens) :
        nb(ggml_row_size(type, D)), first(starts(lengths)), len(lengths), d_first(first), d_len(len), q((size_t) n_tokens*N_HEAD*D) {
        for (int i = 0; i < 2*N_COPIES; ++i) {
            kv.push_back(new device_array<char>(n_bytes()/2));
            must(cudaMemset(kv.back()->data, 0x11, n_bytes()/2), "cudaMemset");
        }
        must(cudaMemset(q.data, 0, q.n*sizeof(float)), "cudaMemset");
        rows = { nullptr, nullptr, nb, nb, type, type, D, D, N_HEAD, N_HEAD_KV, d_first.data, d_len.data, 0.1f, 0, nullptr };
    }
    ~layer() { for (auto * x : kv) delete x; }

    static std::vector<int32_t> starts(const std::vector<int32_t> & lengths) {
        std::vector<int32_t> x(1, 0);
        for (int32_t n : lengths) x.push_back(x.back() + n);
        x.pop_back();
        return x;
    }
    size_t n_rows() const { return (size_t) first.back() + len.back(); }
    size_t n_bytes() const { return 2*n_rows()*nb; }
    edgekv_rows copy(int i) const {
        edgekv_rows r = rows;
        r.k = kv[i % N_COPIES*2]->data;
        r.v = kv[i % N_COPIES*2 + 1]->data;
        return r;
    }
};

double time_attend(const layer & l, int n_tokens) {
    const int n_blocks = (n_tokens*N_HEAD/N_HEAD_KV + 15)/16, n_parts = std::max(1, edgekv_cuda_attend_parts(&l.rows)/n_blocks);
    device_array<char> workspace(edgekv_cuda_attend_workspace(&l.rows, n_tokens, n_parts));
    device_array<float> dst((size_t) n_tokens*N_HEAD*D);
    const edgekv_queries qs = { l.q.data, N_HEAD*D, D, n_tokens, nullptr, nullptr };
    return time_of([&](int i) {
        const edgekv_rows r = l.copy(i);
        must(edgekv_cuda_attend(&r, &qs, dst.data, n_parts, workspace.data, nullptr), "attend");
    });
}

void bench_attend(int n_rows, double copy) {
    printf("| attend | tokens | ms | GB/s | of the copy's speed |\n|---|---|---|---|---|\n");
    const std::vector<int32_t> even(N_HEAD_KV, n_rows);
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL }) {
        for (int n_tokens : { 1, 4, 8 }) {
            const layer l(type, even, n_tokens);
            const double ms = time_attend(l, n_tokens), speed = l.n_bytes()/ms/1e6;
            printf("| %s | %d | %.3f | %.0f | %.2f |\n", ggml_type_name(type), n_tokens, ms, speed, speed/copy);
        }
    }
    printf("\n| ragged heads, the same rows in all | ms even | ms ragged | ratio |\n|---|---|---|---|\n");
    std::vector<int32_t> ragged(N_HEAD_KV, n_rows/4);
    ragged[3] = n_rows*N_HEAD_KV - (N_HEAD_KV - 1)*(n_rows/4); // most of them in one head
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        const double a = time_attend(layer(type, even, 1), 1), b = time_attend(layer(type, ragged, 1), 1);
        printf("| %s | %.3f | %.3f | %.2f |\n", ggml_type_name(type), a, b, b/a);
    }
}

void bench_score(int n_rows, double copy) {
    printf("\n| one layer of a prompt | ms | |\n|---|---|---|\n");
    const layer l(GGML_TYPE_F16, std::vector<int32_t>(N_HEAD_KV, n_rows), N_WINDOW);
    const size_t n = l.n_rows(), G = N_HEAD/N_HEAD_KV;
    device_array<float> sums(3*n + 2*G*n);
    must(cudaMemset(sums.data, 0, sums.n*sizeof(float)), "cudaMemset");
    const edgekv_queries qs = { l.q.data, N_HEAD*D, D, N_WINDOW, nullptr, nullptr };
    device_array<char> workspace(edgekv_cuda_score_workspace(&l.rows, N_WINDOW, n_rows));
    for (bool variance : { false, true }) {
        edgekv_columns c = { sums.data, sums.data + n, sums.data + 2*n, nullptr, nullptr, (int64_t) n, 0 };
        if (variance) { c.mean = sums.data + 3*n; c.m2 = c.mean + G*n; }
        const double ms = time_of([&](int i) {
            const edgekv_rows r = l.copy(i);
            must(edgekv_cuda_score(&r, &qs, &c, n_rows, workspace.data, nullptr), "score");
        });
        printf("| score, %d queries, f16%s | %.3f | |\n", N_WINDOW, variance ? ", variance" : "", ms);
    }
    std::vector<int32_t> kept;
    for (int32_t i = 0; i < (int32_t) n; ++i) if ((i*2654435761u >> 16) % 5 == 0) kept.push_back(i);
    const device_array<int32_t> index(kept);
    device_array<char> to(kept.size()*l.nb);
    const double ms = time_of([&](int i) { must(edgekv_cuda_gather(l.copy(i).k, to.data, l.nb, index.data, (int) kept.size(), nullptr), "gather"); });
    printf("| evict, K, a fifth of the rows, f16 | %.3f | %.2f of the copy's speed |\n", ms, 2*kept.size()*l.nb/ms/1e6/copy);
}

// all heads, as the engine asks: one after another
void bench_foretell(int n_rows, double copy) {
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        const layer l(type, std::vector<int32_t>(N_HEAD_KV, n_rows), 1);
        const device_array<float> weights(std::vector<float>(D + D/2 + 4, 0.1f));
        const edgekv_map map = { weights.data, false, 0, 0 };
        device_array<float> out(n_rows), unlike(n_rows);
        auto head = [&](int i, int k, int v) { return edgekv_numbered { l.kv[i % N_COPIES*2 + v]->data + l.first[k]*l.nb, l.nb, type, D }; };
        const edgekv_numbered any = head(0, 0, 0);
        device_array<char> workspace(edgekv_cuda_foretell_workspace(&any, n_rows));
        const double ms = time_of([&](int i) {
            for (int k = 0; k < N_HEAD_KV; ++k) {
                const edgekv_numbered keys = head(i, k, 0), values = head(i, k, 1);
                must(edgekv_cuda_foretell(&keys, &values, &map, n_rows, out.data, unlike.data, workspace.data, nullptr), "foretell");
            }
        });
        printf("| foretell, %s | %.3f | %.2f of the copy's speed, keys read twice |\n", ggml_type_name(type), ms, 1.5*l.n_bytes()/ms/1e6/copy);
    }
}

void bench_select(int n_rows) {
    random_source rnd(1);
    std::vector<float> scores((size_t) N_HEAD_KV*n_rows);
    for (float & x : scores) x = std::exp(4*rnd.normal()); // as weights of attention are spread
    const device_array<float> on_device(scores);
    const device_array<int32_t> len(std::vector<int32_t>(N_HEAD_KV, n_rows)), counts(std::vector<int32_t>(N_HEAD_KV, n_rows/5));
    device_array<int32_t> out(scores.size());
    device_array<char> workspace(edgekv_cuda_select_workspace(N_HEAD_KV, n_rows));
    const double ms = time_of([&](int) {
        must(edgekv_cuda_select(on_device.data, n_rows, len.data, counts.data, N_HEAD_KV, n_rows, out.data, n_rows, workspace.data, nullptr), "select");
    });
    printf("| select, a fifth of the rows of each head | %.3f | |\n", ms);
}

// a fifth of each head's rows stays and receives the four that follow
void bench_merge(int n_rows) {
    const layer l(GGML_TYPE_F16, std::vector<int32_t>(N_HEAD_KV, n_rows), 1);
    const int n_kept = n_rows/5, n_gone = 4*n_kept;
    std::vector<int32_t> kept, gone, begin;
    for (int32_t i = 0; i < 5*n_kept; ++i) (i % 5 ? gone : kept).push_back(i);
    for (int32_t i = 0; i < n_kept; ++i) begin.push_back(4*i);
    const device_array<int32_t> d_kept(kept), d_gone(gone), d_begin(begin), counts(std::vector<int32_t>(n_kept, 4));
    const device_array<float> own(std::vector<float>(n_kept, 0.2f)), weights(std::vector<float>(n_gone, 0.2f));
    device_array<float> cosine(n_gone);
    device_array<int32_t> nearest(n_gone);
    auto head = [&](int i, int k) { return edgekv_numbered { l.kv[i % N_COPIES*2]->data + l.first[k]*l.nb, l.nb, GGML_TYPE_F16, D }; };
    const edgekv_numbered any = head(0, 0);
    device_array<char> workspace(edgekv_cuda_merge_workspace(&any, n_kept));
    const double search = time_of([&](int i) {
        for (int k = 0; k < N_HEAD_KV; ++k) {
            const edgekv_numbered keys = head(i, k);
            must(edgekv_cuda_merge_nearest(&keys, d_gone.data, n_gone, d_kept.data, n_kept, cosine.data, nearest.data, workspace.data, nullptr), "nearest");
        }
    }, 1); // long enough
    const edgekv_shares shares = { n_kept, d_kept.data, own.data, counts.data, d_gone.data, weights.data };
    const double fold = time_of([&](int i) {
        for (int k = 0; k < N_HEAD_KV; ++k) {
            const edgekv_numbered to = head(i, k);
            must(edgekv_cuda_merge_fold(&to, &shares, d_begin.data, nullptr), "fold");
        }
    });
    printf("| merge, search: four fifths of the rows into one, f16 | %.3f | %.1f TFLOP/s |\n", search, 2.0*D*n_gone*n_kept*N_HEAD_KV/search/1e9);
    printf("| merge, fold of K: the same | %.3f | |\n", fold);
}

} // namespace

int perf(int argc, char ** argv) {
    const int n_rows = argc > 1 ? atoi(argv[1]) : 32768;
    if (n_rows < 64) { printf("give a number of rows per head, 64 or more\n"); return 2; }
    const double copy = copy_speed((size_t) n_rows*32768);
    printf("%d query heads, %d KV heads of %d, %d rows each; copying: %.0f GB/s (read and written)\n\n", N_HEAD, N_HEAD_KV, D, n_rows, copy);
    bench_attend(n_rows, copy);
    bench_score(n_rows, copy);
    bench_foretell(n_rows, copy);
    bench_select(n_rows);
    bench_merge(n_rows);
    return 0;
}
