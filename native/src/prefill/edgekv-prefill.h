#pragma once
// A prompt, layer by layer. llama.cpp's own graph is built once per chunk of n_ubatch tokens and
// cut at the layers' outputs; the loops are turned round (all chunks of a layer, then the next
// layer), so only one layer's K/V exist in full. See docs/architecture.md.

#include "edgekv.h"
#include "edgekv-chunks.h"
#include "edgekv-keeper.h"
#include "edgekv-masks.h"
#include "edgekv-observers.h"
#include "edgekv-prompt.h"
#include "edgekv-recurrent.h"
#include "edgekv-scratch.h"
#include "edgekv-slices.h"

#include <memory>
#include <string>
#include <vector>

// The order of things: begin, run and keep for each layer, end. Everything throws edgekv_error.
struct edgekv_prefill final : edgekv_reader {
    static std::unique_ptr<edgekv_prefill> begin(
        llama_context * ctx, const edgekv_prefill_params & params);
    ~edgekv_prefill(); // without end, the conversation stays as before
    void run(int il);
    void keep(const int32_t * counts, const int32_t * rows); // of the layer in work
    void end();
    // Between two chunks the conversation can be as before the prompt, and wait beside its context.
    // No layer may be read until `resume` finds it there again. One prompt of a context may wait
    void pause();
    void resume();

    ggml_tensor * attend(const llm_graph_context & g, const edgekv_layer & l,
        const edgekv_attention & a) override; // edgekv-attend-prompt.cpp
    void lose_context() noexcept override;

    // those above look at those below, never the other way
    edgekv_prompt prompt;
    edgekv_scratches scratches { prompt };
    edgekv_masks masks { prompt };
    edgekv_keeper keeper { prompt, scratches };
    edgekv_observers observers { prompt, scratches };
    edgekv_chunks chunks { prompt, scratches, observers };
    edgekv_slices slices { prompt, chunks };

private:
    void read_params(llama_context * ctx, const edgekv_prefill_params & params);
    void begin_archive();
    void end_archive();
    void archive(const edgekv_layer & l);
    void make_memory(const edgekv_prefill_params & params);
    void run_chunks(int slice);
    void forget();
    bool is_mine() const;
    void note_peak() const;

    edgekv_progress progress = nullptr;
    void * progress_data = nullptr;
    int n_done = 0;            // slices
    std::string loses_archive; // why: its file could not take or give rows
    int64_t begin_us = 0;
    edgekv_recurrent_state before; // what recurrent layers held before the prompt
    edgekv_recurrent_state half;   // what they held when it was paused
    std::vector<float> logits;     // of the prompt's end, if it was reached by then
    std::vector<const edgekv_layer *> layers_before; // the store's, when it was paused
};

// Groups of the tokens that the store has not, of the n_known first ones of its archive
void edgekv_group(llama_context & ctx, edgekv_store & store);
