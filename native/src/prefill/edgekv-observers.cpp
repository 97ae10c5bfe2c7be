// Observers of a prompt: who wants to know, memory for their queries, and when they look
#include "edgekv-observers.h"
#include "edgekv-error.h"
#include "edgekv-pages.h"

#include "llama-graph.h"

#include <algorithm>
#include <string>

void edgekv_observers::add(const edgekv_observer & o) {
    if (o.begin < 0 || o.end <= o.begin || o.end > prompt.n_all) {
        throw edgekv_error { EDGEKV_INVALID, "an observer lies outside the prompt" };
    }
    if (o.every < 0) {
        throw edgekv_error { EDGEKV_INVALID,
            "an observer cannot look at one of " + std::to_string(o.every) + " tokens" };
    }
    observers.push_back(o);
    const int64_t step = observers.back().every = std::max(o.every, 1);
    if (o.stats & EDGEKV_STAT_QUERIES) {
        query_step = !wants_queries || query_step == step ? step : 1;
        wants_queries = true;
    }
    wants_columns = wants_columns || (o.stats & ~EDGEKV_STAT_QUERIES);
}

void edgekv_observers::make() {
    const auto & layers = prompt.store->layers;
    score_params.resize(layers.size());
    query_paths.resize(layers.size());
    int n_at_once = 0;
    for (int i = 0; i < prompt.n_slice(); ++i)
        n_at_once = std::max(n_at_once, prompt.ends[i] - prompt.begin(i));
    tallies.clear();
    tallies.resize(n_at_once);
    for (auto & t : tallies) t.resize(observers.size());

    captured.clear();
    capture_of.assign(layers.size(), -1);
    std::vector<int> of_scratch(scratches.count(), -1);
    for (int il = 0; il < (int) layers.size(); ++il) {
        const auto & l = prompt.layer(prompt.layer(il).reads);
        if (!l.selects()) continue;
        int & first = of_scratch[scratches.index(l)];
        if (first < 0 || !prompt.alone(il)) {
            first = (int) captured.size();
            captured.emplace_back();
            make_capture(l, captured.back());
        }
        capture_of[il] = first;
    }
}

void edgekv_observers::make_capture(const edgekv_layer & l, edgekv_capture & c) const {
    if (!wants_columns) return;
    c.queries = edgekv_matrix::make(scorer(l) ? l.buft : ggml_backend_cpu_buffer_type(),
        GGML_TYPE_F32, (int64_t) l.d_k * l.n_head, most_wanted(~EDGEKV_STAT_QUERIES), "queries");
    if (prompt.by_kernel(l)) c.norm.resize(2 * l.n_head * std::min(prompt.n_ubatch, prompt.n_all));
}

void edgekv_observers::clear() {
    captured.clear();
    tallies.clear();
}

void edgekv_observers::drop_work() {
    for (auto & c : captured) c = {};
    for (auto & layer : tallies)
        for (auto & t : layer) t.there = {};
}

size_t edgekv_observers::n_bytes() const {
    size_t n = 0;
    for (const auto & c : captured) n += c.queries.n_bytes() + c.raw_queries.n_bytes();
    for (const auto & layer : tallies)
        for (const auto & t : layer) n += t.there.n_bytes();
    return n;
}

edgekv_seen edgekv_observers::seen(const edgekv_span & span) const {
    return { wanted(span, ~EDGEKV_STAT_QUERIES), wanted(span, EDGEKV_STAT_QUERIES) };
}

bool edgekv_observers::counts_columns(const edgekv_span & span, int begin, int end) const {
    const auto selects = [&](int il) { return prompt.layer(il).selects(); };
    while (begin < end && !selects(begin)) ++begin;
    return begin < end && seen(span).columns != edgekv_seen::range();
}

int64_t edgekv_observers::most_wanted(uint32_t stats) const {
    int64_t n = 0, n_ranges = 0;
    for (const auto & o : observers)
        if (o.stats & stats) {
            n = std::max<int64_t>(n, std::min<int64_t>(prompt.n_ubatch, o.end - o.begin));
            ++n_ranges;
        }
    return n_ranges > 1 ? prompt.n_ubatch : n; // two ranges may share a chunk
}

edgekv_seen::range edgekv_observers::wanted(const edgekv_span & span, uint32_t stats) const {
    int64_t a = span.n_tokens, b = 0;
    for (const auto & o : observers) {
        if (!(o.stats & stats)) continue;
        const int64_t x = std::max<int64_t>(o.begin - span.first, 0);
        const int64_t y = std::min<int64_t>(o.end - span.first, span.n_tokens);
        if (x < y) {
            a = std::min(a, x);
            b = std::max(b, y);
        }
    }
    return a < b ? edgekv_seen::range(a, b) : edgekv_seen::range(0, 0);
}

ggml_tensor * edgekv_observers::capture_queries(const llm_graph_context & g, const edgekv_layer & l,
    int il, const edgekv_seen & seen, ggml_tensor * q, const edgekv_score_params & params) {
    score_params[il] = params;
    const auto [a, b] = seen.columns;
    if (a == b || !l.selects()) return nullptr;
    ggml_tensor * to = captured[capture_of[il]].queries.t;
    ggml_tensor * src =
        ggml_view_3d(g.ctx0, q, q->ne[0], q->ne[1], b - a, q->nb[1], q->nb[2], a * q->nb[2]);
    ggml_tensor * dst =
        ggml_view_3d(g.ctx0, to, q->ne[0], q->ne[1], b - a, q->ne[0] * sizeof(float), to->nb[1], 0);
    return ggml_cpy(g.ctx0, src, dst);
}

float * edgekv_observers::norm_of(int il) {
    auto * norm = capture_of[il] < 0 ? nullptr : &captured[capture_of[il]].norm;
    return !norm || norm->empty() ? nullptr : norm->data();
}

void edgekv_observers::note_rotation(const ggml_tensor * t) {
    const auto turns = [&](const auto & path) { return path.rotation == t; };
    const auto & paths = query_paths; // windows may have heads of another size, which nobody asks
    if (!key_rotation.empty() || std::none_of(paths.begin(), paths.end(), turns)) return;
    key_rotation.assign((const float *) t->data, (const float *) t->data + ggml_nelements(t));
}

void edgekv_observers::begin_layer(int il) {
    if (place(il) == 0)
        for (auto & layer : tallies)
            for (auto & t : layer) t.clear();
}

void edgekv_observers::observe(const edgekv_span & span, int il) {
    const auto & l = prompt.layer(prompt.layer(il).reads);
    if (!l.selects()) return;
    const int64_t t0 = ggml_time_us();
    for (size_t i = 0; i < observers.size(); ++i) {
        const auto & o = observers[i];
        const int64_t a = std::max<int64_t>(o.begin, span.first);
        const int64_t b = std::min<int64_t>(o.end, span.first + span.n_tokens);
        if (a >= b) continue;
        auto & tally = tallies_of(l.il)[i];
        if (o.stats & EDGEKV_STAT_QUERIES && il == l.il)
            tally_queries(l, span, a, b, o.every, tally);
        if (o.stats & ~EDGEKV_STAT_QUERIES) score(l, il, span, a, b, tally, o.stats);
    }
    ms += (ggml_time_us() - t0) / 1000.0;
}

void edgekv_observers::end_layer(int il) {
    const auto & l = prompt.layer(il);
    if (!l.selects()) return;
    const int64_t n_rows = scratches.of(l).cap * l.n_head_kv;
    for (auto & t : tallies_of(il))
        if (t.on_device) t.there.fetch(t.columns(n_rows));
    if (capture_of[il] < 0) return;
    const auto & c = captured[capture_of[il]]; // has been looked at
    edgekv_give_back_pages(c.queries.t);
    edgekv_give_back_pages(c.raw_queries.t);
}

const edgekv_tally & edgekv_observers::tally_of(int observer) const {
    if (!scratches.in_work().selects()) {
        throw edgekv_error { EDGEKV_INVALID, "nothing is chosen of this layer" };
    }
    if (observer < 0 || observer >= (int) observers.size()) {
        throw edgekv_error { EDGEKV_INVALID, "no such observer" };
    }
    return tallies[place(prompt.il_done)][observer];
}
