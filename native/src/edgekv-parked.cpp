// Conversations change places
#include "edgekv-parked.h"
#include "edgekv-error.h"
#include "edgekv.h"

edgekv_parked::edgekv_parked(const edgekv_memory & m) : owner(m.id), seats(m.seats) {
    for (const auto & l : m.store->layers) {
        auto fresh = l->alike();
        fresh->len.assign(l->n_head_kv, 0);
        fresh->layout(std::vector<int32_t>(l->n_head_kv, 0));
        fresh->place_pos(0);
        store.layers.push_back(std::move(fresh));
    }
}

edgekv_parked::~edgekv_parked() {
    if (cell) (*seats)[cell] = nullptr;
}

void edgekv_parked::enter(llama_memory_recurrent & m, uint32_t to) {
    if (cell == to) return;
    leave(m);
    if (auto * other = (*seats)[to]) other->leave(m);
    recurrent.put(to);
    recurrent.clear();
    cell = to;
    (*seats)[cell] = this;
}

void edgekv_parked::leave(llama_memory_recurrent & m) {
    if (!cell) return;
    recurrent.save(m, cell, store.n_past);
    (*seats)[cell] = nullptr;
    cell = 0;
}

void edgekv_parked::check_there() const {
    if (lost)
        throw edgekv_error { EDGEKV_FAILED,
            "a step failed half way, and the conversation was lost" };
}

void edgekv_parked::lose() {
    if (cell) (*seats)[cell] = nullptr;
    cell = 0;
    lost = true;
    store.clear();
}

void edgekv_parked::swap(llama_memory_i * mem) {
    auto & m = *dynamic_cast<edgekv_memory *>(mem);
    auto & s = *m.store;
    if (m.id != owner)
        throw edgekv_error { EDGEKV_INVALID, "this conversation is of another context" };
    check_there();
    auto * recr = edgekv_recurrent_of(mem);
    if (recr) leave(*recr);
    edgekv_recurrent_state now;
    now.save(recr);
    try {
        m.set_cells(store.n_past);
    } catch (...) {
        mem->clear(false); // its cells are those of neither conversation
        throw;
    }
    // of all that follows nothing can fail
    std::swap(s.layers, store.layers);
    std::swap(s.n_past, store.n_past);
    std::swap(s.boundary, store.boundary);
    std::swap(s.archive, store.archive);
    std::swap(s.lost_archive, store.lost_archive);
    std::swap(s.n_bytes_peak, store.n_bytes_peak);
    std::swap(m.mark, mark);
    std::swap(m.n_mark, n_mark);
    m.n_kept = -1;
    ++s.version;
    ++store.version;
    if (!recr) return;
    if (s.n_past == 0) recr->clear(false);
    else recurrent.restore();
    recurrent = std::move(now);
}

size_t edgekv_parked::n_bytes() const {
    size_t n = recurrent.n_bytes() + mark.n_bytes() +
        (store.archive ? store.archive->n_bytes_memory() : 0);
    for (const auto & l : store.layers)
        n += l->t.n_bytes() + l->recent.n_bytes() + l->row_pos.n_bytes() +
            l->n_rows() * sizeof(llama_pos);
    return n;
}
