// Rows in a file
#include "edgekv-archive.h"
#include "edgekv-error.h"
#include "edgekv-kernels.h"
#include "edgekv-temporary.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

edgekv_shape edgekv_in_full(const edgekv_layer & l) {
    edgekv_shape shape = l;
    if (l.rounds_late) shape.type_k = shape.type_v = GGML_TYPE_F16;
    return shape;
}

edgekv_archive::edgekv_archive(const std::vector<std::unique_ptr<edgekv_layer>> & layers,
    int64_t n_ctx, const std::string & dir, float recall, int index_bits)
    : n_ctx(n_ctx), recall(recall), places(layers.size()), labels(layers.size()) {
    int64_t & end = size;
    index.resize(layers.size());
    for (const auto & l : layers) {
        if (!l->selects()) continue;
        const auto shape = edgekv_in_full(*l);
        index[l->il].assign(l->n_head_kv, edgekv_index(l->d_k, index_bits));
        places[l->il] = { { shape.type_k, 0, shape.row_bytes_k() } };
        if (!l->v_in_k) places[l->il].push_back({ shape.type_v, 0, shape.row_bytes_v() });
        for (auto & p : places[l->il]) {
            p.begin = end;
            end += n_ctx * l->n_head_kv * (int64_t) p.row_bytes;
            bytes_token += l->n_head_kv * (int64_t) p.row_bytes;
        }
        labels[l->il] = end;
        if (recall > 0) end += n_ctx * l->n_head_kv;
    }
    fd = edgekv_temporary(dir);
    if (fd < 0)
        throw std::runtime_error(
            "no file for the archive in " + edgekv_temporary_dir(dir) + ": " + strerror(errno));
    if (recall > 0) map();
    if (recall > 0 && !mapped) {
        close(fd);
        throw std::runtime_error("the archive in " + edgekv_temporary_dir(dir) +
            " cannot be looked up in: " + strerror(errno));
    }
}

#ifdef _WIN32
edgekv_archive::~edgekv_archive() {}
void edgekv_archive::clear() { cut(0); }
void edgekv_archive::map() {}
static bool transfer(int, char *, size_t, int64_t, bool) { return false; }
#else
edgekv_archive::~edgekv_archive() {
    if (mapped) munmap((void *) mapped, size);
    close(fd);
}

void edgekv_archive::clear() {
    cut(0);
    if (ftruncate(fd, 0) != 0) return;                // the bytes are written over later
    if (mapped && ftruncate(fd, (off_t) size) != 0) { // what is mapped lies behind its end
        munmap((void *) mapped, size);
        mapped = nullptr;
    }
}

// the whole file, holes where nothing has been written
void edgekv_archive::map() {
    if (ftruncate(fd, (off_t) size) != 0) return;
    void * p = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (p != MAP_FAILED) mapped = (const char *) p;
}

static bool transfer(int fd, char * data, size_t n, int64_t at, bool writes) {
    while (n > 0) {
        const ssize_t done =
            writes ? pwrite(fd, data, n, (off_t) at) : pread(fd, data, n, (off_t) at);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0) errno = EIO; // the file is shorter than it was
        if (done <= 0) return false;
        data += done;
        at += done;
        n -= (size_t) done;
    }
    return true;
}
#endif

const edgekv_archive::place & edgekv_archive::of(const edgekv_layer & l, size_t tensor) const {
    return places[l.il][tensor];
}

int64_t edgekv_archive::at(const place & p, int head, llama_pos token) const {
    return p.begin + ((int64_t) head * n_ctx + token) * (int64_t) p.row_bytes;
}

static edgekv_error failed(const char * what) {
    return { EDGEKV_FAILED, std::string("the archive cannot be ") + what + ": " + strerror(errno) };
}

void edgekv_archive::put(const edgekv_layer & l, int head, llama_pos begin, int64_t n,
    const edgekv_tensors & rows, int64_t at_row) {
    if (n <= 0) return;
    const auto from = rows.own();
    for (size_t i = 0; i < from.size(); ++i) {
        const auto & p = of(l, i);
        std::vector<char> copy;
        char * data = (char *) from[i]->data + at_row * from[i]->nb[1];
        if (from[i]->type != p.type || !ggml_backend_buffer_is_host(from[i]->buffer)) {
            copy.resize(n * p.row_bytes);
            data = copy.data();
            if (from[i]->type == p.type) edgekv_get_rows(from[i], at_row, n, data);
            else edgekv_convert_rows(from[i], at_row, n, p.type, data);
        }
        if (!transfer(fd, data, n * p.row_bytes, at(p, head, begin), true)) throw failed("written");
        if (i == 0 && recalls(l)) {
            auto & x = index[l.il][head];
            const llama_pos from = (llama_pos) x.wants_from(begin, n);
            const int64_t n_all = begin + n - from;
            std::vector<char> before((begin - from) * p.row_bytes);
            if (!transfer(fd, before.data(), before.size(), at(p, head, from), false))
                throw failed("read");
            std::vector<float> keys(n_all * l.d_k);
            edgekv_cpu().rows_to_f32(
                p.type, before.data(), p.row_bytes, 0, (int) (begin - from), l.d_k, keys.data());
            edgekv_cpu().rows_to_f32(
                p.type, data, p.row_bytes, 0, (int) n, l.d_k, keys.data() + (begin - from) * l.d_k);
            x.put(from, n_all, keys.data());
        }
    }
}

void edgekv_archive::get(const edgekv_layer & l, int head, llama_pos begin, int64_t n,
    edgekv_tensors & rows, int64_t at_row) {
    if (n <= 0) return;
    const auto to = rows.own();
    for (size_t i = 0; i < to.size(); ++i) {
        const auto & p = of(l, i);
        const bool in_place = to[i]->type == p.type && ggml_backend_buffer_is_host(to[i]->buffer);
        std::vector<char> copy(in_place ? 0 : n * p.row_bytes);
        char * data = in_place ? (char *) to[i]->data + at_row * to[i]->nb[1] : copy.data();
        if (!transfer(fd, data, n * p.row_bytes, at(p, head, begin), false)) throw failed("read");
        if (in_place) continue;
        if (to[i]->type != p.type) {
            std::vector<char> converted(n * to[i]->nb[1]);
            edgekv_convert(p.type, copy.data(), p.row_bytes, n, (int) to[i]->ne[0], to[i]->type,
                converted.data());
            copy = std::move(converted);
        }
        ggml_backend_tensor_set(to[i], copy.data(), at_row * to[i]->nb[1], copy.size());
    }
}

void edgekv_archive::cut(llama_pos n) {
    n_tokens = std::min(n_tokens, n);
    for (auto & heads : index)
        for (auto & x : heads) x.cut(n);
}

void edgekv_archive::set_resident(const edgekv_layer & l, llama_pos n_past) {
    if (!recalls(l)) return;
    for (int k = 0; k < l.n_head_kv; ++k) index[l.il][k].set_resident(l.pos[k], n_past);
}

bool edgekv_archive::group(const edgekv_layer & l, int head) {
    auto label = index[l.il][head].group(rows_of(l, head));
    return transfer(fd, (char *) label.data(), label.size(), labels[l.il] + head * n_ctx, true);
}

edgekv_recalled edgekv_archive::rows_of(const edgekv_layer & l, int head) const {
    edgekv_recalled a = {};
    a.d_k = l.d_k;
    a.d_v = l.d_v;
    const auto &k = of(l, 0), &v = of(l, l.v_in_k ? 0 : 1);
    a.k = mapped + at(k, head, 0);
    a.v = mapped + at(v, head, 0);
    a.nb_k = k.row_bytes;
    a.nb_v = v.row_bytes;
    a.type_k = k.type;
    a.type_v = v.type;
    a.label = (const uint8_t *) mapped + labels[l.il] + head * n_ctx;
    return a;
}

edgekv_recalled edgekv_archive::recalled(const edgekv_layer & l, int head) const {
    edgekv_recalled a = rows_of(l, head);
    index[l.il][head].fill(a, recall);
    return a;
}

size_t edgekv_archive::n_bytes_memory() const {
    size_t n = 0;
    for (const auto & heads : index)
        for (const auto & x : heads) n += x.n_bytes();
    return n;
}

int64_t edgekv_archive::n_bytes() const { return n_tokens * bytes_token; }
