// A step with one token of each of several conversations: each attends to its own store
#include "edgekv-error.h"
#include "edgekv-parked.h"
#include "edgekv-recurrent.h"

#include "llama-context.h"

#include <algorithm>
#include <memory>
#include <string>

// why the rows of a store cannot take part, or null
static const char * unsupported(const edgekv_store & s) {
    if (s.graph_attend || s.node_attend ||
        !std::all_of(s.layers.begin(), s.layers.end(),
            [](const auto & l) { return ggml_backend_buft_is_host(l->buft); }))
        return "conversations on a device are written one by one";
    if (s.archive) return "conversations with an archive are written one by one";
    return nullptr;
}

namespace {

// while it lives, a step has tokens of these stores; what is left of one that failed is taken back
struct together {
    edgekv_memory & m;
    std::vector<llama_pos> n_past;
    bool done = false;
    together(edgekv_memory & m, std::vector<edgekv_store *> stores) : m(m) {
        for (auto * s : stores) n_past.push_back(s ? s->n_past : 0);
        m.store->several = std::move(stores);
    }
    ~together() {
        for (size_t i = 0; i < n_past.size() && !done; ++i)
            if (auto * s = m.store->several[i]) s->take_back(n_past[i]);
        m.store->several.clear();
        m.forget_others();
        if (!done) m.forget_cells(m.store->n_past);
    }
};

struct one_each {
    llama_batch batch;
    explicit one_each(int32_t n) : batch(llama_batch_init(n, 0, 1)) {}
    ~one_each() { llama_batch_free(batch); }
    void add(llama_token token, llama_pos pos, llama_seq_id seq) {
        const int32_t i = batch.n_tokens++;
        batch.token[i] = token;
        batch.pos[i] = pos;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = true;
    }
};

} // namespace

void edgekv_several(
    llama_context & ctx, int32_t n, edgekv_parked * const * places, const llama_token * tokens) {
    auto & m = edgekv_memory_of(ctx);
    const auto n_most = std::min({ m.n_several - 1, m.n_outputs_max, ctx.n_ubatch() });
    if (n < 1 || n > (int32_t) n_most)
        throw edgekv_error { EDGEKV_INVALID, "the context was not made for so many conversations" };
    if (edgekv_recurrent_of(ctx.get_memory()))
        throw edgekv_error { EDGEKV_UNSUPPORTED, "recurrent layers are written one by one" };
    std::vector<edgekv_store *> stores(n + 1, nullptr); // by sequence: 0 is the context's
    one_each step(n);
    for (int32_t i = 0; i < n; ++i) {
        if (places[i] && places[i]->owner != m.id)
            throw edgekv_error { EDGEKV_INVALID, "this conversation is of another context" };
        edgekv_store * store = places[i] ? &places[i]->store : m.store.get();
        if (std::find(stores.begin(), stores.end(), store) != stores.end())
            throw edgekv_error { EDGEKV_INVALID, "a conversation has one token of a step" };
        if (const char * why = unsupported(*store)) throw edgekv_error { EDGEKV_UNSUPPORTED, why };
        if (store->n_past + 1 > (llama_pos) m.n_ctx)
            throw edgekv_error { EDGEKV_INVALID, "the context has no room for more tokens" };
        const int32_t seq = places[i] ? i + 1 : 0;
        stores[seq] = store;
        step.add(tokens[i], store->n_past, seq);
        store->reserve_tail(1);
    }
    together now(m, std::move(stores));
    const int32_t status = ctx.decode(step.batch);
    if (status == -2) throw std::bad_alloc();
    if (status != 0) throw edgekv_error { EDGEKV_FAILED, "the tokens could not be computed" };
    now.done = true;
}
