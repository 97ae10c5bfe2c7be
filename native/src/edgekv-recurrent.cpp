// The state of a model's recurrent layers: found, copied, put back
#include "edgekv-recurrent.h"

#include "edgekv-store.h"

#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include "ggml-backend.h"
#include "llama-io.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

llama_memory_recurrent * edgekv_recurrent_of(llama_memory_i * mem) {
    if (auto * m = dynamic_cast<llama_memory_hybrid *>(mem)) return m->get_mem_recr();
    if (auto * m = dynamic_cast<llama_memory_hybrid_iswa *>(mem)) return m->get_mem_recr();
    return nullptr;
}

size_t edgekv_recurrent_bytes(llama_memory_i * mem) {
    const auto * m = edgekv_recurrent_of(mem);
    size_t n = 0;
    if (m)
        for (const auto * layers : { &m->r_l, &m->s_l, &m->p_l })
            for (const ggml_tensor * t : *layers)
                if (t) n += t->nb[1];
    return n;
}

llama_pos edgekv_recurrent_past(const llama_memory_recurrent & m) { return m.seq_pos_max(0) + 1; }

void edgekv_recurrent_rows::make(const llama_memory_recurrent & m, size_t begin, size_t end) {
    decltype(rows) made;
    for (const auto * layers : { &m.r_l, &m.s_l, &m.p_l }) {
        for (size_t il = begin; il < std::min(end, layers->size()); ++il) {
            ggml_tensor * t = (*layers)[il];
            if (!t || ggml_nbytes(t) == 0) continue;
            made.emplace_back(t, std::vector<char>(t->nb[1]));
        }
    }
    rows = std::move(made);
}

void edgekv_recurrent_rows::save(
    const llama_memory_recurrent & m, size_t begin, size_t end, uint32_t cell) {
    if (rows.empty()) make(m, begin, end);
    for (auto & [t, x] : rows) ggml_backend_tensor_get(t, x.data(), cell * x.size(), x.size());
}

void edgekv_recurrent_rows::restore(uint32_t cell) const {
    for (const auto & [t, x] : rows)
        ggml_backend_tensor_set(t, x.data(), cell * x.size(), x.size());
}

size_t edgekv_recurrent_rows::n_bytes() const {
    size_t n = 0;
    for (const auto & [t, x] : rows) n += x.size();
    return n;
}

void edgekv_recurrent_state::save(llama_memory_recurrent * m) {
    clear();
    if (m) save(*m, 0, edgekv_recurrent_past(*m));
}

void edgekv_recurrent_state::save(llama_memory_recurrent & m, uint32_t cell, llama_pos n_past) {
    if (n_past > 0) rows.save(m, 0, m.r_l.size(), cell);
    else rows.rows.clear();
    memory = &m;
    n = n_past;
}

// whether values are f32 numbers of which sums of squares are numbers too
static bool plausible(const ggml_tensor & t, const std::vector<char> & bytes) {
    const auto * x = (const float *) bytes.data();
    return t.type == GGML_TYPE_F32 && std::all_of(x, x + bytes.size() / sizeof(float), [](float y) {
        return std::fabs(y) < 1e10f;
    });
}

// Its number of tokens is followed by the bytes of all layers, if there are tokens.
void edgekv_recurrent_state::write(llama_io_write_i & io) const {
    io.write(&n, sizeof(n));
    for (const auto & [t, x] : rows.rows) io.write(x.data(), x.size());
}

void edgekv_recurrent_state::read(llama_memory_recurrent * m, llama_io_read_i & io) {
    clear();
    memory = m;
    io.read(&n, sizeof(n));
    if (n < 0) throw std::runtime_error("the state is damaged");
    if (n > 0) rows.make(*m, 0, m->r_l.size());
    for (auto & [t, x] : rows.rows) {
        io.read(x.data(), x.size());
        if (!plausible(*t, x)) throw std::runtime_error("the state is damaged");
    }
}

void edgekv_recurrent_state::restore() const {
    if (!memory) return;
    rows.restore();
    edgekv_recurrent_set(*memory, 0, n);
    memory->head = 0;
    memory->used = memory->n = n > 0;
    memory->rs_z = -1;
}

void edgekv_recurrent_state::put(uint32_t cell) const { rows.restore(cell); }

void edgekv_recurrent_set(llama_memory_recurrent & m, uint32_t cell, llama_pos n_past) {
    auto & c = m.cells[cell];
    c = {};
    if (n_past == 0) return;
    c.pos = n_past - 1;
    c.src = c.src0 = c.tail = (int32_t) cell;
    c.seq_id.insert((llama_seq_id) cell);
}
