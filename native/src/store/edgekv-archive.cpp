// Rows in a file
#include "edgekv-archive.h"
#include "edgekv-error.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

edgekv_shape edgekv_in_full(const edgekv_layer & l) {
    edgekv_shape shape = l;
    if (l.rounds_late) shape.type_k = shape.type_v = GGML_TYPE_F16;
    return shape;
}

static edgekv_error failed(const char * what) {
    return { EDGEKV_FAILED, std::string("the archive cannot be ") + what + ": " + strerror(errno) };
}

edgekv_archive::edgekv_archive(const std::vector<std::unique_ptr<edgekv_layer>> & layers,
    int64_t n_ctx, const std::string & dir, float recall, int index_bits)
    : n_ctx(n_ctx), recall(recall), places(layers.size()), labels(layers.size()) {
    int64_t end = 0, end_labels = 0;
    index.resize(layers.size());
    for (const auto & l : layers) {
        if (!l->selects()) continue;
        const auto shape = edgekv_in_full(*l);
        index[l->il].assign(l->n_head_kv, edgekv_index(l->d_k, index_bits));
        places[l->il] = { { shape.type_k, shape.d_k, 0, shape.row_bytes_k() } };
        if (!l->v_in_k)
            places[l->il].push_back({ shape.type_v, shape.d_v, 0, shape.row_bytes_v() });
        for (auto & p : places[l->il]) {
            p.begin = end;
            end += n_ctx * l->n_head_kv * (int64_t) p.row_bytes;
            bytes_token += l->n_head_kv * (int64_t) p.row_bytes;
        }
        labels[l->il] = end_labels;
        end_labels += n_ctx * l->n_head_kv;
    }
    file = std::make_shared<edgekv_archive_file>(dir, end, recall > 0);
    file->writer = this;
    if (recall > 0) label_file = std::make_shared<edgekv_archive_file>(dir, end_labels, true);
}

edgekv_archive::edgekv_archive(const edgekv_archive & a)
    : owner(a.owner), n_tokens(a.n_tokens), n_known(a.n_known), went_back(a.went_back),
      n_ctx(a.n_ctx), recall(a.recall), places(a.places), labels(a.labels),
      bytes_token(a.bytes_token), bytes_recalled(a.bytes_recalled.load()), file(a.file),
      label_file(a.label_file), index(a.index) {
    file->n_shared = std::max(file->n_shared, n_tokens);
}

edgekv_archive::~edgekv_archive() {
    if (file->writer == this) file->writer = nullptr;
}

// Rows behind `begin` are no other archive's: else those before move to a file of this one's own
void edgekv_archive::own(llama_pos begin) {
    if (file.use_count() == 1) {
        file->writer = this;
        file->n_shared = file->n_written = 0;
    }
    if (file->writer == this && begin >= file->n_shared) return;
    if (begin >= file->n_written) { // nobody has been there
        file->writer = this;
        file->n_shared = begin;
        return;
    }
    auto mine = std::make_shared<edgekv_archive_file>(file->dir, file->size, recall > 0);
    for (const auto & piece : pieces()) {
        std::vector<char> rows(begin * piece.place.row_bytes);
        const int64_t from = at(piece.place, piece.head, 0);
        if (!file->read(rows.data(), rows.size(), from)) throw failed("read");
        if (!mine->write(rows.data(), rows.size(), from)) throw failed("written");
    }
    if (file->writer == this) file->writer = nullptr;
    file = std::move(mine);
    file->writer = this;
    file->n_written = begin;
}

// all rows of one tensor and head
std::vector<edgekv_archive::piece> edgekv_archive::pieces() const {
    std::vector<piece> all;
    for (size_t il = 0; il < places.size(); ++il)
        for (int head = 0; head < (int) index[il].size(); ++head)
            for (const auto & p : places[il]) all.push_back({ p, head });
    return all;
}

int64_t edgekv_archive::piece_bytes(size_t i) const {
    const auto all = pieces();
    return i < all.size() ? n_tokens * (int64_t) all[i].place.row_bytes : -1;
}

void edgekv_archive::get_piece(size_t i, char * rows) const {
    const auto x = pieces().at(i);
    if (!file->read(rows, n_tokens * x.place.row_bytes, at(x.place, x.head, 0)))
        throw failed("read");
}

void edgekv_archive::put_piece(size_t i, const char * rows) {
    const auto x = pieces().at(i);
    const auto & p = x.place;
    if (!edgekv_bytes_finite(p.type, rows, p.row_bytes, n_tokens, p.d))
        throw edgekv_error { EDGEKV_INVALID, "the archive holds values that are no numbers" };
    if (!file->write(rows, n_tokens * p.row_bytes, at(p, x.head, 0))) throw failed("written");
    file->n_written = n_tokens;
}

const edgekv_archive::place & edgekv_archive::of(const edgekv_layer & l, size_t tensor) const {
    return places[l.il][tensor];
}

int64_t edgekv_archive::at(const place & p, int head, llama_pos token) const {
    return p.begin + ((int64_t) head * n_ctx + token) * (int64_t) p.row_bytes;
}

void edgekv_archive::put(const edgekv_layer & l, int head, llama_pos begin, int64_t n,
    const edgekv_tensors & rows, int64_t at_row, bool is_read) {
    if (n <= 0) return;
    own(begin);
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
        if (!file->write(data, n * p.row_bytes, at(p, head, begin))) throw failed("written");
        file->n_written = std::max(file->n_written, (llama_pos) (begin + n));
        if (i == 0 && recalls(l)) {
            auto & x = index[l.il][head];
            const llama_pos from = (llama_pos) x.wants_from(begin, n, is_read);
            const int64_t n_all = begin + n - from;
            std::vector<char> before((begin - from) * p.row_bytes);
            if (!file->read(before.data(), before.size(), at(p, head, from))) throw failed("read");
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
        if (!file->read(data, n * p.row_bytes, at(p, head, begin))) throw failed("read");
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
    n_known = std::min(n_known, n);
    for (auto & heads : index)
        for (auto & x : heads) x.cut(n);
}

void edgekv_archive::set_resident(const edgekv_layer & l, llama_pos n_past) {
    if (!recalls(l)) return;
    if (label_file.use_count() > 1) { // another archive has labels there; all are written anew
        label_file = std::make_shared<edgekv_archive_file>(file->dir, label_file->size, true);
        for (auto & heads : index)
            for (auto & x : heads) x.forget_labels();
    }
    for (int k = 0; k < l.n_head_kv; ++k) index[l.il][k].set_resident(l.pos[k], n_past);
}

bool edgekv_archive::group(const edgekv_layer & l, int head) {
    auto label = index[l.il][head].group(rows_of(l, head));
    return label_file->write(
        (const char *) label.data(), label.size(), labels[l.il] + head * n_ctx);
}

edgekv_recalled edgekv_archive::rows_of(const edgekv_layer & l, int head) const {
    edgekv_recalled a = {};
    a.d_k = l.d_k;
    a.d_v = l.d_v;
    const auto &k = of(l, 0), &v = of(l, l.v_in_k ? 0 : 1);
    a.k = file->mapped() + at(k, head, 0);
    a.v = file->mapped() + at(v, head, 0);
    a.nb_k = k.row_bytes;
    a.nb_v = v.row_bytes;
    a.type_k = k.type;
    a.type_v = v.type;
    a.label = (const uint8_t *) label_file->mapped() + labels[l.il] + head * n_ctx;
    return a;
}

edgekv_recalled edgekv_archive::recalled(const edgekv_layer & l, int head) const {
    edgekv_recalled a = rows_of(l, head);
    index[l.il][head].fill(a, recall);
    return a;
}

void edgekv_archive::count(const edgekv_recalled & a, int n_rows) {
    bytes_recalled += n_rows * (int64_t) (a.nb_k + a.nb_v);
}

size_t edgekv_archive::n_bytes_memory() const {
    size_t n = 0;
    for (const auto & heads : index)
        for (const auto & x : heads) n += x.n_bytes();
    return n;
}

int64_t edgekv_archive::n_bytes() const { return n_tokens * bytes_token; }

int64_t edgekv_archive::n_judged() const {
    int64_t n = 0;
    for (const auto & heads : index)
        for (const auto & x : heads) n = std::max(n, x.judged());
    return std::min<int64_t>(n, n_tokens);
}

void edgekv_archive::index_again(
    const std::vector<std::unique_ptr<edgekv_layer>> & layers, int64_t n_judged) {
    n_judged = std::min<int64_t>(n_judged, n_tokens);
    for (const auto & l : layers) {
        if (!recalls(*l)) continue;
        const auto & p = of(*l, 0);
        std::vector<char> rows(n_tokens * p.row_bytes);
        std::vector<float> keys(n_tokens * l->d_k);
        for (int k = 0; k < l->n_head_kv; ++k) {
            if (!file->read(rows.data(), rows.size(), at(p, k, 0))) throw failed("read");
            edgekv_cpu().rows_to_f32(
                p.type, rows.data(), p.row_bytes, 0, (int) n_tokens, l->d_k, keys.data());
            auto & x = index[l->il][k];
            x.put(0, n_judged, keys.data());
            x.put(n_judged, n_tokens - n_judged, keys.data() + n_judged * l->d_k);
        }
    }
}

bool edgekv_archive::is_grouped() const {
    return recall == 0 || std::all_of(index.begin(), index.end(), [&](const auto & heads) {
        return std::all_of(
            heads.begin(), heads.end(), [&](const auto & x) { return x.known() >= n_known; });
    });
}
