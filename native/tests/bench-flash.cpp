// attend beside upstream's flash attention on the same bytes, as nodes of a graph on a GPU: time of
// each, and how far they are apart.
//     bench-flash [rows per head] [library of a backend]
#include "check.h"
#include "edgekv-op.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int N_HEAD = 32, N_HEAD_KV = 8, D = 128;
constexpr int N_COPIES = 3;     // of K and V, taken in turn: together larger than any cache
constexpr double WARM_UP = 0.3; // seconds: a GPU that has nothing to do lowers its clock

// of a graph, of which many make launching it cheap; and of graphs
struct extent {
    int n_nodes, n_rounds;
};
constexpr extent ON_GPU = { 96, 15 }, TRIED = { 4, 1 };

void not_here(ggml_tensor *, int, int, void *) { abort(); } // a node for a device, not for the CPU

// rows of one head, the same for all: as bytes
std::vector<char> random_rows(ggml_type type, int n, random_source & rnd) {
    std::vector<float> x((size_t) n * D);
    for (float & y : x) y = rnd.normal();
    std::vector<char> bytes(n * ggml_row_size(type, D));
    ggml_quantize_chunk(type, x.data(), bytes.data(), 0, n, D, nullptr);
    return bytes;
}

struct bench {
    ggml_backend_t backend;
    ggml_type type;
    int n_rows, n_tokens;
    ggml_context_ptr ctx { ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true }) };
    ggml_backend_buffer_ptr buf;
    ggml_tensor *q, *mask, *heads, *kv[2 * N_COPIES];

    bench(ggml_backend_t backend, ggml_type type, int n_rows, int n_tokens, random_source & rnd)
        : backend(backend), type(type), n_rows(n_rows), n_tokens(n_tokens) {
        q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, D, N_HEAD, n_tokens);
        mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, n_rows, n_tokens);
        heads = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2 * N_HEAD_KV);
        for (auto *& t : kv)
            t = ggml_new_tensor_2d(ctx.get(), type, D, (int64_t) n_rows * N_HEAD_KV);
        buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (!buf) {
            printf("the device has no memory for %d rows\n", n_rows);
            exit(1);
        }
        std::vector<float> x(ggml_nelements(q));
        for (float & y : x) y = rnd.normal();
        ggml_backend_tensor_set(q, x.data(), 0, ggml_nbytes(q));
        std::vector<ggml_fp16_t> m(ggml_nelements(mask), ggml_fp32_to_fp16(0));
        for (int t = 0; t < n_tokens; ++t)
            for (int r = n_rows - n_tokens + 1 + t; r < n_rows; ++r)
                m[(size_t) t * n_rows + r] = ggml_fp32_to_fp16(-INFINITY);
        ggml_backend_tensor_set(mask, m.data(), 0, ggml_nbytes(mask));
        std::vector<int32_t> at;
        for (int k = 0; k < N_HEAD_KV; ++k) at.push_back(k * n_rows);
        at.resize(2 * N_HEAD_KV, n_rows);
        ggml_backend_tensor_set(heads, at.data(), 0, ggml_nbytes(heads));
        for (auto * t : kv) {
            const auto bytes = random_rows(type, n_rows, rnd);
            for (int k = 0; k < N_HEAD_KV; ++k)
                ggml_backend_tensor_set(t, bytes.data(), k * bytes.size(), bytes.size());
        }
    }

    ggml_tensor * node(ggml_context * c, int i, bool ours) const {
        ggml_tensor *k = kv[i % N_COPIES * 2], *v = kv[i % N_COPIES * 2 + 1];
        if (ours) {
            ggml_tensor * a[] = { q, k, v, heads };
            ggml_tensor * n = ggml_custom_4d(
                c, GGML_TYPE_F32, D, N_HEAD, n_tokens, 1, a, 4, not_here, 1, nullptr);
            edgekv_op_set(n, N_HEAD_KV, 0.088f, 0, 0);
            return n;
        }
        auto per_head = [&](ggml_tensor * x) {
            return ggml_view_3d(c, x, D, n_rows, N_HEAD_KV, x->nb[1], n_rows * x->nb[1], 0);
        };
        ggml_tensor * n = ggml_flash_attn_ext(
            c, ggml_permute(c, q, 0, 2, 1, 3), per_head(k), per_head(v), mask, 0.088f, 0, 0);
        ggml_prec_set_acc(n, GGML_PREC_F32);
        return n;
    }
};

// many nodes of one kind
struct graph {
    ggml_backend_t backend;
    ggml_context_ptr ctx;
    ggml_cgraph * gf;
    std::vector<ggml_tensor *> nodes;
    ggml_backend_buffer_ptr work;

    graph(const bench & b, bool ours, int n_nodes)
        : backend(b.backend),
          ctx(ggml_init(
              { 8 * n_nodes * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })),
          gf(ggml_new_graph(ctx.get())) {
        for (int i = 0; i < n_nodes; ++i) {
            nodes.push_back(b.node(ctx.get(), i, ours));
            ggml_set_output(nodes.back());
            ggml_build_forward_expand(gf, nodes.back());
        }
        if (ggml_backend_supports_op(backend, nodes[0]))
            work.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    }

    // milliseconds of one node
    double run() const {
        const int64_t t0 = ggml_time_us();
        if (ggml_backend_graph_compute(backend, gf) != GGML_STATUS_SUCCESS) {
            printf("the device could not compute\n");
            exit(1);
        }
        ggml_backend_synchronize(backend);
        return (ggml_time_us() - t0) / 1e3 / nodes.size();
    }
    std::vector<float> values() const {
        std::vector<float> out(ggml_nelements(nodes[0]));
        ggml_backend_tensor_get(nodes[0], out.data(), 0, out.size() * sizeof(float));
        return out;
    }
};

struct times { // of the rounds, ascending
    std::vector<double> ours, theirs, ratio;

    // each round ours, theirs, theirs, ours: whatever the clock does, it does to both
    times(const graph & a, const graph & b, const extent & e) {
        const int64_t t0 = ggml_time_us();
        do {
            a.run();
            b.run();
        } while (e.n_rounds > 1 && ggml_time_us() - t0 < 1e6 * WARM_UP);
        for (int i = 0; i < e.n_rounds; ++i) {
            double x = a.run(), y = b.run();
            y += b.run();
            x += a.run();
            ours.push_back(x / 2);
            theirs.push_back(y / 2);
            ratio.push_back(y / x);
        }
        for (auto * v : { &ours, &theirs, &ratio }) std::sort(v->begin(), v->end());
    }
    static double median(const std::vector<double> & x) { return x[x.size() / 2]; }
};

} // namespace

int main(int argc, char ** argv) {
    const int n_rows = argc > 1 ? atoi(argv[1]) : 32768;
    if (argc > 2) ggml_backend_load(argv[2]);
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    if (!dev || n_rows < 256) {
        printf("%s\n", dev ? "give 256 or more rows" : "there is no GPU that this build knows");
        return 2;
    }
    ggml_time_init();
    ggml_backend_ptr backend { ggml_backend_dev_init(dev, nullptr) };
    random_source rnd(1);
    printf("%s: %d query heads, %d KV heads of %d, %d rows each\n\n",
        ggml_backend_dev_description(dev), N_HEAD, N_HEAD_KV, D, n_rows);
    printf(
        "| K, V | tokens | attend, ms | upstream, ms | upstream / attend | of all rounds | NMSE between them |\n|---|---|---|---|---|---|---|\n");
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 })
        for (int n_tokens : { 1, 4, 8 }) {
            const bench b(backend.get(), type, n_rows, n_tokens, rnd);
            const extent & size = argc > 2 ? TRIED : ON_GPU;
            const graph ours(b, true, size.n_nodes), theirs(b, false, size.n_nodes);
            if (!check(ours.work && theirs.work, "%s, %d tokens: the device refuses a node",
                    ggml_type_name(type), n_tokens))
                continue;
            const times t(ours, theirs, size);
            const auto x = ours.values(), y = theirs.values();
            nmse e;
            for (size_t i = 0; i < x.size(); ++i) e.add(x[i], y[i]);
            printf("| %s | %d | %.3f | %.3f | %.2f | %.2f to %.2f | %.1e |\n", ggml_type_name(type),
                n_tokens, times::median(t.ours), times::median(t.theirs), times::median(t.ratio),
                t.ratio.front(), t.ratio.back(), e.value());
            check(e.value() < 1e-3, "%s, %d tokens: NMSE %g between the two", ggml_type_name(type),
                n_tokens, e.value());
        }
    return finish();
}
