#pragma once
// The archive of a conversation: rows of all tokens, in order, of the layers that attend to
// everything, in a file without a name. The store has those that were kept; a prompt is read behind
// the archive's. Rows are what they were before the cache's types rounded them.

#include "edgekv-index.h"
#include "edgekv-layer.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

// What a layer keeps of a token where its rows are in full: halves, if the cache rounds them late
edgekv_shape edgekv_in_full(const edgekv_layer & l);

class edgekv_archive {
public:
    // dir: where the file lies, empty: TMPDIR; recall: share of the tokens that a new one recalls,
    // 0: none, and there is no index; index_bits: see edgekv_index. Throws std::runtime_error if
    // there can be no such file
    edgekv_archive(const std::vector<std::unique_ptr<edgekv_layer>> & layers, int64_t n_ctx,
        const std::string & dir, float recall, int index_bits);
    ~edgekv_archive();
    edgekv_archive(const edgekv_archive &) = delete;
    edgekv_archive & operator=(const edgekv_archive &) = delete;

    llama_pos n_tokens = 0; // whose rows are there, in all layers
    // Rows of tokens [begin, begin + n) of one head: row `at` of `rows` is the first. Types are
    // converted. Throws edgekv_error if the file cannot take or give them
    void put(const edgekv_layer & l, int head, llama_pos begin, int64_t n,
        const edgekv_tensors & rows, int64_t at);
    void get(const edgekv_layer & l, int head, llama_pos begin, int64_t n, edgekv_tensors & rows,
        int64_t at);
    // The store has these rows of a layer, and n_past tokens may be recalled: then `group` for each
    // head, which may be called from several threads; false if the file cannot take their labels
    void set_resident(const edgekv_layer & l, llama_pos n_past);
    bool group(const edgekv_layer & l, int head);
    // tokens behind these are forgotten
    void cut(llama_pos n_tokens);
    // whether a token has something to recall in a layer, and what, of one head
    bool recalls(const edgekv_layer & l) const { return recall > 0 && mapped && l.selects(); }
    edgekv_recalled recalled(const edgekv_layer & l, int head) const;
    void clear();                  // its bytes go back to the disk
    int64_t n_bytes() const;       // of n_tokens tokens
    size_t n_bytes_memory() const; // of the index

private:
    struct place {
        ggml_type type;
        int64_t begin; // in the file, of head 0
        size_t row_bytes;
    };
    const place & of(const edgekv_layer & l, size_t tensor) const;
    int64_t at(const place & p, int head, llama_pos token) const;
    edgekv_recalled rows_of(const edgekv_layer & l, int head) const; // where they are mapped

    void map();

    int64_t n_ctx;
    float recall;
    std::vector<std::vector<place>> places; // [n_layer]: of K, and of V if it has rows of its own
    std::vector<int64_t> labels;            // [n_layer]: where they begin in the file, n_ctx a head
    int64_t bytes_token = 0;
    int64_t size = 0;
    int fd = -1;
    const char * mapped = nullptr;                // the file, for who recalls
    std::vector<std::vector<edgekv_index>> index; // [n_layer][n_head_kv]
};
