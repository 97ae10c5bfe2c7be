#pragma once
// What is taken from the keys of a layer before they are stored.
//
// A bias of the keys can be many times larger than what the tokens add to it, and a quantised row
// then spends its bits on the bias. The softmax of a query does not change if the same vector is
// taken from all keys of a head. So quantised caches take the mean of the bias, as the positions
// turn it, over the first POSITIONS tokens; pairs of values that turn fast have a mean near 0.
// Which vector it is changes only how well the rows are stored. SageAttention (arXiv 2410.02367)
// takes the mean of a prompt's keys from them for products in 8 bits; here the vector has to be the
// same for rows that come later, so it follows from the weights.

#include "edgekv-matrix.h"

#include <memory>
#include <vector>

struct edgekv_layer;
struct llama_cparams;
struct llama_model;

struct edgekv_centre {
    // of the positions over which the bias is averaged: shorter texts lose little by it, longer
    // ones as well
    static constexpr int POSITIONS = 8192;

    std::vector<float> values; // [n_head_kv, d_k], as rows are stored
    edgekv_matrix there;       // the same where the layer's rows are, F32 [d_k, n_head_kv]

    // turn: size of the Walsh-Hadamard matrix by which keys are stored, 0: none. Null where the
    // layer has no bias, keys are not quantised, or the softmax knows more than the keys: a cap of
    // the logits, or a sink. throws std::bad_alloc
    static std::shared_ptr<const edgekv_centre> make(
        const llama_model & model, const llama_cparams & c, const edgekv_layer & l, int turn);
};

// of the keys of a head, [d_k]; null: nothing is taken from them
const float * edgekv_centre_of(const edgekv_layer & l, int head);

// n keys of a head, one after another, from what they are to what is stored, and back
void edgekv_take_centre(const edgekv_layer & l, int head, int64_t n, float * keys);
void edgekv_give_centre(const edgekv_layer & l, int head, int64_t n, float * keys);
