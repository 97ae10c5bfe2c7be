#pragma once
// The archive of a conversation: rows of all tokens, in order, of the layers that attend to
// everything, in a file without a name. The store has those that were kept; a prompt is read behind
// the archive's. Rows are what they were before the cache's types rounded them.

#include "edgekv-archive-file.h"
#include "edgekv-index.h"
#include "edgekv-layer.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

// What a layer keeps of a token where its rows are in full: halves, if the cache rounds them late
edgekv_shape edgekv_in_full(const edgekv_layer & l);

struct edgekv_archive {
    // dir: where the file lies, empty: TMPDIR; recall: share of the tokens that a new one recalls,
    // 0: none, and there is no index; index_bits: see edgekv_index. Throws std::runtime_error if
    // there can be no such file
    edgekv_archive(const std::vector<std::unique_ptr<edgekv_layer>> & layers, int64_t n_ctx,
        const std::string & dir, float recall, int index_bits);
    // the same tokens, in the same file until one of both writes over what the other has
    edgekv_archive(const edgekv_archive & a);
    ~edgekv_archive();
    edgekv_archive & operator=(const edgekv_archive &) = delete;

    uint64_t owner = 0;     // the memory that it is of
    llama_pos n_tokens = 0; // whose rows are there, in all layers
    llama_pos n_known = 0;  // that the last prompt's end knew: these may be recalled
    // The conversation went back behind the boundary: the store's rows are fewer than were kept.
    // What comes is read behind the archive
    bool went_back = false;
    // Rows of tokens [begin, begin + n) of one head: row `at` of `rows` is the first. Types are
    // converted. is_read: the tokens are a prompt's. Throws edgekv_error if the file cannot take or
    // give them
    void put(const edgekv_layer & l, int head, llama_pos begin, int64_t n,
        const edgekv_tensors & rows, int64_t at, bool is_read);
    void get(const edgekv_layer & l, int head, llama_pos begin, int64_t n, edgekv_tensors & rows,
        int64_t at);
    // The store has these rows of a layer, and n_past tokens may be recalled: then `group` for each
    // head, which may be called from several threads; false if the file cannot take their labels
    void set_resident(const edgekv_layer & l, llama_pos n_past);
    bool group(const edgekv_layer & l, int head);
    // tokens behind these are forgotten
    void cut(llama_pos n_tokens);
    // whether a token has something to recall in a layer, and what, of one head
    bool recalls(const edgekv_layer & l) const { return recall > 0 && l.selects(); }
    edgekv_recalled recalled(const edgekv_layer & l, int head) const;
    // rows of them that a token looked up; from several threads
    void count(const edgekv_recalled & a, int n_rows);
    int64_t n_bytes_recalled() const { return bytes_recalled; } // since the conversation began
    int64_t n_bytes() const;                                    // of n_tokens tokens
    size_t n_bytes_memory() const;                              // of the index

    // All rows as pieces, for who saves them: bytes of the i-th, -1 behind the last. Of an archive
    // that is filled from pieces n_tokens says how many come; rows that are no numbers are refused
    int64_t piece_bytes(size_t i) const;
    void get_piece(size_t i, char * rows) const;
    void put_piece(size_t i, const char * rows);
    // keys that the index goes by, and the index of an archive that was filled from pieces
    int64_t n_judged() const;
    void index_again(const std::vector<std::unique_ptr<edgekv_layer>> & layers, int64_t n_judged);
    bool is_grouped() const; // or there is nothing to group

private:
    struct place {
        ggml_type type;
        int d;
        int64_t begin; // in the file, of head 0
        size_t row_bytes;
    };
    const place & of(const edgekv_layer & l, size_t tensor) const;
    int64_t at(const place & p, int head, llama_pos token) const;
    edgekv_recalled rows_of(const edgekv_layer & l, int head) const; // where they are mapped

    struct piece {
        struct place place;
        int head;
    };
    std::vector<piece> pieces() const;
    void own(llama_pos begin);

    int64_t n_ctx;
    float recall;
    std::vector<std::vector<place>> places; // [n_layer]: of K, and of V if it has rows of its own
    std::vector<int64_t> labels; // [n_layer]: where they begin in their file, n_ctx a head
    int64_t bytes_token = 0;
    std::atomic<int64_t> bytes_recalled { 0 };
    std::shared_ptr<edgekv_archive_file> file, label_file;
    std::vector<std::vector<edgekv_index>> index; // [n_layer][n_head_kv]
};
