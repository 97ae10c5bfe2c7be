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

// While it lives, a step has tokens of these conversations, by sequence: 0 is the context's. What
// is left of one that failed is taken back. Where recurrent layers have gone on already, they are
// lost
struct together {
    edgekv_memory & m;
    llama_memory_i * mem;
    const std::vector<edgekv_parked *> parked;
    std::vector<llama_pos> n_past;
    bool done = false;
    together(edgekv_memory & m, llama_memory_i * mem, std::vector<edgekv_store *> stores,
        std::vector<edgekv_parked *> parked)
        : m(m), mem(mem), parked(std::move(parked)) {
        for (auto * s : stores) n_past.push_back(s ? s->n_past : 0);
        m.store->several = std::move(stores);
    }
    ~together() {
        const bool lost = !done && has_gone_on();
        for (size_t s = 0; s < n_past.size() && !done; ++s)
            if (auto * store = m.store->several[s]) store->take_back(n_past[s]);
        const bool has_ours = m.store->several[0];
        m.store->several.clear();
        m.forget_others();
        if (!done) m.forget_cells(m.store->n_past);
        if (!lost) return;
        for (auto * p : parked)
            if (p) p->lose();
        if (has_ours) mem->clear(false);
    }

private:
    bool has_gone_on() const {
        const auto * recr = edgekv_recurrent_of(mem);
        for (size_t s = 0; recr && s < n_past.size(); ++s)
            if (m.store->several[s] && recr->cells[s].pos >= n_past[s]) return true;
        return false;
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
    auto * recr = edgekv_recurrent_of(ctx.get_memory());
    const auto n_most = std::min({ m.n_several - 1, m.n_outputs_max, ctx.n_ubatch() });
    if (n < 1 || n > (int32_t) n_most)
        throw edgekv_error { EDGEKV_INVALID, "the context was not made for so many conversations" };
    const int32_t first = places[0] ? 1 : 0; // recurrent states lie side by side, in order
    std::vector<edgekv_store *> stores(n + 1, nullptr); // by sequence: 0 is the context's
    std::vector<edgekv_parked *> parked(n + 1, nullptr);
    one_each step(n);
    for (int32_t i = 0; i < n; ++i) {
        if (places[i] && places[i]->owner != m.id)
            throw edgekv_error { EDGEKV_INVALID, "this conversation is of another context" };
        if (places[i]) places[i]->check_there();
        edgekv_store * store = places[i] ? &places[i]->store : m.store.get();
        if (std::find(stores.begin(), stores.end(), store) != stores.end())
            throw edgekv_error { EDGEKV_INVALID, "a conversation has one token of a step" };
        if (!places[i] && i > 0 && recr)
            throw edgekv_error { EDGEKV_INVALID, "the conversation in the context comes first" };
        if (const char * why = unsupported(*store)) throw edgekv_error { EDGEKV_UNSUPPORTED, why };
        if (store->n_past + 1 > (llama_pos) m.n_ctx)
            throw edgekv_error { EDGEKV_INVALID, "the context has no room for more tokens" };
        const int32_t seq = places[i] ? first + i : 0;
        stores[seq] = store;
        parked[seq] = places[i];
        step.add(tokens[i], store->n_past, seq);
        store->reserve_tail(1);
    }
    for (int32_t s = 1; recr && s <= n; ++s)
        if (parked[s]) parked[s]->enter(*recr, s);
    together now(m, ctx.get_memory(), std::move(stores), std::move(parked));
    for (int32_t s = 1; recr && s <= n; ++s)
        if (now.parked[s]) edgekv_recurrent_set(*recr, s, now.n_past[s]);
    const int32_t status = ctx.decode(step.batch);
    if (status == -2) throw std::bad_alloc();
    if (status != 0) throw edgekv_error { EDGEKV_FAILED, "the tokens could not be computed" };
    now.done = true;
}
