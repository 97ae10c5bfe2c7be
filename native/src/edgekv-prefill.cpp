// Reading a prompt layer by layer: memory, graphs, and the loops turned round
#include "edgekv-prefill.h"
#include "edgekv-cache.h"
#include "edgekv-device.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <string>

static edgekv_error no_memory(const char * for_what) {
    return { EDGEKV_NO_MEMORY, std::string("not enough memory for ") + for_what + ": try a shorter prompt, a smaller --ubatch-size or --kv-hidden disk" };
}

namespace { struct not_by_layer {}; } // a graph that cannot be cut

// ---- begin: check, take memory, build graphs

std::unique_ptr<edgekv_prefill> edgekv_prefill::begin(llama_context * ctx, const edgekv_prefill_params & params) {
    auto p = std::unique_ptr<edgekv_prefill>(new edgekv_prefill());
    p->ctx   = ctx;
    p->store = edgekv_store_of(ctx->memory.get());
    if (!p->store)        throw edgekv_error { EDGEKV_UNSUPPORTED, "this context keeps llama.cpp's own cache" };
    if (p->store->active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read already" };
    p->n_tokens = params.n_tokens;
    p->n_ubatch = ctx->cparams.n_ubatch;
    p->pos0     = p->store->n_past;
    if (p->n_tokens < 1 || params.n_pieces < 0 || !params.tokens) throw edgekv_error { EDGEKV_INVALID, "there are no tokens to read" };
    if ((params.n_pieces && !params.pieces) || params.n_observers < 0 || (params.n_observers && !params.observers) || params.hidden < EDGEKV_HIDDEN_F32 || params.hidden >= EDGEKV_HIDDEN_MODES) {
        throw edgekv_error { EDGEKV_INVALID, "a parameter of the prompt is null or out of range" };
    }
    const auto & memory = *dynamic_cast<const edgekv_memory *>(ctx->get_memory());
    if (p->pos0 + p->n_tokens > (int64_t) memory.n_ctx) {
        throw edgekv_error { EDGEKV_INVALID, "the prompt has " + std::to_string(p->n_tokens) + " tokens, the context has room for " +
            std::to_string((int64_t) memory.n_ctx - p->pos0) + ": use a larger --ctx-size or a shorter prompt" };
    }
    p->n_all = p->n_rows = p->n_tokens;
    for (int i = 0; i < params.n_pieces; ++i) {
        const int32_t n = params.pieces[i];
        if (n < 1 || n > EDGEKV_PROBE_MAX) throw edgekv_error { EDGEKV_INVALID, "a piece of the probe is empty or too long" };
        p->pieces.push_back(n);
        p->n_all += n;
        p->n_rows = std::max(p->n_rows, p->n_tokens + n);
    }
    if (p->pos0 + p->n_rows > memory.n_positions) {
        throw edgekv_error { EDGEKV_INVALID, "this method reads the prompt twice, and the model has learned " +
            std::to_string(memory.n_positions) + " positions: use a shorter prompt or another --kv-method" };
    }
    const int64_t n_all = p->n_all;
    const int32_t n_vocab = ctx->model.vocab.n_tokens();
    for (int64_t i = 0; i < n_all; ++i) {
        if (params.tokens[i] < 0 || params.tokens[i] >= n_vocab) throw edgekv_error { EDGEKV_INVALID, "token " + std::to_string(params.tokens[i]) + " is not in the vocabulary" };
    }
    for (int i = 0; i < params.n_observers; ++i) {
        const auto & o = params.observers[i];
        if (o.begin < 0 || o.end <= o.begin || o.end > n_all) throw edgekv_error { EDGEKV_INVALID, "an observer lies outside the prompt" };
        if (o.every < 0) throw edgekv_error { EDGEKV_INVALID, "an observer cannot look at one of " + std::to_string(o.every) + " tokens" };
        p->observers.push_back(o);
        p->observers.back().every = std::max(o.every, 1);
        if (o.stats & EDGEKV_STAT_QUERIES) {
            const int64_t step = p->observers.back().every;
            p->query_step = !p->wants_queries || p->query_step == step ? step : 1;
        }
        p->wants_queries = p->wants_queries || (o.stats & EDGEKV_STAT_QUERIES);
        p->wants_columns = p->wants_columns || (o.stats & ~EDGEKV_STAT_QUERIES);
    }
    p->tokens.assign(params.tokens, params.tokens + n_all);
    p->store->place_pos(); // missing where memory was when rows moved last
    p->hidden_mode   = params.hidden;
    p->dir           = params.dir ? params.dir : "";
    p->progress      = params.progress;
    p->progress_data = params.data;

    ctx->synchronize();
    ctx->sched_reserve();
    ctx->output_swaps.clear();
    ctx->embd_batch_idxs.clear();
    for (auto & r : ctx->gf_res_prev) if (r) r->reset(); // they point into the scheduler's buffer
    ctx->gf_res_prev_active = nullptr;
    if (ctx->output_reserve(1) < 1) throw no_memory("the logits");

    p->before.save(edgekv_recurrent_of(ctx->memory.get()));
    p->store->active = p.get(); // from here on the destructor cleans up
    try {
        p->max_observed = 0;
        for (const auto & o : p->observers) p->max_observed = std::max<int64_t>(p->max_observed, std::min<int64_t>(p->n_ubatch, o.end - o.begin));
        if (p->observers.size() > 1 && p->max_observed) p->max_observed = p->n_ubatch; // two ranges may share a chunk
        if (p->store->graph_attend || !p->on_cpu()) p->make_masks();
        const char * whole = getenv("EDGEKV_WHOLE"); // for tests: as for a graph that cannot be cut
        p->by_layer = !(whole && atoi(whole));
        p->make_scratches();
        try {
            p->build_chunks();
        } catch (const not_by_layer &) { // start again, all layers at once
            p->by_layer = false;
            p->forget();
            p->make_scratches();
            p->build_chunks();
        }
        p->place_inputs();
        if (p->by_layer && p->n_slice() > 1) {
            const int64_t width = ggml_nelements(p->graphs[0]->resid[0])/p->graphs[0]->n_tokens;
            const auto mode = p->hidden_mode == EDGEKV_HIDDEN_DEVICE && !p->on_one_device() ? EDGEKV_HIDDEN_F32 : p->hidden_mode;
            p->hidden = std::make_unique<edgekv_hidden>(mode, width, n_all, p->device(), p->dir);
        }
        p->reserve();
    } catch (const std::bad_alloc &) {
        throw no_memory("this prompt");
    }
    p->fresh.resize(p->store->layers.size());
    p->ranked.resize(p->store->layers.size());
    p->note_peak();
    return p;
}

edgekv_prefill::~edgekv_prefill() {
    if (!store || store->active != this) return;
    scratches.clear();
    hidden.reset();
    chunks.clear();
    graphs.clear();
    ggml_backend_sched_reset(ctx->sched.get());
    if (!ended) forget();
    store->active = nullptr;
    ++store->version;
    edgekv_device::report();
    edgekv_trim_heap(); // the process would look as big as at its peak
}

static edgekv_memory & memory_of(llama_context & ctx) { return *dynamic_cast<edgekv_memory *>(ctx.get_memory()); }

// cells and recurrent states of tokens that were not read in the end
void edgekv_prefill::forget() {
    memory_of(*ctx).forget_cells(pos0);
    before.restore();
}

void edgekv_prefill::lose_context() noexcept {
    ctx   = nullptr;
    store = nullptr;
    planned = {};
    chunks.clear();
    graphs.clear();
    scratches.clear();
    fresh.clear();
    hidden.reset();
    inputs.reset();
    before.clear();
    for (auto * m : { &mask_full, &mask_swa, &device_work }) *m = {};
    tallies.clear();
}

void edgekv_prefill::make_scratches() {
    scratches.clear();
    scratch_index.assign(store->layers.size(), -1);
    score_params.resize(store->layers.size());
    query_paths.resize(store->layers.size());
    tallies.clear();
    tallies.resize(by_layer ? 1 : store->layers.size());
    for (auto & t : tallies) t.resize(observers.size());
    for (size_t il = 0; il < store->layers.size(); ++il) {
        const auto & l = *store->layers[il];
        if (l.n_head_kv == 0) continue; // nothing is stored
        for (size_t j = 0; by_layer && j < il && scratch_index[il] < 0; ++j) { // one for all layers of a shape
            const auto & m = *store->layers[j];
            if (m.n_head_kv == l.n_head_kv && m.n_head == l.n_head && m.d_k == l.d_k && m.d_v == l.d_v && m.buft == l.buft) scratch_index[il] = scratch_index[j];
        }
        if (scratch_index[il] < 0) {
            scratch_index[il] = (int) scratches.size();
            scratches.push_back(std::make_unique<edgekv_scratch>());
        }
        auto & s = *scratches[scratch_index[il]];
        s.n_old = std::max<int64_t>(s.n_old, l.len_max() + (ggml_backend_buft_is_host(l.buft) ? 0 : EDGEKV_FLASH_ROWS - 1));
    }
    for (size_t il = 0; il < store->layers.size(); ++il) {
        const auto & l = *store->layers[il];
        if (l.n_head_kv == 0) continue;
        auto & s = *scratches[scratch_index[il]];
        if (s.t.k) continue;
        s.cap = (s.n_old + n_rows + l.row_step - 1)/l.row_step*l.row_step;
        s.t = edgekv_tensors::make(l.buft, l.type_k, l.type_v, l.d_k, l.d_v, s.cap*l.n_head_kv, "scratch");
        if (l.max_bias != 0.0f) s.pos.resize(s.cap*l.n_head_kv);
        if (l.row_step > 1 || !ggml_backend_buft_is_host(l.buft)) ggml_backend_buffer_clear(s.t.buf.get(), 0); // masked rows are multiplied too: they must be numbers
        const auto queries = [&](ggml_backend_buffer_type_t buft) { return edgekv_matrix::make(buft, GGML_TYPE_F32, (int64_t) l.d_k*l.n_head, max_observed, "queries"); };
        if (wants_columns) s.queries = queries(scorer(l) ? l.buft : ggml_backend_cpu_buffer_type());
        if (wants_columns && by_kernel(l)) s.norm.resize(2*l.n_head*std::min(n_ubatch, n_all));
        if (wants_queries) s.raw_queries = queries(ggml_backend_cpu_buffer_type());
    }
}

edgekv_prompt_rows * edgekv_prefill::prompt_rows(const edgekv_layer & l) {
    const auto & s = scratch_of(l);
    building->prompt_rows.push_back(std::make_unique<edgekv_prompt_rows>());
    auto & r = *building->prompt_rows.back();
    r.layer = &l;
    for (int k = 0; k < l.n_head_kv; ++k) r.first.push_back((int32_t) (k*s.cap + s.n_old - l.len[k]));
    r.len.resize(l.n_head_kv);
    r.start.resize(l.n_swa ? building->n_tokens : 0);
    r.norm = l.n_swa || s.norm.empty() ? nullptr : const_cast<float *>(s.norm.data());
    r.rows = { nullptr, nullptr, 0, 0, l.type_k, l.type_v, l.d_k, l.d_v, l.n_head, l.n_head_kv, r.first.data(), r.len.data(), 1.0f, 0.0f, nullptr,
               s.pos.empty() ? nullptr : s.pos.data(), l.max_bias };
    return &r;
}

// for backends without a kernel of ours: every chunk's mask is a window of one matrix, because who sees whom depends only on the distance
void edgekv_prefill::make_masks() {
    const ggml_fp16_t inf = ggml_fp32_to_fp16(-INFINITY);
    const bool alibi = std::any_of(store->layers.begin(), store->layers.end(), [](const auto & l) { return l->max_bias != 0.0f; });
    const int64_t n_mask = std::min(n_ubatch, n_rows);
    int n_hidden = 0; // columns that nobody sees
    for (const auto & l : store->layers) n_hidden = std::max(n_hidden, l->row_step - 1 + EDGEKV_FLASH_ROWS - 1);
    auto fill = [&](int64_t n_before, int n_swa) {
        auto m = edgekv_matrix::make(store->layers.back()->buft, GGML_TYPE_F16, n_before + n_mask + n_hidden, n_mask, "mask");
        std::vector<ggml_fp16_t> row(m.t->ne[0]);
        for (int64_t i = 0; i < n_mask; ++i) {
            for (int64_t j = 0; j < m.t->ne[0]; ++j) {
                const int64_t dist = n_before + i - j;
                row[j] = dist >= 0 && (n_swa == 0 || dist < n_swa) ? ggml_fp32_to_fp16(alibi ? (float) -dist : 0.0f) : inf;
            }
            ggml_backend_tensor_set(m.t, row.data(), i*m.t->nb[1], m.t->nb[1]);
        }
        return m;
    };
    int64_t n_old = 0;
    int n_swa = 0;
    bool full = false;
    for (const auto & l : store->layers) {
        if (l->n_swa) n_swa = l->n_swa;
        if (!l->selects()) continue;
        full = true;
        n_old = std::max<int64_t>(n_old, l->len_max());
    }
    if (full) { mask_full_at = n_old + n_rows; mask_full = fill(mask_full_at, 0); }
    if (n_swa) { mask_swa_at = n_swa; mask_swa = fill(mask_swa_at, n_swa); }
}

// F16 [rows, n_tokens]: minus the distances of a head's old rows, which lie anywhere in front of the chunk
ggml_tensor * edgekv_prefill::old_distances(const llm_graph_context & g, const edgekv_layer & l, int head) const {
    const int64_t n = l.len[head], at = pos0 + chunk_row();
    ggml_tensor * rows = ggml_view_1d(g.ctx0, l.row_pos.t, n, l.first[head]*sizeof(float));
    ggml_tensor * tokens = ggml_reshape_2d(g.ctx0, ggml_arange(g.ctx0, (float) at, (float) (at + g.n_tokens), 1.0f), 1, g.n_tokens);
    ggml_tensor * all = ggml_repeat(g.ctx0, rows, ggml_new_tensor_2d(g.ctx0, GGML_TYPE_F32, n, g.n_tokens));
    return ggml_cast(g.ctx0, ggml_sub(g.ctx0, all, tokens), GGML_TYPE_F16);
}

ggml_tensor * edgekv_prefill::mask_view(const llm_graph_context & g, const edgekv_layer & l, int head, int64_t before, int64_t n, int64_t pad) {
    ggml_tensor * m = l.n_swa ? mask_swa.t : mask_full.t;
    const int64_t n_old = l.max_bias != 0.0f ? l.len[head] : 0; // their distances are not those of a window
    before -= n_old; n -= n_old;
    const int64_t at = (l.n_swa ? mask_swa_at : mask_full_at) - before;
    GGML_ASSERT(at >= 0 && at + n <= m->ne[0]);
    auto columns = [&](int64_t first, int64_t n) { // some backends want no gaps
        return ggml_cont(g.ctx0, ggml_view_2d(g.ctx0, m, n, g.n_tokens, m->nb[1], first*sizeof(ggml_fp16_t)));
    };
    ggml_tensor * mask = columns(at, n);
    if (n_old > 0) mask = ggml_concat(g.ctx0, old_distances(g, l, head), mask, 0);
    return pad ? ggml_concat(g.ctx0, columns(m->ne[0] - pad, pad), mask, 0) : mask;
}

ggml_tensor * edgekv_prefill::row_input(const llm_graph_context & g, const edgekv_scratch & s) {
    for (auto & [scratch, t] : building->rows) if (scratch == &s) return t;
    const int64_t n_head_kv = s.t.k->ne[1]/s.cap;
    ggml_tensor * t = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I64, n_head_kv*g.n_tokens);
    ggml_set_input(t);
    building->rows.push_back({ &s, t });
    return t;
}

ggml_tensor * edgekv_prefill::heads_input(const llm_graph_context & g, const edgekv_layer & l) {
    ggml_tensor * t = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I32, 2*l.n_head_kv + (l.n_swa ? g.n_tokens : 0));
    ggml_set_input(t);
    building->heads.push_back({ &l, t });
    return t;
}

bool edgekv_prefill::flash_takes(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q) const {
    const int64_t N = l.row_step > 1 ? 255 : EDGEKV_FLASH_ROWS; // of some head sizes CUDA takes only multiples of 256
    const ggml_context_ptr ctx { ggml_init({ 8*ggml_tensor_overhead(), nullptr, true }) };
    if (!ctx) throw std::bad_alloc();
    auto like = [&](ggml_type type, int64_t d, int64_t n, int64_t n_head) { return ggml_new_tensor_3d(ctx.get(), type, d, n, n_head); };
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, N, g.n_tokens);
    ggml_tensor * node = ggml_flash_attn_ext(ctx.get(), like(q->type, l.d_k, g.n_tokens, l.n_head), like(l.type_k, l.d_k, N, l.n_head_kv),
            like(l.type_v, l.d_v, N, l.n_head_kv), mask, 1.0f, 0.0f, 0.0f);
    return ggml_backend_dev_supports_op(ggml_backend_buft_get_device(l.buft), node);
}

std::pair<int64_t, int64_t> edgekv_prefill::observed(int64_t first, int64_t n) const {
    int64_t a = first + n, b = first;
    for (const auto & o : observers) {
        const int64_t x = std::max<int64_t>(o.begin, first), y = std::min<int64_t>(o.end, first + n);
        if (x < y) { a = std::min(a, x); b = std::max(b, y); }
    }
    return a < b ? std::make_pair(a, b) : std::make_pair(first, first);
}

ggml_tensor * edgekv_prefill::capture_queries(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q, float scale, float softcap, ggml_tensor * sinks) {
    score_params[l.il] = { scale, softcap, sinks };
    const auto [a, b] = building->observed;
    if (!wants_columns || a == b || !l.selects()) return nullptr;
    ggml_tensor * to = scratch_of(l).queries.t;
    ggml_tensor * src = ggml_view_3d(g.ctx0, q, q->ne[0], q->ne[1], b - a, q->nb[1], q->nb[2], a*q->nb[2]);
    ggml_tensor * dst = ggml_view_3d(g.ctx0, to, q->ne[0], q->ne[1], b - a, q->ne[0]*sizeof(float), to->nb[1], 0);
    return ggml_cpy(g.ctx0, src, dst);
}

// the first that layers lie on; null: all are in main memory
ggml_backend_dev_t edgekv_prefill::device() const {
    for (const auto & l : store->layers) if (!ggml_backend_buft_is_host(l->buft)) return ggml_backend_buft_get_device(l->buft);
    return nullptr;
}

bool edgekv_prefill::on_one_device() const {
    const auto & all = store->layers;
    return device() && all.size() == ctx->model.hparams.n_layer() && std::all_of(all.begin(), all.end(), [&](const auto & l) { return l->buft == all[0]->buft; });
}

void edgekv_prefill::build_chunks() {
    chunks.clear();
    graphs.clear();
    auto build = [&](int64_t first, int64_t n, int64_t row) {
        for (int64_t i = 0; i < n; i += n_ubatch) build_chunk(first + i, std::min(n_ubatch, n - i), row + i);
    };
    build(0, n_tokens, 0);
    int64_t first = n_tokens;
    for (int64_t n : pieces) {
        memory_of(*ctx).forget_cells((llama_pos) (pos0 + n_tokens)); // the piece before lay there
        build(first, n, n_tokens);
        first += n;
    }
}

void edgekv_prefill::build_chunk(int64_t first, int64_t n, int64_t row) {
    edgekv_chunk c;
    c.first = first;
    c.n_tokens = n;
    c.row = row;
    c.has_output = n_tokens - 1 >= first && n_tokens - 1 < first + n;

    std::vector<llama_pos> pos(n);
    std::vector<int8_t> output(n, 0);
    for (int64_t i = 0; i < n; ++i) pos[i] = (llama_pos) (pos0 + row + i);
    if (c.has_output) output[n_tokens - 1 - first] = 1;
    llama_batch b = {};
    b.n_tokens = (int32_t) n;
    b.token    = tokens.data() + first;
    b.pos      = pos.data();
    b.logits   = output.data();
    llama_batch_compat compat(ctx, b);
    if (!ctx->balloc->init(*compat.batch_ext, ctx->model.vocab, false)) throw edgekv_error { EDGEKV_FAILED, "llama.cpp refused the batch" };
    c.mctx = ctx->memory->init_batch(*ctx->balloc, (uint32_t) n_ubatch, false);
    if (!c.mctx || c.mctx->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !c.mctx->apply()) throw edgekv_error { EDGEKV_FAILED, "llama.cpp found no place for the batch" };

    c.graph = &graph_for(c);
    chunks.push_back(std::move(c));
}

// a graph that other chunks use already, or a new one
edgekv_graph & edgekv_prefill::graph_for(const edgekv_chunk & c) {
    auto seen = observed(c.first, c.n_tokens);
    seen = { seen.first - c.first, seen.second - c.first };
    const bool alone = store->graph_attend || !on_cpu(); // shapes depend on how many rows lie in front
    const auto * recurrent = edgekv_recurrent_of(ctx->memory.get());
    const int32_t cleared = recurrent ? recurrent->rs_z : -1;
    for (auto & g : graphs) {
        if (!alone && g->n_tokens == c.n_tokens && g->has_output == c.has_output && g->cleared == cleared && g->observed == seen) return *g;
    }
    graphs.push_back(std::make_unique<edgekv_graph>());
    auto & g = *graphs.back();
    g.n_tokens   = c.n_tokens;
    g.has_output = c.has_output;
    g.cleared    = cleared;
    g.observed   = seen;
    ctx->n_outputs = c.has_output ? 1 : 0;
    g.res = std::make_unique<llm_graph_result>(ctx->gf_res_reserve->get_max_nodes());
    g.res->reset();
    ggml_backend_sched_reset(ctx->sched.get());
    building = &g;
    building_for = &c;
    g.gf = ctx->model.build_graph(ctx->graph_params(g.res.get(), c.mctx->get_ubatch(), c.mctx.get(), LLM_GRAPH_TYPE_DEFAULT));
    building = nullptr;
    building_for = nullptr;
    if (g.has_output && !g.res->get_logits()) throw edgekv_error { EDGEKV_UNSUPPORTED, "this model gives no logits: it is made for embeddings" };
    if (by_layer && !find_cuts(g)) throw not_by_layer();
    if (!by_layer) g.cut = { 0, g.gf->n_nodes };
    for (int i = 0; i < g.gf->n_leafs; ++i) if (g.gf->leafs[i]->flags & GGML_TENSOR_FLAG_INPUT) g.inputs.push_back(g.gf->leafs[i]);
    if (ggml_backend_sched_get_n_backends(ctx->sched.get()) > 1) {
        g.sources.resize(g.gf->n_nodes);
        for (int i = 0; i < g.gf->n_nodes; ++i) std::copy_n(g.gf->nodes[i]->src, GGML_MAX_SRC, g.sources[i].begin());
    }
    return g;
}

// ---- run: one layer over all chunks

void edgekv_prefill::lay_out_old(int il) {
    const auto & l = *store->layers[il];
    if (l.n_head_kv == 0) return;
    auto & s = *scratches[scratch_index[il]];
    std::vector<int32_t> to(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) to[k] = (int32_t) (k*s.cap + s.n_old - l.len[k]);
    s.t.copy_heads(l.t, l.first, to, l.len);
    for (int k = 0; k < l.n_head_kv && !s.pos.empty(); ++k) {
        float * p = s.pos.data() + to[k];
        for (llama_pos x : l.pos[k]) *p++ = (float) x;
        for (int64_t j = 0; j < n_rows; ++j) *p++ = (float) (pos0 + j);
    }
}

void edgekv_prefill::run(int il) {
    const int n_layer = (int) store->layers.size();
    if (ended || broken || il != il_done + 1 || il >= n_layer || (il > 0 && !fresh[il - 1])) throw edgekv_error { EDGEKV_INVALID, "layers are read in order, and each is kept before the next" };
    for (auto & t : tallies[by_layer ? 0 : il]) if (by_layer) t.clear();
    broken = true; // until it is read to its end

    if (by_layer)     run_chunks(il, il + 1);
    else if (il == 0) run_chunks(0, n_layer);
    il_done = il;
    broken = false;
    note_peak();
    if (by_layer && il + 1 == n_layer) { // no layer comes that would need them
        hidden.reset();
        inputs.reset();
        for (auto & s : scratches) { s->queries = {}; s->raw_queries = {}; s->norm = {}; }
        for (auto & t : tallies[0]) t.there = {};
    }
    if (!store->layers[il]->selects()) keep(nullptr, nullptr);
}

// all chunks through layers [begin, end), which are one slice
void edgekv_prefill::run_chunks(int begin, int end) {
    for (int il = begin; il < end; ++il) lay_out_old(il);
    const auto * recurrent = edgekv_recurrent_of(ctx->memory.get());
    edgekv_recurrent_rows at_end; // of the prompt: every piece goes on from there, and so does the conversation
    for (auto & c : chunks) {
        const bool is_piece = c.first >= n_tokens;
        if (recurrent && is_piece && at_end.rows.empty()) at_end.save(*recurrent, begin, end);
        if (is_piece && c.row == n_tokens) at_end.restore();
        run_slice(c, by_layer ? begin : 0);
        for (int il = begin; il < end; ++il) observe(c, il);
        ++n_done;
        if (progress && !progress(n_done, (int32_t) chunks.size()*n_slice(), progress_data)) throw edgekv_error { EDGEKV_CANCELLED, "cancelled" };
    }
    at_end.restore();
    for (int il = begin; il < end; ++il) fetch_columns(il);
}

const edgekv_layer & edgekv_prefill::in_work() const {
    if (ended || broken || il_done < 0 || (store->layers[il_done]->n_head_kv && !scratches[scratch_index[il_done]]->t.k)) throw edgekv_error { EDGEKV_INVALID, "no layer is in work" };
    return *store->layers[il_done];
}

// ---- end

void edgekv_prefill::end() {
    if (ended) throw edgekv_error { EDGEKV_INVALID, "the prompt has ended already" };
    for (const auto & f : fresh) if (!f) throw edgekv_error { EDGEKV_INVALID, "not all layers were kept" };
    for (const auto & f : fresh) f->place_pos((llama_pos) (pos0 + n_tokens));
    store->layers = std::move(fresh);
    store->n_past = (llama_pos) (pos0 + n_tokens);
    if (evicted) store->boundary = store->n_past;
    if (!pieces.empty()) memory_of(*ctx).forget_cells(store->n_past);
    memory_of(*ctx).n_mark = -1;
    memory_of(*ctx).mark.clear();
    ctx->n_outputs = 1;
    ctx->output_ids[0] = 0;
    ctx->n_queued_tokens += n_tokens;
    if (ctx->t_compute_start_us == 0) ctx->t_compute_start_us = ggml_time_us();
    ended = true;
}

void edgekv_prefill::note_peak() {
    size_t n = inputs ? ggml_backend_buffer_get_size(inputs.get()) : 0;
    n += before.n_bytes() + mask_full.n_bytes() + mask_swa.n_bytes() + (hidden ? hidden->n_bytes() : 0);
    for (const auto & s : scratches) n += s->n_bytes();
    for (const auto & f : fresh) if (f) n += f->t.n_bytes();
    for (const auto & layer : tallies) for (const auto & t : layer) n += t.there.n_bytes();
    store->note_peak(n);
}
