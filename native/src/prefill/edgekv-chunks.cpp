// Cutting a prompt into chunks; graphs and inputs for them
#include "edgekv-chunks.h"
#include "edgekv-cache.h"
#include "edgekv-context.h"
#include "edgekv-error.h"
#include "edgekv-pages.h"

#include "llama-context.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>

// llama.cpp takes memory for the largest graph that a model could have, and fills it with zeros; of
// a hybrid's that is 9 MB, most of which no tensor is ever in
static void give_back_unused(ggml_context & ctx) {
    const size_t used = ggml_used_mem(&ctx);
    edgekv_give_back_pages(
        (char *) ggml_get_mem_buffer(&ctx) + used, ggml_get_mem_size(&ctx) - used);
}

// Tokens whose windows begin together, where masks are made for whole chunks and windows do not
// slide; 0: chunks may end anywhere
int64_t edgekv_chunks::window_step() const {
    for (const auto & l : prompt.store->layers)
        if (l->chunked && !prompt.by_kernel(*l)) return l->n_swa;
    return 0;
}

void edgekv_chunks::build() {
    clear();
    const int64_t step = window_step();
    auto build = [&](int64_t first, int64_t n, int64_t row) {
        for (int64_t i = 0, n_here; i < n; i += n_here) {
            n_here = std::min(prompt.n_ubatch, n - i);
            if (step > 0) n_here = std::min(n_here, step - (prompt.pos0 + row + i) % step);
            build_chunk(first + i, n_here, row + i);
        }
    };
    build(0, prompt.n_tokens, 0);
    int64_t first = prompt.n_tokens;
    const auto end = (llama_pos) (prompt.pos0 + prompt.n_tokens);
    for (int64_t n : prompt.pieces) {
        edgekv_memory_of(*prompt.ctx).forget_cells(end); // the piece before lay there
        build(first, n, prompt.n_tokens);
        first += n;
    }
}

void edgekv_chunks::build_chunk(int64_t first, int64_t n, int64_t row) {
    edgekv_chunk c;
    c.first = first;
    c.n_tokens = n;
    c.row = row;
    c.n_outputs = prompt.outputs_of(first, n);

    std::vector<llama_pos> pos(n);
    std::vector<int8_t> output(n, 0);
    for (int64_t i = 0; i < n; ++i) pos[i] = (llama_pos) (prompt.pos0 + row + i);
    std::fill(output.end() - c.n_outputs, output.end(), 1);
    llama_batch b = {};
    b.n_tokens = (int32_t) n;
    b.token = const_cast<llama_token *>(prompt.tokens.data()) + first;
    b.pos = pos.data();
    b.logits = output.data();
    c.mctx = edgekv_context::place(*prompt.ctx, b);
    c.graph = &graph_for(c);
    chunks.push_back(std::move(c));
}

// a graph that other chunks use already, or a new one
edgekv_graph & edgekv_chunks::graph_for(const edgekv_chunk & c) {
    const auto seen = observers.seen(c);
    // shapes depend on how many rows lie in front
    const bool alone = prompt.store->graph_attend || !prompt.on_cpu();
    const auto * recurrent = edgekv_recurrent_of(prompt.ctx->get_memory());
    const int32_t cleared = recurrent ? recurrent->rs_z : -1;
    const bool has_hidden = prompt.has_hidden(c);
    for (auto & g : graphs) {
        if (!alone && g->n_tokens == c.n_tokens && g->n_outputs == c.n_outputs &&
            g->cleared == cleared && g->observed == seen && g->has_hidden == has_hidden)
            return *g;
    }
    graphs.push_back(std::make_unique<edgekv_graph>());
    auto & g = *graphs.back();
    g.n_tokens = c.n_tokens;
    g.n_outputs = c.n_outputs;
    g.cleared = cleared;
    g.observed = seen;
    g.has_hidden = has_hidden;
    g.res = std::make_unique<llm_graph_result>(edgekv_context::max_nodes(*prompt.ctx));
    building = &g;
    building_for = &c;
    g.gf = edgekv_context::build(*prompt.ctx, *g.res, *c.mctx, (int) c.n_outputs);
    building = nullptr;
    building_for = nullptr;
    give_back_unused(*g.res->get_ctx());
    if (g.n_outputs > 0 && !g.res->get_logits())
        throw edgekv_error { EDGEKV_UNSUPPORTED,
            "this model gives no logits: it is made for embeddings" };
    if (prompt.by_layer && !g.find_cuts(prompt.n_slice())) throw not_by_layer();
    if (!prompt.by_layer) {
        g.cut = { 0, g.gf->n_nodes };
        g.find_slices();
    }
    for (int i = 0; i < g.gf->n_leafs; ++i)
        if (g.gf->leafs[i]->flags & GGML_TENSOR_FLAG_INPUT) g.inputs.push_back(g.gf->leafs[i]);
    if (ggml_backend_sched_get_n_backends(prompt.ctx->get_sched()) > 1) g.keep_sources();
    return g;
}

// ---- inputs of attention, while a graph is built

ggml_tensor * edgekv_chunks::row_input(const llm_graph_context & g, const edgekv_scratch & s) {
    for (auto & [scratch, t] : building->rows)
        if (scratch == &s) return t;
    const int64_t n_head_kv = s.t.k->ne[1] / s.cap;
    ggml_tensor * t = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I64, n_head_kv * g.n_tokens);
    ggml_set_input(t);
    building->rows.push_back({ &s, t });
    return t;
}

ggml_tensor * edgekv_chunks::heads_input(const llm_graph_context & g, const edgekv_layer & l) {
    ggml_tensor * t =
        ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I32, 2 * l.n_head_kv + (l.n_swa ? g.n_tokens : 0));
    ggml_set_input(t);
    building->heads.push_back({ &l, t });
    return t;
}

edgekv_prompt_rows * edgekv_chunks::prompt_rows(const edgekv_layer & l, int il) {
    const auto & s = scratches.of(l);
    building->prompt_rows.push_back(std::make_unique<edgekv_prompt_rows>());
    auto & r = *building->prompt_rows.back();
    r.layer = &l;
    for (int k = 0; k < l.n_head_kv; ++k) r.first.push_back((int32_t) s.origin(l, k, 0));
    r.len.resize(l.n_head_kv);
    r.start.resize(l.n_swa ? building->n_tokens : 0);
    const auto & columns = building->observed.columns;
    r.norm = columns.first < columns.second ? observers.norm_of(il) : nullptr;
    r.work = &prompt.attention;
    r.rows = { nullptr, nullptr, 0, 0, s.shape.type_k, s.shape.type_v, l.d_k, l.d_v, l.n_head,
        l.n_head_kv, r.first.data(), r.len.data(), 1.0f, 0.0f, nullptr,
        s.pos.empty() ? nullptr : s.pos.data(), l.max_bias, prompt.rounded };
    return &r;
}

// ---- values of the inputs

// Inputs live in a buffer of their own, filled once for all layers: the allocator neither moves
// them nor overlaps them. A chunk has its own values; but `bind` fills the numbers of its rows, and
// llama.cpp's rotations are the same for all. Inputs that no node reads still need an address,
// because llama.cpp may write them; they share one.
void edgekv_chunks::place_inputs() {
    enum { ITS_OWN, ROWS, ROTATION, UNREAD };
    const auto size = [](const ggml_tensor * t) { return (size_t) GGML_PAD(ggml_nbytes(t), 128); };
    std::unordered_map<const ggml_tensor *, int> kinds;
    // by name and width: windows may have heads of another size
    std::map<std::pair<std::string, int64_t>, char *> rotations;
    const auto rotation_of = [](const ggml_tensor * t) {
        return std::make_pair(std::string(t->name), t->ne[0]);
    };
    size_t total = 0, unread = 128;
    for (auto & g : graphs) {
        std::unordered_set<const ggml_tensor *> read;
        for (int i = 0; i < g->gf->n_nodes; ++i)
            for (const ggml_tensor * s : g->gf->nodes[i]->src) {
                for (; s; s = s->view_src) read.insert(s);
            }
        for (auto * t : g->inputs) {
            // never written: the batch has tokens
            if (!read.count(t) && strcmp(t->name, "inp_embd") == 0)
                t->flags &= ~GGML_TENSOR_FLAG_INPUT;
        }
        g->inputs.erase(std::remove_if(g->inputs.begin(), g->inputs.end(),
                            [](ggml_tensor * t) { return !(t->flags & GGML_TENSOR_FLAG_INPUT); }),
            g->inputs.end());
        for (auto * t : g->inputs) {
            const auto is_it = [&](const auto & x) { return x.second == t; };
            const bool is_row = std::any_of(g->rows.begin(), g->rows.end(), is_it) ||
                std::any_of(g->heads.begin(), g->heads.end(), is_it);
            const bool is_rot =
                strcmp(t->name, "attn_inp_k_rot") == 0 || strcmp(t->name, "attn_inp_v_rot") == 0;
            kinds[t] = !read.count(t) ? UNREAD : is_row ? ROWS : is_rot ? ROTATION : ITS_OWN;
            if (kinds[t] == ROWS) total += size(t);
            if (kinds[t] == ROTATION && rotations.emplace(rotation_of(t), nullptr).second)
                total += size(t);
            if (kinds[t] == UNREAD) unread = std::max(unread, size(t));
        }
    }
    for (const auto & c : chunks)
        for (auto * t : c.graph->inputs)
            if (kinds[t] == ITS_OWN) total += size(t);

    inputs.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), total + unread));
    if (!inputs) throw std::bad_alloc();
    char *base = (char *) ggml_backend_buffer_get_base(inputs.get()), *at = base + unread;
    const auto take = [&](const ggml_tensor * t) {
        char * here = at;
        at += size(t);
        return here;
    };
    for (auto & g : graphs)
        for (auto * t : g->inputs) {
            t->buffer = inputs.get();
            t->data = kinds[t] == ROWS ? take(t) : base;
            if (kinds[t] != ROTATION) continue;
            char *& here = rotations[rotation_of(t)];
            if (!here) here = take(t);
            t->data = here;
        }
    for (auto & c : chunks) {
        for (auto * t : c.graph->inputs) {
            if (kinds[t] == ITS_OWN) t->data = take(t);
            c.inputs.push_back(t->data);
        }
        c.graph->res->set_inputs(&c.mctx->get_ubatch());
        for (auto * t : c.graph->inputs) {
            if (strcmp(t->name, "attn_inp_k_rot") == 0) observers.note_rotation(t);
        }
    }
}

void edgekv_chunks::bind(const edgekv_chunk & c) const {
    auto & g = *c.graph;
    for (size_t i = 0; i < g.inputs.size(); ++i) g.inputs[i]->data = c.inputs[i];
    for (auto & [s, t] : g.rows) {
        if (!t->data) continue; // no layer stores rows there
        auto * x = (int64_t *) t->data;
        const int64_t n_head_kv = s->t.k->ne[1] / s->cap;
        for (int64_t i = 0; i < c.n_tokens; ++i)
            for (int64_t k = 0; k < n_head_kv; ++k) *x++ = k * s->cap + s->at(c.row) + i;
    }
    for (auto & [l, t] : g.heads) {
        if (!t->data) continue;
        auto * x = (int32_t *) t->data;
        const auto seen = rows_seen(*l, c);
        x = std::copy(seen.first.begin(), seen.first.end(), x);
        x = std::copy(seen.len.begin(), seen.len.end(), x);
        std::copy(seen.start.begin(), seen.start.end(), x);
    }
    for (auto & r : g.prompt_rows) {
        const auto seen = rows_seen(*r->layer, c);
        r->next = 0;
        // in place: the node has their addresses
        std::copy(seen.first.begin(), seen.first.end(), r->first.begin());
        std::copy(seen.len.begin(), seen.len.end(), r->len.begin());
        std::copy(seen.start.begin(), seen.start.end(), r->start.begin());
    }
}

edgekv_chunks::seen_rows edgekv_chunks::rows_seen(
    const edgekv_layer & l, const edgekv_chunk & c) const {
    const auto & s = scratches.of(l);
    // Of a window that slides, rows that are gone or that no token of the chunk sees: whole tiles
    // of the CPU's kernels, so that these add up as they do where all rows are there
    constexpr int64_t TILE = 64;
    static_assert(TILE <= EDGEKV_SWA_SLACK, "the rows in front of a window's tile are there");
    const int64_t gone = s.window ? prompt.first_seen(l, c.row) / TILE * TILE : 0;
    seen_rows seen;
    for (int k = 0; k < l.n_head_kv; ++k) {
        seen.first.push_back((int32_t) (s.origin(l, k, c.row) + gone));
        seen.len.push_back((int32_t) (l.len[k] + c.row + c.n_tokens - gone));
    }
    for (int64_t i = 0; i < c.n_tokens && l.n_swa; ++i) {
        seen.start.push_back((int32_t) (prompt.first_seen(l, c.row + i) - gone));
    }
    return seen;
}

void edgekv_chunks::clear() {
    chunks.clear();
    graphs.clear();
    inputs.reset();
}

int64_t edgekv_chunks::width() const {
    const auto & g = *graphs[0];
    return ggml_nelements(g.resid[0]) / g.n_tokens;
}
