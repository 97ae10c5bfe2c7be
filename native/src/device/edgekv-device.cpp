// Rows moved, judged and merged on the device where they lie
#include "edgekv-device.h"
#include "edgekv-switches.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

static const char *const CUDA = "edgekv_cuda_", *const METAL = "edgekv_metal_";

// a backend's functions whose names begin like this: all of them, on a device that they can run on,
// or null
std::unique_ptr<edgekv_device> edgekv_device::functions_of(
    ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, const std::string & prefix) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    auto d = std::make_unique<edgekv_device>(dev, buft);
    d->plain = prefix == METAL;
    bool all = true;
    auto find = [&](auto & function, const char * name) {
        function = (std::decay_t<decltype(function)>) ggml_backend_reg_get_proc_address(
            reg, (prefix + name).c_str());
        all = all && function;
    };
    find(d->attend_supports, "attend_supports");
    find(d->score_workspace, "score_workspace");
    find(d->score, "score");
    find(d->gather, "gather");
    find(d->merge_workspace, "merge_workspace");
    find(d->merge_nearest, "merge_nearest");
    find(d->merge_fold, "merge_fold");
    find(d->wait, "wait");
    if (!all) return nullptr;
    find(d->attend_parts, "attend_parts");
    // Metal has none: its rows lie in the CPU's reach
    find(d->predict_workspace, "predict_workspace");
    find(d->predict, "predict");
    // where kernels are compiled on the spot
    const auto ready = (int (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(
        reg, (prefix + "ready").c_str());
    const int is_ready = ready ? ready(dev) : 1;
    if (is_ready < 0)
        edgekv_device::left_alone(dev, "everything",
            "they do not compile for it, or it is too old; --verbose shows what its compiler says");
    return is_ready > 0 && d->moves_right() ? std::move(d) : nullptr;
}

const edgekv_device * edgekv_device::of(ggml_backend_buffer_type_t buft) {
    static std::mutex mutex; // contexts may live in different threads
    static std::map<ggml_backend_dev_t, std::unique_ptr<edgekv_device>> known;
    ggml_backend_dev_t dev =
        ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);
    if (!dev) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto [it, fresh] = known.try_emplace(dev);
    if (fresh) it->second = functions_of(dev, buft, CUDA);
    if (fresh && !it->second) it->second = functions_of(dev, buft, METAL);
    return it->second.get();
}

void edgekv_device::check(int error, const char * what) const {
    if (error)
        throw std::runtime_error(
            std::string("the device could not ") + what + " (error " + std::to_string(error) + ")");
}

void edgekv_device::move_rows(const ggml_tensor * from, const int32_t * index, int64_t src,
    ggml_tensor * to, int64_t dst, int n) const {
    settle(to);
    queue_rows(from, index, src, to, dst, n);
    settle(to);
}

void edgekv_device::queue_rows(const ggml_tensor * from, const int32_t * index, int64_t src,
    ggml_tensor * to, int64_t dst, int n) const {
    const size_t nb = from->nb[1];
    check(gather((const char *) from->data + src * nb, (char *) to->data + dst * nb, nb, index, n,
              nullptr),
        "move rows");
}

void edgekv_device::settle(const ggml_tensor * t) const { check(wait(t->data), "finish"); }

namespace {

// Arrays of main memory and their places in one allocation on the device: they go there before a
// call and, some of them, come back after it
struct shipment {
    struct piece {
        const void * here;
        size_t n_bytes, at;
    };
    size_t n_bytes = 0;
    std::vector<piece> in, out;
    // to be turned into addresses on the device
    std::vector<std::pair<const void **, size_t>> pointers;

    // of nothing too: its address may be looked at
    size_t room(size_t n) {
        const size_t at = n_bytes;
        n_bytes += (n + 256) / 256 * 256;
        return at;
    }

    template <typename T>
    void add(T *& x, size_t n, bool goes, bool returns) {
        if (!x) return;
        const piece p = { x, n * sizeof(*x), room(n * sizeof(*x)) };
        if (goes) in.push_back(p);
        if (returns) out.push_back(p);
        pointers.push_back({ (const void **) &x, p.at });
    }
    template <typename T>
    void send(T *& x, size_t n) {
        add(x, n, true, false);
    }
    template <typename T>
    void receive(T *& x, size_t n) {
        add(x, n, false, true);
    }

    // its first address there; work is made larger when needed
    char * go(ggml_backend_buffer_type_t buft, edgekv_matrix & work) {
        // layers may lie on several devices
        if (work.n_bytes() < n_bytes || ggml_backend_buffer_get_type(work.t->buffer) != buft) {
            work = {};
            work = edgekv_matrix::make(buft, GGML_TYPE_I8, (int64_t) n_bytes, 1, "device_work");
        }
        char * base = (char *) work.t->data;
        std::vector<char> all; // a copy waits for the device, so there is one
        for (const auto & p : in) {
            all.resize(p.at + p.n_bytes);
            if (p.n_bytes) memcpy(all.data() + p.at, p.here, p.n_bytes);
        }
        if (!all.empty()) ggml_backend_tensor_set(work.t, all.data(), 0, all.size());
        for (auto & [pointer, at] : pointers) *pointer = base + at;
        return base;
    }
    void come_back(const edgekv_matrix & work) const {
        for (const auto & p : out)
            ggml_backend_tensor_get(work.t, const_cast<void *>(p.here), p.at, p.n_bytes);
    }
};

} // namespace

// f(array here, array there, values in it) of those that are wanted
template <typename F>
static void each_array(
    const edgekv_columns & here, const edgekv_columns & there, int group, F && f) {
    for (auto x : { &edgekv_columns::sum, &edgekv_columns::max, &edgekv_columns::entropy })
        if (here.*x) f(here.*x, there.*x, here.n_rows);
    for (auto x : { &edgekv_columns::mean, &edgekv_columns::m2 })
        if (here.*x) f(here.*x, there.*x, group * here.n_rows);
}

void edgekv_device_columns::begin(
    ggml_backend_buffer_type_t buft, const edgekv_columns & here, int g) {
    group = g;
    int64_t n = 0;
    each_array(here, here, group, [&](float *, float *, int64_t size) { n += size; });
    // layers may lie on several devices
    if (!memory.t || memory.t->ne[0] != n ||
        ggml_backend_buffer_get_type(memory.t->buffer) != buft) {
        memory = {};
        memory = edgekv_matrix::make(buft, GGML_TYPE_F32, n, 1, "columns");
    }
    ggml_backend_buffer_clear(memory.buf.get(), 0);
    at = here;
    float * next = (float *) memory.t->data;
    auto place = [&](float *& x, int64_t size) {
        if (x) {
            x = next;
            next += size;
        }
    };
    for (float ** x : { &at.sum, &at.max, &at.entropy }) place(*x, here.n_rows);
    for (float ** x : { &at.mean, &at.m2 }) place(*x, group * here.n_rows);
}

void edgekv_device_columns::fetch(const edgekv_columns & here) const {
    const auto * base = (const float *) memory.t->data;
    each_array(here, at, group, [&](float * to, const float * from, int64_t size) {
        ggml_backend_tensor_get(memory.t, to, (from - base) * sizeof(float), size * sizeof(float));
    });
}

// Multiplications that a device is given at once: some systems end what keeps a GPU from drawing
// for seconds, and tensor cores do more in them
static double most_work(bool plain) { return edgekv_switches::work(plain ? 1e10 : 1e12); }

int edgekv_device::at_once(double each) const {
    return (int) std::clamp(most_work(plain) / std::max(each, 1.0) / 16, 1.0, 1e6) * 16;
}

bool edgekv_device::takes_at_once(double n_multiplications) const {
    return !plain || n_multiplications <= 10 * most_work(plain);
}

void edgekv_device::score_columns(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
    edgekv_rows rows, edgekv_queries qs, const edgekv_columns & columns) const {
    edgekv_columns cols = columns;
    const int n_rows_max = *std::max_element(rows.len, rows.len + rows.n_head_kv),
              G = rows.n_head / rows.n_head_kv;
    const double each = std::accumulate(rows.len, rows.len + rows.n_head_kv, 0.0) * G * rows.d_k;
    const int n_slice = at_once(each); // tokens
    std::vector<int32_t> after(qs.n_tokens);
    for (int t = 0; t < qs.n_tokens; ++t)
        after[t] = qs.n_after ? qs.n_after[t] : qs.n_tokens - 1 - t;
    qs.n_after = after.data();
    shipment s;
    s.send(rows.first, rows.n_head_kv);
    s.send(rows.len, rows.n_head_kv);
    s.send(rows.sinks, rows.n_head);
    s.send(rows.pos, cols.n_rows);
    s.send(qs.n_after, qs.n_tokens);
    s.send(qs.start, qs.n_tokens);
    const size_t at_workspace =
        s.room(score_workspace(&rows, std::min(n_slice, qs.n_tokens), n_rows_max));
    char * base = s.go(buft, work);
    check(wait(base), "finish");
    for (int left = qs.n_tokens; left > 0;) {
        qs.n_tokens = std::min(left, n_slice);
        check(score(&rows, &qs, &cols, n_rows_max, base + at_workspace, nullptr), "score");
        check(wait(base), "score");
        left -= qs.n_tokens;
        cols.n_seen += qs.n_tokens;
        qs.q += qs.n_tokens * qs.stride_t;
        qs.n_after += qs.n_tokens;
        if (qs.start) qs.start += qs.n_tokens;
    }
}

void edgekv_device::fetch_rows(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
    const edgekv_numbered & rows, const std::vector<int32_t> & which, char * out) const {
    const int32_t * index = which.data();
    shipment s;
    s.send(index, which.size());
    s.receive(out, which.size() * rows.nb);
    char * base = s.go(buft, work);
    check(wait(base), "finish");
    check(gather(rows.base, out, rows.nb, index, (int) which.size(), nullptr), "move rows");
    check(wait(base), "move rows");
    s.come_back(work);
}

void edgekv_device::predict_rows(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
    const edgekv_numbered & keys, const edgekv_numbered & values, edgekv_map map, int n,
    float * out, float * unlike) const {
    shipment s;
    s.send(map.weights, values.d + keys.d / 2 + 4);
    s.receive(out, n);
    s.receive(unlike, n);
    const size_t at_workspace = s.room(predict_workspace(&keys, n));
    char * base = s.go(buft, work);
    check(wait(base), "finish");
    check(predict(&keys, &values, &map, n, out, unlike, base + at_workspace, nullptr), "predict");
    check(wait(base), "predict");
    s.come_back(work);
}

void edgekv_device::find_nearest(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
    const edgekv_numbered & keys, const std::vector<int32_t> & gone,
    const std::vector<int32_t> & kept, float * cosine, int32_t * nearest) const {
    const int32_t *from = gone.data(), *to = kept.data();
    shipment s;
    s.send(from, gone.size());
    s.send(to, kept.size());
    s.receive(cosine, gone.size());
    s.receive(nearest, gone.size());
    const size_t at_workspace = s.room(merge_workspace(&keys, (int) kept.size()));
    char * base = s.go(buft, work);
    check(wait(base), "finish");
    const int n_slice = at_once((double) kept.size() * keys.d);
    for (int i = 0, n = (int) gone.size(); i < n; i += n_slice) {
        check(merge_nearest(&keys, from + i, std::min(n - i, n_slice), to, (int) kept.size(),
                  cosine + i, nearest + i, base + at_workspace, nullptr),
            "search");
        check(wait(base), "search");
    }
    s.come_back(work);
}

void edgekv_device::fold(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
    const edgekv_numbered & to, edgekv_shares shares) const {
    std::vector<int32_t> begins;
    int32_t n_sources = 0;
    for (int i = 0; i < shares.n; n_sources += shares.counts[i++]) begins.push_back(n_sources);
    const int32_t * begin = begins.data();
    shipment s;
    s.send(begin, shares.n);
    s.send(shares.rows, shares.n);
    s.send(shares.own, shares.n);
    s.send(shares.counts, shares.n);
    s.send(shares.sources, n_sources);
    s.send(shares.weights, n_sources);
    char * base = s.go(buft, work);
    check(wait(base), "finish");
    check(merge_fold(&to, &shares, begin, nullptr), "fold");
    check(wait(base), "fold");
}
