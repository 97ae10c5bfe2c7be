// JSON schemas to grammars, and whether a grammar can be read.
#include "edgekv-guard.h"

#include "json-schema-to-grammar.h"

#include <memory>

int edgekv_chat_schema(const char * schema, char ** out) {
    return edgekv_chat_give(out, [&] {
        return json_schema_to_grammar(common_json::parse(edgekv_chat_given(schema)), true);
    });
}

int edgekv_chat_check_grammar(const llama_model * model, const char * grammar) {
    return edgekv_chat_guard([&] {
        const auto * vocab = model ? llama_model_get_vocab(model) : nullptr;
        const std::unique_ptr<llama_sampler, void (*)(llama_sampler *)> made {
            llama_sampler_init_grammar(vocab, edgekv_chat_given(grammar), "root"),
            llama_sampler_free,
        };
        if (!made)
            throw std::invalid_argument(
                "llama.cpp cannot read it; its grammars/README.md says how one is written");
    });
}
