#pragma once
// The index of an archive: of each KV head all keys in a few bits, by which a token finds the rows
// that it needs, and groups that stand for the others.

#include "edgekv-layer.h"

#include "cpu/edgekv-cpu.h"

#include <cstdint>
#include <vector>

// Of one head
class edgekv_index {
public:
    static constexpr int MOST_BITS = 128; // for each 64 values of a key
    // bits: for each 64 of the d values of a key, a multiple of 4
    edgekv_index(int d, int bits);
    // keys [n, d] of tokens [begin, begin + n), in order; what lay behind those is forgotten.
    // `begin` has to be what `wants_from` says: while keys are few, all come again with those that
    // follow, and the codes are made anew for them. is_read: they are a prompt's. Keys that are
    // written never make codes anew: an answer would depend on what came behind it before
    void put(int64_t begin, int64_t n, const float * keys);
    int64_t wants_from(int64_t begin, int64_t n, bool is_read) const;
    int64_t judged() const { return n_judged; }
    int64_t known() const { return n_seen; } // tokens that may be recalled
    void cut(int64_t n_tokens);              // tokens behind these are forgotten
    // the store has the rows of these tokens, of n_tokens that may be recalled
    void set_resident(const std::vector<llama_pos> & pos, int64_t n_tokens);
    // groups of those that it has not; a: shape, rows and their labels so far. The label of each
    // row, for who recalls. The groups are those of the first rows, whose number grows by a quarter
    // at a time: they depend on the rows alone, not on turns or on who had labels before
    std::vector<uint8_t> group(const edgekv_recalled & a);
    void forget_labels(int64_t from = 0); // those are lost, or of other rows
    // fills in what a token looks for, but rows, labels and shape; share: of the tokens, that a
    // token recalls of a usual head. A head whose attention is spread out recalls more of them
    void fill(edgekv_recalled & a, float share) const;
    size_t n_bytes() const;

private:
    static constexpr int64_t ENOUGH = 2048;            // keys that say what is usual
    static constexpr int MOST_GROUPS = 64, EACH = 128; // a group for so many tokens
    // Of the rows that a head recalls the least probable has this share of the probability that
    // they would have on average if they had all of it; on texts a share of 0.05 then takes 5 to 8
    // %
    static constexpr float LEAST = 0.16f;
    static constexpr int MOST_TIMES = 4; // the share, of a head whose attention is spread out

    edgekv_codebook book() const;

    int d, n_parts, n_dims;
    int64_t n = 0, n_judged = 0; // tokens; those that the codebook was made of
    int64_t n_seen = 0;          // that may be recalled
    int64_t n_grouped = 0;       // that have labels
    int64_t n_found = 0;         // whose groups were found
    ggml_type type;
    std::vector<char> basis;
    std::vector<ggml_fp16_t> centres;
    std::vector<float> mean;
    std::vector<int32_t> ends;
    std::vector<uint8_t> codes;
    std::vector<uint32_t> resident; // a bit for each row
    std::vector<ggml_fp16_t> group_k, group_v;
    std::vector<int32_t> members;
};
