// attend through upstream's Metal backend as we patch it, on the device of metal/fake-metal.cpp:
// from a node of a graph to its result, against the same node on the CPU backend and plain loops.
// The kernels' source runs as C++: no Metal compiler has seen it, no Apple GPU run it.
//     test-metal-host [seed] [number of random cases] [few: one of nine fixed cases]
#include "cases.h"
#include "edgekv-op.h"
#include "fake.h"
#include "fibers.h"

#include "ggml-alloc.h"
#include "ggml-metal.h"

#include <memory>

extern "C" long fake_device_n_ours();
extern "C" long fake_metal_n_barriers();

namespace {

// f32 throughout, and as exact as the kernels are alone (test-metal.cpp)
constexpr double MAX_NMSE = 1e-10;
// as fake-metal.cpp numbers them
enum devices { APPLE, REFUSES_SOURCE, FEW_THREADS, OTHER_LANES, LITTLE_MEMORY, N_DEVICES };

struct free_context {
    void operator()(ggml_context * x) const { ggml_free(x); }
};
struct free_buffer {
    void operator()(ggml_backend_buffer * x) const { ggml_backend_buffer_free(x); }
};
struct free_alloc {
    void operator()(ggml_gallocr * x) const { ggml_gallocr_free(x); }
};
struct free_backend {
    void operator()(ggml_backend * x) const { ggml_backend_free(x); }
};
using context = std::unique_ptr<ggml_context, free_context>;
using backend = std::unique_ptr<ggml_backend, free_backend>;

context make_context() {
    return context(
        ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
}

// what the node computes on a backend without a kernel for it
void attend_on_cpu(ggml_tensor * dst, int ith, int, void *) {
    if (ith > 0) return;
    edgekv_op op;
    edgekv_rows rows;
    edgekv_queries qs;
    if (!edgekv_op_get(dst, op)) return;
    edgekv_op_inputs(dst, op, rows, qs);
    std::vector<float> parts((size_t) qs.n_tokens * rows.n_head * (2 + rows.d_v));
    edgekv_cpu_attend_part(&rows, &qs, parts.data(), 0, 1);
    if (qs.recalled) parts.insert(parts.end(), qs.recalled, qs.recalled + parts.size());
    edgekv_cpu_attend_combine(
        &rows, qs.n_tokens, parts.data(), qs.recalled ? 2 : 1, (float *) dst->data, 0, 1);
}

// a case's tensors in a backend's memory
struct tensors {
    context ctx = make_context();
    std::unique_ptr<ggml_backend_buffer, free_buffer> buffer;
    ggml_tensor *q, *k, *v, *heads, *sinks = nullptr, *pos = nullptr, *recalled = nullptr;

    tensors(const inputs & in, ggml_backend_t b) {
        const auto & c = in.c;
        const int n_kv = in.n_head_kv;
        ggml_tensor * all_q = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, (int64_t) in.q.size());
        q = ggml_view_3d(ctx.get(), all_q, c.d_k, in.n_head, c.n_tokens,
            in.qs.stride_h * sizeof(float), in.qs.stride_t * sizeof(float), 0);
        k = rows(c.type_k, c.d_k, in.n_rows, in.k.nb);
        v = rows(c.type_v, c.d_v, in.n_rows, in.v.nb);
        // as the engine's: of many layers
        ggml_tensor * table =
            ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 3 + 2 * n_kv + c.n_tokens);
        heads = ggml_view_1d(
            ctx.get(), table, 2 * n_kv + (c.window ? c.n_tokens : 0), 3 * sizeof(int32_t));
        if (c.sinks) sinks = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, in.n_head);
        if (c.alibi) pos = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, std::max(in.n_rows, 1));
        if (!in.recalled.empty())
            recalled =
                ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 2 + c.d_v, in.n_head, c.n_tokens);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), b));
        std::vector<int32_t> lengths = in.first;
        lengths.insert(lengths.end(), in.len.begin(), in.len.end());
        lengths.insert(lengths.end(), in.start.begin(), in.start.end());
        set(all_q, in.q.data(), in.q.size() * sizeof(float));
        set(k, in.k.bytes.data(),
            in.k.bytes.size() - (in.n_rows ? in.k.nb - ggml_row_size(c.type_k, c.d_k) : 0));
        set(v, in.v.bytes.data(),
            in.v.bytes.size() - (in.n_rows ? in.v.nb - ggml_row_size(c.type_v, c.d_v) : 0));
        set(heads, lengths.data(), lengths.size() * sizeof(int32_t));
        if (sinks) set(sinks, in.sinks.data(), in.sinks.size() * sizeof(float));
        if (pos) set(pos, in.pos.data(), in.pos.size() * sizeof(float));
        if (recalled) set(recalled, in.recalled.data(), in.recalled.size() * sizeof(float));
    }

    // attention of some queries, in a context of the graph
    ggml_tensor * node(ggml_context * g, const inputs & in, ggml_tensor * queries) const {
        ggml_tensor * a[] = { queries, k, v, heads, sinks, pos, recalled };
        ggml_tensor * n = ggml_custom_4d(g, GGML_TYPE_F32, in.c.d_v, in.n_head, in.c.n_tokens, 1, a,
            7, attend_on_cpu, 1, nullptr);
        edgekv_op_set(n, in.n_head_kv, in.rows.scale, in.rows.softcap, in.rows.max_bias);
        return n;
    }

private:
    ggml_tensor * rows(ggml_type type, int d, int n, size_t nb) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), type, d, std::max(n, 1));
        t->nb[1] = nb;
        t->nb[2] = t->nb[3] = nb * t->ne[1];
        return t;
    }
    static void set(ggml_tensor * t, const void * x, size_t n) {
        if (n) ggml_backend_tensor_set(t, x, 0, n);
    }
};

// the last of a chain of nodes, each with the one before as its queries
std::vector<float> compute(ggml_backend_t b, const inputs & in, int n_nodes = 1) {
    const tensors t(in, b);
    const context g = make_context();
    ggml_cgraph * graph = ggml_new_graph(g.get());
    ggml_tensor * x = t.q;
    for (int i = 0; i < n_nodes; ++i) x = t.node(g.get(), in, x);
    ggml_build_forward_expand(graph, x);
    const std::unique_ptr<ggml_gallocr, free_alloc> alloc(
        ggml_gallocr_new(ggml_backend_get_default_buffer_type(b)));
    if (!check(ggml_gallocr_alloc_graph(alloc.get(), graph), "no memory for the graph") ||
        !check(ggml_backend_graph_compute(b, graph) == GGML_STATUS_SUCCESS,
            "the graph was not computed"))
        return {};
    std::vector<float> out((size_t) ggml_nelements(x));
    ggml_backend_tensor_get(x, out.data(), 0, out.size() * sizeof(float));
    char * base = (char *) ggml_backend_buffer_get_base(x->buffer);
    if (n_nodes == 1 && fake::memory.count(base)) { // nothing behind what the node was given
        const fake::inside i;
        const char *end = (char *) x->data + ggml_backend_buft_get_alloc_size(x->buffer->buft, x),
                   *end_of_memory = base + fake::memory.at(base);
        check(std::all_of(end, end_of_memory, [](char y) { return y == '\xff'; }),
            "%s: the node wrote behind its workspace", in.c.name().c_str());
    }
    return out;
}

double difference(const std::vector<float> & got, const std::vector<float> & expected) {
    nmse e;
    for (size_t i = 0; i < expected.size(); ++i) e.add(i < got.size() ? got[i] : NAN, expected[i]);
    return e.value();
}

void test_case_on(
    ggml_backend_t metal, ggml_backend_t cpu, const test_case & c, random_source & rnd) {
    inputs in(c, rnd);
    const auto a = attend_reference(in);
    const bool recalls = c.n_tokens <= EDGEKV_ALIKE_MAX && rnd.below(2);
    if (recalls) in.recall(rnd);
    standin::backwards = !standin::backwards;
    const auto got = compute(metal, in), on_cpu = compute(cpu, in);
    if (got.empty()) return;
    judge("attend, plain loops", in,
        compare(got, recalls ? recalled_reference(in, a) : values_reference(in, a)), MAX_NMSE);
    judge("attend, CPU backend", in, difference(got, on_cpu), MAX_NMSE);
}

// nodes that wait for each other: barriers between and within them
void test_chain(ggml_backend_t metal, ggml_backend_t cpu, random_source & rnd) {
    for (int n_tokens : { 1, 5 }) {
        test_case c;
        c.n_tokens = n_tokens;
        c.len = { 90, 41, 200 };
        const inputs in(c, rnd);
        const long barriers = fake_metal_n_barriers();
        const double e = difference(compute(metal, in, 3), compute(cpu, in, 3));
        check(e < MAX_NMSE, "a chain of three nodes: NMSE %g", e);
        check(fake_metal_n_barriers() - barriers >= 5, "a chain of three nodes: %ld barriers",
            fake_metal_n_barriers() - barriers);
    }
}

// who takes which node
void test_support(ggml_backend_reg_t reg, random_source & rnd) {
    ggml_backend_dev_t apple = ggml_backend_reg_dev_get(reg, APPLE);
    auto asked = [&](ggml_backend_dev_t dev, const test_case & c, auto && change) {
        const inputs in(c, rnd);
        const backend b(ggml_backend_cpu_init());
        const tensors t(in, b.get());
        const context g = make_context();
        ggml_tensor * node = t.node(g.get(), in, t.q);
        change(node);
        return ggml_backend_dev_supports_op(dev, node);
    };
    auto as_it_is = [](ggml_tensor *) {};
    unsetenv("EDGEKV_METAL");
    check(!asked(apple, test_case(), as_it_is), "nobody asked for the kernels");
    setenv("EDGEKV_METAL", "1", 1);
    // twice: the answer is remembered
    for (int i = 0; i < N_DEVICES; ++i)
        for (int n = 0; n < 2; ++n) {
            check(asked(ggml_backend_reg_dev_get(reg, i), test_case(), as_it_is) == (i == APPLE),
                "device %d says the wrong thing", i);
        }
    for (ggml_type type : ON_METAL.types())
        for (int d : HEAD_SIZES) {
            test_case c;
            c.type_k = c.type_v = type;
            c.d_k = c.d_v = d;
            if (fits(type, d)) check(asked(apple, c, as_it_is), "%s is refused", c.name().c_str());
        }
    test_case large, other;
    large.d_k = large.d_v = 320;
    other.type_k = GGML_TYPE_F32;
    check(!asked(apple, large, as_it_is), "heads of 320 values are taken");
    check(!asked(apple, other, as_it_is), "K in f32 is taken");
    check(!asked(apple, test_case(), [](ggml_tensor * n) { n->src[0]->nb[0] = 8; }),
        "queries with gaps are taken");
    check(!asked(apple, test_case(),
              [](ggml_tensor * n) {
                  memset((char *) n->op_params + edgekv_op::OFFSET, 0, sizeof(edgekv_op));
              }),
        "a custom node of others is taken");
}

// memory: of ours more than the result, of other custom nodes just that
void test_memory(ggml_backend_t metal, random_source & rnd) {
    const test_case c;
    const inputs in(c, rnd);
    const tensors t(in, metal);
    const context g = make_context();
    ggml_tensor * node = t.node(g.get(), in, t.q);
    const auto buft = ggml_backend_get_default_buffer_type(metal);
    check(ggml_backend_buft_get_alloc_size(buft, node) > ggml_nbytes(node), "no workspace");
    memset((char *) node->op_params + edgekv_op::OFFSET, 0, sizeof(edgekv_op));
    check(ggml_backend_buft_get_alloc_size(buft, node) == ggml_nbytes(node),
        "a workspace for a node of others");
}

} // namespace

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    printf("seed %u\n", seed);
    setenv("GGML_METAL_DEVICES", std::to_string(N_DEVICES).c_str(), 1);
    random_source rnd(seed);
    ggml_backend_reg_t reg = ggml_backend_metal_reg();
    const backend metal(ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, APPLE), nullptr)),
        cpu(ggml_backend_cpu_init());
    test_support(reg, rnd);
    test_memory(metal.get(), rnd);
    test_chain(metal.get(), cpu.get(), rnd);
    const long before = fake_device_n_ours();
    long n_cases = 0;
    each_case(rnd, n_random, asks_few(argc, argv), ON_METAL, [&](const test_case & c) {
        test_case_on(metal.get(), cpu.get(), c, rnd);
        ++n_cases;
    });
    check(fake_device_n_ours() - before == 2 * n_cases, "%ld calls of kernels for %ld cases",
        fake_device_n_ours() - before, n_cases);
    print_table();
    return finish();
}
