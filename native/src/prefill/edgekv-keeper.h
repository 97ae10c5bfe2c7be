#pragma once
// The layers to be: what stays of each layer that was read, judged and merged before the rest goes.

#include "edgekv.h"
#include "edgekv-scratch.h"

#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

struct edgekv_map;

struct edgekv_row_list {
    int32_t n;
    const int32_t * rows;
};

// Everything here throws edgekv_error when it is asked for what is not there.
class edgekv_keeper {
public:
    edgekv_keeper(const edgekv_prompt & prompt, const edgekv_scratches & scratches)
        : prompt(prompt), scratches(scratches) {}

    void begin(); // room for as many layers as the store has
    bool has(int il) const { return fresh[il] != nullptr; }
    size_t n_bytes() const;
    void clear();

    // evict: rows of the layer in work that stay, best first, the heads' lists one after the other;
    // a layer with a window keeps it, whatever is asked
    void keep(const int32_t * counts, const int32_t * rows);
    // each head of a layer that was kept shrinks to its best `counts` rows
    void shrink(int il, const int32_t * counts);
    // all layers take the place of the store's
    void hand_over();

    // ---- of the layer in work, or of one that was kept
    // merge: for each row to be evicted the kept one with the most similar key
    void nearest(int il, int head, const edgekv_row_list & gone, const edgekv_row_list & kept,
        float * cosine, int32_t * nearest) const;
    // evicted rows are folded into kept ones where they lie
    void merge(int il, int head, const edgekv_merge & m);

    // ---- of the layer in work
    // its rows as f32; k, v: may be null
    void rows(int head, float * k, float * v) const;
    void some_rows(int head, const edgekv_row_list & which, float * k, float * v) const;
    // predicted scores: what a linear map of n_weights says of each row
    void predict(
        int head, const edgekv_map & map, int n_weights, float * out, float * unlike) const;

private:
    edgekv_layer & finished(int il, int head) const;  // a layer that was kept, and a head of it
    edgekv_head_rows rows_of(int il, int head) const; // before they are evicted
    bool is_kept(int il) const { return il >= 0 && il < (int) fresh.size() && fresh[il]; }
    // What stays of the layer in work: row i of head k, numbered with those of earlier turns, lies
    // at base[k] + i of the scratch. Rows go as bytes, or are rounded to the cache's types
    void gather(
        std::vector<int64_t> base, std::vector<std::vector<int32_t>> keep, edgekv_layer & to) const;
    void round(const std::vector<int64_t> & base, const std::vector<std::vector<int32_t>> & keep,
        edgekv_layer & to) const;

    const edgekv_prompt & prompt;
    const edgekv_scratches & scratches;
    std::vector<std::unique_ptr<edgekv_layer>> fresh; // [n_layer]
    // [n_layer][n_head_kv] rows of a head that is still whole, best first: it lies in token order,
    // but may have to shrink
    std::vector<std::vector<std::vector<int32_t>>> ranked;
    // head and row, in the scratch, that received something: not even an old one goes as bytes
    std::set<std::pair<int, int32_t>> folded;
    bool evicted = false;
};
