#pragma once
// Heads of a model for further tokens (MTP)

struct llama_model;

// why there are none that can be used here; null: there are
const char * edgekv_no_heads(const llama_model & model);
