// Reading a prompt layer by layer: scratch, cut graphs, slices, scores, eviction
#include "edgekv-prefill.h"
#include "edgekv-cache.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

#ifdef __GLIBC__
#include <malloc.h>
#endif

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
    if ((params.n_pieces && !params.pieces) || params.n_observers < 0 || (params.n_observers && !params.observers) || params.hidden < EDGEKV_HIDDEN_F32 || params.hidden > EDGEKV_HIDDEN_DISK) {
        throw edgekv_error { EDGEKV_INVALID, "a parameter of the prompt is null or out of range" };
    }
    if (p->pos0 + p->n_tokens > (int64_t) ctx->cparams.n_ctx_seq) {
        throw edgekv_error { EDGEKV_INVALID, "the prompt has " + std::to_string(p->n_tokens) + " tokens, the context has room for " +
            std::to_string((int64_t) ctx->cparams.n_ctx_seq - p->pos0) + ": use a larger --ctx-size or a shorter prompt" };
    }
    p->n_all = p->n_rows = p->n_tokens;
    for (int i = 0; i < params.n_pieces; ++i) {
        const int32_t n = params.pieces[i];
        if (n < 1 || n > EDGEKV_PROBE_MAX) throw edgekv_error { EDGEKV_INVALID, "a piece of the probe is empty or too long" };
        p->pieces.push_back(n);
        p->n_all += n;
        p->n_rows = std::max(p->n_rows, p->n_tokens + n);
    }
    const int64_t n_all = p->n_all;
    const int32_t n_vocab = ctx->model.vocab.n_tokens();
    for (int64_t i = 0; i < n_all; ++i) {
        if (params.tokens[i] < 0 || params.tokens[i] >= n_vocab) throw edgekv_error { EDGEKV_INVALID, "token " + std::to_string(params.tokens[i]) + " is not in the vocabulary" };
    }
    for (int i = 0; i < params.n_observers; ++i) {
        const auto & o = params.observers[i];
        if (o.begin < 0 || o.end <= o.begin || o.end > n_all) throw edgekv_error { EDGEKV_INVALID, "an observer lies outside the prompt" };
        p->observers.push_back(o);
    }
    p->tokens.assign(params.tokens, params.tokens + n_all);
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
            ctx->memory->seq_rm(0, p->pos0, -1);
            p->make_scratches();
            p->build_chunks();
        }
        p->place_inputs();
        if (p->by_layer && p->n_slice() > 1) {
            const int64_t width = p->chunks[0].resid[0]->ne[0]*p->chunks[0].resid[0]->ne[2]*p->chunks[0].resid[0]->ne[3];
            p->hidden = std::make_unique<edgekv_hidden>(p->hidden_mode, width, n_all, p->n_ubatch, p->dir);
        }
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
    ggml_backend_sched_reset(ctx->sched.get());
    if (!ended) ctx->memory->seq_rm(0, pos0, -1); // cells of the tokens that were not read in the end
    store->active = nullptr;
    ++store->version;
#ifdef __GLIBC__
    malloc_trim(0); // glibc keeps freed buffers of this size otherwise, and the process would look as big as at its peak
#endif
}

void edgekv_prefill::make_scratches() {
    scratches.clear();
    scratch_index.assign(store->layers.size(), -1);
    score_params.resize(store->layers.size());
    tallies.assign(by_layer ? 1 : store->layers.size(), std::vector<edgekv_tally>(observers.size()));
    for (size_t il = 0; il < store->layers.size(); ++il) {
        const auto & l = *store->layers[il];
        for (size_t j = 0; by_layer && j < il && scratch_index[il] < 0; ++j) { // one for all layers of a shape
            const auto & m = *store->layers[j];
            if (m.n_head_kv == l.n_head_kv && m.n_head == l.n_head && m.d_k == l.d_k && m.d_v == l.d_v && m.buft == l.buft) scratch_index[il] = scratch_index[j];
        }
        if (scratch_index[il] < 0) {
            scratch_index[il] = (int) scratches.size();
            scratches.push_back(std::make_unique<edgekv_scratch>());
        }
        auto & s = *scratches[scratch_index[il]];
        s.n_old = std::max<int64_t>(s.n_old, l.len_max());
    }
    for (size_t il = 0; il < store->layers.size(); ++il) {
        const auto & l = *store->layers[il];
        auto & s = *scratches[scratch_index[il]];
        if (s.t.k) continue;
        s.cap = s.n_old + n_rows;
        s.t = edgekv_tensors::make(l.buft, l.type_k, l.type_v, l.d_k, l.d_v, s.cap*l.n_head_kv, "scratch");
        if (max_observed) s.queries = edgekv_matrix::make(ggml_backend_cpu_buffer_type(), GGML_TYPE_F32, (int64_t) l.d_k*l.n_head, max_observed, "queries");
    }
}

edgekv_prompt_rows * edgekv_prefill::prompt_rows(const edgekv_layer & l, const edgekv_scratch & s, int64_t n_chunk) {
    prompt_rows_.push_back(std::make_unique<edgekv_prompt_rows>());
    auto & r = *prompt_rows_.back();
    for (int k = 0; k < l.n_head_kv; ++k) {
        r.first.push_back((int32_t) (k*s.cap + s.n_old - l.len[k]));
        r.len.push_back((int32_t) (l.len[k] + building->row + n_chunk));
    }
    for (int64_t t = 0; l.n_swa && t < n_chunk; ++t) r.start.push_back((int32_t) std::max<int64_t>(0, l.len[0] + building->row + t + 1 - l.n_swa));
    r.rows = { nullptr, nullptr, 0, 0, l.type_k, l.type_v, l.d_k, l.d_v, l.n_head, l.n_head_kv, r.first.data(), r.len.data(), 1.0f, 0.0f, nullptr };
    return &r;
}

// for backends without a kernel of ours: every chunk's mask is a window of one matrix, because who sees whom depends only on the distance
void edgekv_prefill::make_masks() {
    const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f), inf = ggml_fp32_to_fp16(-INFINITY);
    const int64_t n_mask = std::min(n_ubatch, n_rows);
    auto fill = [&](int64_t n_before, int n_swa) {
        auto m = edgekv_matrix::make(ggml_backend_cpu_buffer_type(), GGML_TYPE_F16, n_before + n_mask, n_mask, "mask");
        auto * x = (ggml_fp16_t *) m.t->data;
        for (int64_t i = 0; i < n_mask; ++i) for (int64_t j = 0; j < m.t->ne[0]; ++j, ++x) {
            const int64_t dist = n_before + i - j;
            *x = dist >= 0 && (n_swa == 0 || dist < n_swa) ? zero : inf;
        }
        return m;
    };
    int64_t n_old = 0;
    int n_swa = 0;
    bool full = false;
    for (const auto & l : store->layers) {
        if (l->n_swa) { n_swa = l->n_swa; continue; }
        full = true;
        n_old = std::max<int64_t>(n_old, l->len_max());
    }
    if (full) { mask_full_at = n_old + n_rows; mask_full = fill(mask_full_at, 0); }
    if (n_swa) { mask_swa_at = n_swa; mask_swa = fill(mask_swa_at, n_swa); }
}

ggml_tensor * edgekv_prefill::mask_view(const llm_graph_context & g, int n_swa, int64_t before, int64_t n) {
    ggml_tensor * m = n_swa ? mask_swa.t : mask_full.t;
    const int64_t at = (n_swa ? mask_swa_at : mask_full_at) - before;
    GGML_ASSERT(at >= 0 && at + n <= m->ne[0]);
    return ggml_view_2d(g.ctx0, m, n, g.n_tokens, m->nb[1], at*sizeof(ggml_fp16_t));
}

ggml_tensor * edgekv_prefill::row_input(const llm_graph_context & g, const edgekv_scratch & s) {
    for (auto & [scratch, t] : building->rows) if (scratch == &s) return t;
    const int64_t n_head_kv = s.t.k->ne[1]/s.cap;
    ggml_tensor * t = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I64, n_head_kv*g.n_tokens);
    ggml_set_input(t);
    building->rows.push_back({ &s, t });
    return t;
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
    const auto [a, b] = observed(building->first, building->n_tokens);
    if (a == b || l.n_swa) return nullptr;
    ggml_tensor * to = scratch_of(l).queries.t;
    ggml_tensor * src = ggml_view_3d(g.ctx0, q, q->ne[0], q->ne[1], b - a, q->nb[1], q->nb[2], (a - building->first)*q->nb[2]);
    ggml_tensor * dst = ggml_view_3d(g.ctx0, to, q->ne[0], q->ne[1], b - a, q->ne[0]*sizeof(float), to->nb[1], 0);
    return ggml_cpy(g.ctx0, src, dst);
}

bool edgekv_prefill::on_cpu() const {
    for (const auto & l : store->layers) if (!ggml_backend_buft_is_host(l->buft)) return false;
    return true;
}

void edgekv_prefill::build_chunks() {
    chunks.clear();
    prompt_rows_.clear();
    auto build = [&](int64_t first, int64_t n, int64_t row) {
        for (int64_t i = 0; i < n; i += n_ubatch) build_chunk(first + i, std::min(n_ubatch, n - i), row + i);
    };
    build(0, n_tokens, 0);
    int64_t first = n_tokens;
    for (int64_t n : pieces) {
        ctx->memory->seq_rm(0, (llama_pos) (pos0 + n_tokens), -1); // the piece before lay in these cells
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

    ctx->n_outputs = c.has_output ? 1 : 0;
    c.res = std::make_unique<llm_graph_result>(ctx->gf_res_reserve->get_max_nodes());
    c.res->reset();
    ggml_backend_sched_reset(ctx->sched.get());
    building = &c;
    c.gf = ctx->model.build_graph(ctx->graph_params(c.res.get(), c.mctx->get_ubatch(), c.mctx.get(), LLM_GRAPH_TYPE_DEFAULT));
    building = nullptr;
    if (by_layer && !find_cuts(c)) throw not_by_layer();
    if (!by_layer) c.cut = { 0, c.gf->n_nodes };
    for (int i = 0; i < c.gf->n_leafs; ++i) if (c.gf->leafs[i]->flags & GGML_TENSOR_FLAG_INPUT) c.inputs.push_back(c.gf->leafs[i]);
    chunks.push_back(std::move(c));
}

// ---- cutting

// the output of layer il is called l_out-il in most of llama.cpp's models; false if this graph cannot be cut there
bool edgekv_prefill::find_cuts(edgekv_chunk & c) const {
    const int n_layer = n_slice();
    std::unordered_map<std::string, int> by_name;
    for (int i = 0; i < c.gf->n_nodes; ++i) {
        const ggml_tensor * t = c.gf->nodes[i];
        if (strncmp(t->name, "l_out-", 6) != 0) continue;
        if (!by_name.emplace(t->name, i).second) return false; // a stack that is run more than once
    }
    c.cut.assign(1, 0);
    for (int il = 0; il < n_layer - 1; ++il) {
        const auto it = by_name.find("l_out-" + std::to_string(il));
        if (it == by_name.end()) return false;
        ggml_tensor * t = c.gf->nodes[it->second];
        const bool placeable = !t->view_src && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && ggml_nelements(t) % c.n_tokens == 0;
        const int64_t width = ggml_nelements(t)/c.n_tokens;
        const bool same_width = il == 0 || width == ggml_nelements(c.resid[0])/c.n_tokens;
        if (!placeable || !same_width || it->second + 1 <= c.cut.back()) return false;
        c.resid.push_back(t);
        c.cut.push_back(it->second + 1);
    }
    c.cut.push_back(c.gf->n_nodes); // the last slice takes the head
    std::vector<ggml_tensor *> nodes, replay;
    for (int s = 0; s < n_layer; ++s) if (!slice_nodes(c, s, nodes, replay)) return false;
    return true;
}

// Nodes of one slice. What it needs from before the cut, other than the hidden states, is computed again (scaled positions and the
// like); false if that leads back to another layer's output.
bool edgekv_prefill::slice_nodes(const edgekv_chunk & c, int slice, std::vector<ggml_tensor *> & nodes, std::vector<ggml_tensor *> & replay) const {
    nodes.clear();
    replay.clear();
    const int i0 = c.cut[slice], i1 = c.cut[slice + 1];
    std::unordered_set<const ggml_tensor *> have(c.gf->nodes + i0, c.gf->nodes + i1);
    have.insert(c.gf->leafs, c.gf->leafs + c.gf->n_leafs);
    if (slice > 0) have.insert(c.resid[slice - 1]);

    const std::unordered_set<const ggml_tensor *> other(c.resid.begin(), c.resid.end());
    // depth first without recursion on the C++ stack's mercy: the chains are a few nodes long
    auto need = [&](auto && self, ggml_tensor * t) -> bool {
        if (!t || have.count(t)) return true;
        if (other.count(t)) return false;
        if (t->op == GGML_OP_NONE && !t->view_src) return true; // a weight or a row tensor
        for (ggml_tensor * s : t->src) if (!self(self, s)) return false;
        if (!self(self, t->view_src)) return false;
        have.insert(t);
        replay.push_back(t);
        return true;
    };
    for (int i = i0; i < i1; ++i) {
        for (ggml_tensor * s : c.gf->nodes[i]->src) if (!need(need, s)) return false;
        if (!need(need, c.gf->nodes[i]->view_src)) return false;
    }
    nodes = replay;
    nodes.insert(nodes.end(), c.gf->nodes + i0, c.gf->nodes + i1);
    return true;
}

// Inputs live in a buffer of their own, filled once for all layers: the allocator neither moves them nor overlaps them. Those that no
// node reads still need an address, because llama.cpp may write them; they share one.
void edgekv_prefill::place_inputs() {
    size_t total = 0, unused = 128;
    for (auto & c : chunks) {
        std::unordered_set<const ggml_tensor *> read;
        for (int i = 0; i < c.gf->n_nodes; ++i) for (const ggml_tensor * s : c.gf->nodes[i]->src) {
            for (; s; s = s->view_src) read.insert(s);
        }
        for (auto * t : c.inputs) {
            const size_t n = GGML_PAD(ggml_nbytes(t), 128);
            if (read.count(t))                 total += n;
            else if (strcmp(t->name, "inp_embd") == 0) t->flags &= ~GGML_TENSOR_FLAG_INPUT; // never written: the batch has tokens
            else { unused = std::max(unused, n); c.unread.insert(t); }
        }
        c.inputs.erase(std::remove_if(c.inputs.begin(), c.inputs.end(), [](ggml_tensor * t) { return !(t->flags & GGML_TENSOR_FLAG_INPUT); }), c.inputs.end());
    }
    inputs.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), total + unused));
    if (!inputs) throw std::bad_alloc();
    char * base = (char *) ggml_backend_buffer_get_base(inputs.get()), * at = base + unused;
    for (auto & c : chunks) {
        for (auto * t : c.inputs) {
            const bool apart = !c.unread.count(t);
            t->buffer = inputs.get();
            t->data   = apart ? at : base;
            if (apart) at += GGML_PAD(ggml_nbytes(t), 128);
        }
        c.res->set_inputs(&c.mctx->get_ubatch());
        for (auto & [s, t] : c.rows) {
            if (!t->data) continue; // no layer of this chunk stores rows there
            auto * x = (int64_t *) t->data;
            const int64_t n_head_kv = s->t.k->ne[1]/s->cap;
            for (int64_t i = 0; i < c.n_tokens; ++i) for (int64_t k = 0; k < n_head_kv; ++k) *x++ = k*s->cap + s->n_old + c.row + i;
        }
    }
}

// ---- run: one layer over all chunks

void edgekv_prefill::lay_out_old(int il) {
    const auto & l = *store->layers[il];
    auto & s = *scratches[scratch_index[il]];
    for (int k = 0; k < l.n_head_kv; ++k) s.t.copy_rows(l.t, l.first[k], k*s.cap + s.n_old - l.len[k], l.len[k]);
}

void edgekv_prefill::run(int il) {
    const int n_layer = (int) store->layers.size();
    if (ended || broken || il != il_done + 1 || il >= n_layer || (il > 0 && !fresh[il - 1])) throw edgekv_error { EDGEKV_INVALID, "layers are read in order, and each is kept before the next" };
    for (auto & t : tallies[by_layer ? 0 : il]) if (by_layer) t = {};
    broken = true; // until it is read to its end

    if (by_layer || il == 0) {
        for (int l = by_layer ? il : 0; l < (by_layer ? il + 1 : n_layer); ++l) lay_out_old(l);
        for (auto & c : chunks) {
            run_slice(c, by_layer ? il : 0);
            for (int l = by_layer ? il : 0; l < (by_layer ? il + 1 : n_layer); ++l) observe(c, l);
            ++n_done;
            if (progress && !progress(n_done, (int32_t) chunks.size()*n_slice(), progress_data)) throw edgekv_error { EDGEKV_CANCELLED, "cancelled" };
        }
    }
    il_done = il;
    broken = false;
    if (store->layers[il]->n_swa) keep(nullptr, nullptr);
    note_peak();
}

const edgekv_layer & edgekv_prefill::in_work() const {
    if (ended || broken || il_done < 0 || !scratches[scratch_index[il_done]]->t.k) throw edgekv_error { EDGEKV_INVALID, "no layer is in work" };
    return *store->layers[il_done];
}

void edgekv_prefill::run_slice(edgekv_chunk & c, int slice) {
    auto * sched = ctx->sched.get();
    std::vector<ggml_tensor *> nodes, replay, leafs;
    if (!slice_nodes(c, slice, nodes, replay)) throw edgekv_error { EDGEKV_FAILED, "the graph changed between chunks" };
    for (auto * t : replay) { // it may still point to where an earlier slice had it
        if (!t->view_src || t->view_src->op != GGML_OP_NONE) t->data = nullptr;
        t->buffer = nullptr;
    }
    if (slice > 0) {
        ggml_tensor * in = c.resid[slice - 1];
        float * x = hidden->load(c.first, c.n_tokens);
        if (!x) throw edgekv_error { EDGEKV_FAILED, "the hidden states could not be read back from their file" };
        in->op = GGML_OP_NONE;
        memset(in->src, 0, sizeof(in->src));
        in->buffer = hidden->buffer();
        in->data   = x;
        leafs.push_back(in);
    }
    if (slice + 1 < n_slice()) { // in place: the last use of what came in is the sum that goes out
        ggml_tensor * out = c.resid[slice];
        out->buffer = hidden->buffer();
        out->data   = hidden->place(c.first);
    }
    leafs.insert(leafs.end(), c.inputs.begin(), c.inputs.end());

    ggml_cgraph g = *c.gf;
    g.nodes   = nodes.data();
    g.n_nodes = (int) nodes.size();
    g.leafs   = leafs.data();
    g.n_leafs = (int) leafs.size();
    g.uid     = 0;

    // the allocator compares counts and sizes, never topology: plan anew whenever another slice comes
    ggml_backend_sched_reset(sched);
    const bool alike = planned_slice == slice && planned_nodes == g.n_nodes && planned_output == c.has_output;
    if (!alike && !ggml_backend_sched_reserve(sched, &g)) throw std::bad_alloc();
    planned_slice = slice; planned_nodes = g.n_nodes; planned_output = c.has_output;
    if (!ggml_backend_sched_alloc_graph(sched, &g)) throw std::bad_alloc();

    if (ctx->graph_compute(&g, true) != GGML_STATUS_SUCCESS) throw edgekv_error { EDGEKV_CANCELLED, "the computation was stopped" };
    ggml_backend_sched_synchronize(sched);
    if (slice + 1 < n_slice() && !hidden->save(c.first, c.n_tokens)) throw edgekv_error { EDGEKV_FAILED, "the disk is full: the hidden states could not be written" };
    if (slice + 1 == n_slice() && c.has_output) fetch_logits(c);
}

void edgekv_prefill::fetch_logits(edgekv_chunk & c) {
    ggml_tensor * t = c.res->get_logits();
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(ctx->sched.get(), t);
    ggml_backend_tensor_get_async(backend, t, ctx->logits.data, 0, ctx->model.vocab.n_tokens()*sizeof(float));
    ggml_backend_sched_synchronize(ctx->sched.get());
}

// ---- score

namespace {

constexpr int SCORE_PARTS = 16;

struct score_job { edgekv_rows rows; edgekv_queries queries; edgekv_columns columns; };

void score_norm(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & j = *(const score_job *) data;
    for (int p = ith; p < SCORE_PARTS; p += nth) edgekv_cpu_score_norm(&j.rows, &j.queries, (float *) dst->data, p, SCORE_PARTS);
}

void score_columns(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & j = *(const score_job *) data;
    for (int p = ith; p < SCORE_PARTS; p += nth) edgekv_cpu_score_columns(&j.rows, &j.queries, (const float *) dst->src[0]->data, SCORE_PARTS, &j.columns, p, SCORE_PARTS);
}

// two nodes on the CPU backend: its threads, its barrier between them
bool compute_score(ggml_backend_t cpu, score_job & job) {
    ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead() + ggml_graph_overhead_custom(4, false), nullptr, true }) };
    ggml_tensor * norm = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, 2, job.queries.n_tokens, job.rows.n_head, SCORE_PARTS, nullptr, 0, score_norm, GGML_N_TASKS_MAX, &job);
    ggml_tensor * cols = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, 1, 1, 1, 1, &norm, 1, score_columns, GGML_N_TASKS_MAX, &job);
    ggml_cgraph * gf = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_build_forward_expand(gf, cols);
    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors(ctx.get(), cpu) };
    return buf && ggml_backend_graph_compute(cpu, gf) == GGML_STATUS_SUCCESS;
}

} // namespace

void edgekv_prefill::observe(const edgekv_chunk & c, int il) {
    const auto & l = *store->layers[il];
    if (l.n_swa) return;
    const int64_t t0 = ggml_time_us();
    const int64_t q0 = observed(c.first, c.n_tokens).first;
    for (size_t i = 0; i < observers.size(); ++i) {
        const int64_t a = std::max<int64_t>(observers[i].begin, c.first), b = std::min<int64_t>(observers[i].end, c.first + c.n_tokens);
        if (a < b) score(l, a - q0, b - q0, c.row + a - c.first, tallies[by_layer ? 0 : il][i], observers[i].stats);
    }
    score_ms += (ggml_time_us() - t0)/1000.0;
}

// queries [q0, q1) of the captured ones belong to the tokens whose rows begin at row0 behind the old ones
void edgekv_prefill::score(const edgekv_layer & l, int64_t q0, int64_t q1, int64_t row0, edgekv_tally & tally, uint32_t stats) {
    const auto & s = scratch_of(l);
    const int64_t n_scored = s.cap*l.n_head_kv;
    const int G = l.n_head/l.n_head_kv, n_q = (int) (q1 - q0);
    auto want = [&](uint32_t stat, std::vector<float> & x, int64_t n) -> float * {
        if (!(stats & stat)) return nullptr;
        if (x.empty()) x.assign(n, 0.0f);
        return x.data();
    };
    std::vector<int32_t> first(l.n_head_kv), len(l.n_head_kv), n_after(n_q);
    for (int k = 0; k < l.n_head_kv; ++k) {
        first[k] = (int32_t) (k*s.cap + s.n_old - l.len[k]);
        len[k]   = (int32_t) (l.len[k] + row0 + n_q);
    }
    for (int t = 0; t < n_q; ++t) n_after[t] = n_q - 1 - t;

    std::vector<char> host; // K of one layer, if it lies on a device
    const char * k = (const char *) s.t.k->data;
    if (!ggml_backend_buffer_is_host(s.t.buf.get())) {
        host.resize(ggml_nbytes(s.t.k));
        ggml_backend_tensor_get(s.t.k, host.data(), 0, host.size());
        k = host.data();
    }
    std::vector<float> sinks;
    const auto & sp = score_params[l.il];
    if (sp.sinks) { sinks.resize(l.n_head); ggml_backend_tensor_get(sp.sinks, sinks.data(), 0, sinks.size()*sizeof(float)); }

    score_job job;
    job.rows = { k, nullptr, s.t.k->nb[1], 0, l.type_k, l.type_v, l.d_k, l.d_v, l.n_head, l.n_head_kv, first.data(), len.data(), sp.scale, sp.softcap,
                 sinks.empty() ? nullptr : sinks.data() };
    job.queries = { (const float *) s.queries.t->data + q0*l.d_k*l.n_head, (int64_t) l.d_k*l.n_head, l.d_k, n_q, n_after.data(), nullptr };
    job.columns = { want(EDGEKV_STAT_MEAN, tally.sum, n_scored), want(EDGEKV_STAT_MAX, tally.max, n_scored), want(EDGEKV_STAT_ENTROPY, tally.entropy, n_scored),
                    want(EDGEKV_STAT_VAR, tally.mean, G*n_scored), want(EDGEKV_STAT_VAR, tally.m2, G*n_scored), n_scored, tally.n_seen };
    if (!compute_score(ctx->backend_cpu, job)) throw std::bad_alloc();
    tally.n_seen += n_q;
}

void edgekv_prefill::stat(int observer, edgekv_stat which, float * out) const {
    const auto & l = in_work();
    if (observer < 0 || observer >= (int) observers.size()) throw edgekv_error { EDGEKV_INVALID, "no such observer" };
    const auto & s = scratch_of(l);
    const auto & t = tallies[by_layer ? 0 : il_done][observer];
    const int64_t n_out = l.len_max() + n_tokens, n_all_rows = s.cap*l.n_head_kv;
    const int G = l.n_head/l.n_head_kv;
    const std::vector<float> * x = which == EDGEKV_STAT_MEAN ? &t.sum : which == EDGEKV_STAT_MAX ? &t.max : which == EDGEKV_STAT_ENTROPY ? &t.entropy :
                                   which == EDGEKV_STAT_VAR ? &t.m2 : nullptr;
    if (!x || x->empty()) throw edgekv_error { EDGEKV_INVALID, "this statistic was not asked for" };
    for (int k = 0; k < l.n_head_kv; ++k) {
        const int64_t from = k*s.cap + s.n_old - l.len[k], n = l.len[k] + n_tokens;
        float * o = out + k*n_out;
        std::fill(o + n, o + n_out, 0.0f);
        for (int64_t j = 0; j < n; ++j) {
            float y = (*x)[from + j];
            if (which == EDGEKV_STAT_MEAN) y /= t.n_seen;
            if (which == EDGEKV_STAT_VAR) {
                for (int g = 1; g < G; ++g) y += (*x)[g*n_all_rows + from + j];
                y /= (float) G*t.n_seen;
            }
            o[j] = y;
        }
    }
}

void edgekv_prefill::rows(int head, float * k, float * v) const {
    const auto & l = in_work();
    if (head < 0 || head >= l.n_head_kv) throw edgekv_error { EDGEKV_INVALID, "no such head" };
    const auto & s = scratch_of(l);
    const int64_t from = head*s.cap + s.n_old - l.len[head], n = l.len[head] + n_tokens;
    auto read = [&](const ggml_tensor * t, int d, float * out) {
        std::vector<char> host(n*t->nb[1]);
        ggml_backend_tensor_get(t, host.data(), from*t->nb[1], host.size());
        edgekv_cpu_rows_to_f32(t->type, host.data(), t->nb[1], 0, (int) n, d, out);
    };
    if (k) read(s.t.k, l.d_k, k);
    if (v) read(s.t.v, l.d_v, v);
}

// ---- evict

void edgekv_prefill::keep(const int32_t * counts, const int32_t * rows) {
    const auto & l = in_work();
    const auto & s = scratch_of(l);
    if (l.n_swa && fresh[il_done]) return;
    if (!l.n_swa && !counts) throw edgekv_error { EDGEKV_INVALID, "there are no counts" };
    bool all = true;
    std::vector<std::vector<int32_t>> lists(l.n_head_kv);
    std::vector<int64_t> base(l.n_head_kv);
    ranked[il_done].assign(l.n_head_kv, {});
    for (int k = 0; k < l.n_head_kv; ++k) {
        const int32_t n = (int32_t) (l.len[k] + n_tokens);
        base[k] = k*s.cap + s.n_old - l.len[k];
        if (l.n_swa) { // what the next token may see, and a little for short rewinds
            for (int32_t r = std::max(0, n - l.n_swa - 64); r < n; ++r) lists[k].push_back(r);
            continue;
        }
        if (counts[k] < 0 || counts[k] > n) throw edgekv_error { EDGEKV_INVALID, "a head cannot keep " + std::to_string(counts[k]) + " of " + std::to_string(n) + " rows" };
        if (counts[k] && !rows) throw edgekv_error { EDGEKV_INVALID, "there are no rows" };
        lists[k].assign(rows, rows + counts[k]);
        rows += counts[k];
        std::vector<bool> seen(n, false);
        for (int32_t r : lists[k]) {
            if (r < 0 || r >= n || seen[r]) throw edgekv_error { EDGEKV_INVALID, "row " + std::to_string(r) + " does not exist or is named twice" };
            seen[r] = true;
        }
        if (counts[k] == n) { // nothing evicted: in token order, so that the tail can be taken back
            ranked[il_done][k] = lists[k];
            std::sort(lists[k].begin(), lists[k].end());
        } else {
            all = false;
        }
    }
    auto f = std::make_unique<edgekv_layer>();
    f->il = l.il; f->n_head = l.n_head; f->n_head_kv = l.n_head_kv; f->d_k = l.d_k; f->d_v = l.d_v;
    f->type_k = l.type_k; f->type_v = l.type_v; f->n_swa = l.n_swa; f->buft = l.buft;
    f->pos.resize(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) for (int32_t r : lists[k]) f->pos[k].push_back(r < l.len[k] ? l.pos[k][r] : pos0 + r - l.len[k]);
    edgekv_gather(s.t, base, lists, *f);
    fresh[il_done] = std::move(f);
    evicted = evicted || !all;
    if (!by_layer) scratches[scratch_index[il_done]]->t = {}; // this layer's rows in full are not needed again
}

void edgekv_prefill::merge(int head, int n, const int32_t * rows, const float * k, const float * v) {
    if (ended || il_done < 0 || !fresh[il_done] || head < 0 || head >= fresh[il_done]->n_head_kv) throw edgekv_error { EDGEKV_INVALID, "no layer was kept just now, or it has no such head" };
    if (n < 0 || (n > 0 && (!rows || !k || !v))) throw edgekv_error { EDGEKV_INVALID, "there are no rows to merge" };
    auto & f = *fresh[il_done];
    for (int i = 0; i < n; ++i) if (rows[i] < 0 || rows[i] >= f.len[head]) throw edgekv_error { EDGEKV_INVALID, "a merged row is not among the kept ones" };
    auto write = [&](ggml_tensor * t, int d, const float * x) {
        std::vector<char> row(t->nb[1]);
        for (int i = 0; i < n; ++i) {
            ggml_quantize_chunk(t->type, x + (size_t) i*d, row.data(), 0, 1, d, nullptr);
            ggml_backend_tensor_set(t, row.data(), (f.first[head] + (size_t) rows[i])*t->nb[1], row.size());
        }
    };
    write(f.t.k, f.d_k, k);
    write(f.t.v, f.d_v, v);
}

void edgekv_prefill::shrink(int il, const int32_t * counts) {
    if (il < 0 || il >= (int) fresh.size() || !fresh[il]) throw edgekv_error { EDGEKV_INVALID, "this layer has not been kept yet" };
    auto & f = *fresh[il];
    if (f.n_swa) return;
    std::vector<std::vector<int32_t>> lists(f.n_head_kv);
    std::vector<std::vector<llama_pos>> pos(f.n_head_kv);
    for (int k = 0; k < f.n_head_kv; ++k) {
        if (counts[k] < 0 || counts[k] > f.len[k]) throw edgekv_error { EDGEKV_INVALID, "a finished layer can only shrink" };
    }
    if (std::equal(f.len.begin(), f.len.end(), counts)) return;
    evicted = true;
    for (int k = 0; k < f.n_head_kv; ++k) {
        auto & best = ranked[il][k];
        const bool whole = !best.empty() && counts[k] < f.len[k];
        for (int32_t i = 0; i < counts[k]; ++i) {
            lists[k].push_back(whole ? best[i] : i);
            pos[k].push_back(f.pos[k][lists[k].back()]);
        }
        if (whole) best.clear(); // from now on the head lies in that order
    }
    const std::vector<int64_t> base(f.first.begin(), f.first.end());
    const auto from = std::move(f.t);
    edgekv_gather(from, base, lists, f);
    f.pos = std::move(pos);
}

void edgekv_prefill::end() {
    if (ended) throw edgekv_error { EDGEKV_INVALID, "the prompt has ended already" };
    for (const auto & f : fresh) if (!f) throw edgekv_error { EDGEKV_INVALID, "not all layers were kept" };
    store->layers = std::move(fresh);
    store->n_past = (llama_pos) (pos0 + n_tokens);
    if (evicted) store->boundary = store->n_past;
    if (!pieces.empty()) ctx->memory->seq_rm(0, store->n_past, -1);
    ctx->n_outputs = 1;
    ctx->output_ids[0] = 0;
    ctx->n_queued_tokens += n_tokens;
    if (ctx->t_compute_start_us == 0) ctx->t_compute_start_us = ggml_time_us();
    ended = true;
}

void edgekv_prefill::note_peak() {
    size_t n = inputs ? ggml_backend_buffer_get_size(inputs.get()) : 0;
    n += mask_full.n_bytes() + mask_swa.n_bytes() + (hidden ? hidden->n_bytes() : 0);
    for (const auto & s : scratches) n += s->n_bytes();
    for (const auto & f : fresh) if (f) n += f->t.n_bytes();
    store->note_peak(n);
}
