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
        for (const auto & [buft, bytes] : m->memory_breakdown()) n += bytes;
    return n;
}

llama_pos edgekv_recurrent_past(const llama_memory_recurrent & m) { return m.seq_pos_max(0) + 1; }

void edgekv_recurrent_rows::make(const llama_memory_recurrent & m, size_t begin, size_t end) {
    rows.clear();
    for (const auto * layers : { &m.r_l, &m.s_l, &m.p_l }) {
        for (size_t il = begin; il < std::min(end, layers->size()); ++il) {
            ggml_tensor * t = (*layers)[il];
            if (!t || ggml_nbytes(t) == 0) continue;
            rows.emplace_back(t, std::vector<char>(ggml_nbytes(t)));
        }
    }
}

void edgekv_recurrent_rows::save(const llama_memory_recurrent & m, size_t begin, size_t end) {
    make(m, begin, end);
    for (auto & [t, x] : rows) ggml_backend_tensor_get(t, x.data(), 0, x.size());
}

void edgekv_recurrent_rows::restore() const {
    for (const auto & [t, x] : rows) ggml_backend_tensor_set(t, x.data(), 0, x.size());
}

size_t edgekv_recurrent_rows::n_bytes() const {
    size_t n = 0;
    for (const auto & [t, x] : rows) n += x.size();
    return n;
}

void edgekv_recurrent_state::save(llama_memory_recurrent * m) {
    clear();
    if (!m) return;
    if (edgekv_recurrent_past(*m) > 0) rows.save(*m, 0, m->r_l.size());
    memory = m;
    cells = m->cells;
    head = m->head;
    used = m->used;
    n = m->n;
    rs_z = m->rs_z;
}

// whether values are f32 numbers of which sums of squares are numbers too
static bool plausible(const ggml_tensor & t, const std::vector<char> & bytes) {
    const auto * x = (const float *) bytes.data();
    return t.type == GGML_TYPE_F32 && std::all_of(x, x + bytes.size() / sizeof(float), [](float y) {
        return std::fabs(y) < 1e10f;
    });
}

// One sequence has one cell. Its number of tokens is followed by the bytes of all layers, if there
// are tokens.
void edgekv_recurrent_state::write(llama_io_write_i & io) const {
    const llama_pos n = n_past();
    io.write(&n, sizeof(n));
    for (const auto & [t, x] : rows.rows) io.write(x.data(), x.size());
}

void edgekv_recurrent_state::read(llama_memory_recurrent * m, llama_io_read_i & io) {
    clear();
    memory = m;
    llama_pos n;
    io.read(&n, sizeof(n));
    if (n < 0) throw std::runtime_error("the state is damaged");
    llama_memory_recurrent::mem_cell cell;
    if (n > 0) {
        cell.pos = n - 1;
        cell.src = cell.src0 = cell.tail = 0;
        cell.seq_id.insert(0);
        rows.make(*m, 0, m->r_l.size());
        for (auto & [t, x] : rows.rows) {
            io.read(x.data(), x.size());
            if (!plausible(*t, x)) throw std::runtime_error("the state is damaged");
        }
    }
    cells.assign(1, cell);
    head = 0;
    used = n > 0;
    this->n = n > 0;
    rs_z = -1;
}

void edgekv_recurrent_state::restore() const {
    if (!memory) return;
    rows.restore();
    memory->cells = cells;
    memory->head = head;
    memory->used = used;
    memory->n = n;
    memory->rs_z = rs_z;
}
