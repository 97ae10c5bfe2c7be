#pragma once
// Chats: llama.cpp's own templates, tool calls, thoughts, grammars and samplers, with JSON in and
// JSON out. A library of its own (edgekv-chat), because llama.cpp's `common` has no stable ABI:
// nothing of `common` can be seen from outside.
//
// Functions return 0 on success and a negative edgekv_status otherwise; edgekv_chat_error() then
// says why, in one line. Nothing throws, and no text ends the process. Texts are UTF-8. What is put
// into `out` belongs to the caller, who gives it to edgekv_chat_free.
//
// Text may nest as deep as the stack allows: whoever calls bounds the depth of JSON and of
// grammars.

#include "edgekv.h"

#ifdef _WIN32
#ifdef EDGEKV_CHAT_BUILD
#define EDGEKV_CHAT_API __declspec(dllexport)
#else
#define EDGEKV_CHAT_API __declspec(dllimport)
#endif
#else
#define EDGEKV_CHAT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EDGEKV_CHAT_ABI 3 // changes with any signature below, and with the fields of the JSON

EDGEKV_CHAT_API int edgekv_chat_abi(void);
EDGEKV_CHAT_API const char * edgekv_chat_error(void);
EDGEKV_CHAT_API void edgekv_chat_free(char * text);

// ---- templates (edgekv-chat.cpp)

struct edgekv_chat_template;

// text: the template; empty: the model's own, or ChatML if it has none. model: may be null, if
// there is a text; bos and eos are then what the template writes for these tokens.
EDGEKV_CHAT_API int edgekv_chat_template_open(const struct llama_model * model, const char * text,
    const char * bos, const char * eos, struct edgekv_chat_template ** out);
EDGEKV_CHAT_API void edgekv_chat_template_close(struct edgekv_chat_template * tmpl);
// {"source", "caps": {name: bool}}
EDGEKV_CHAT_API int edgekv_chat_template_about(
    const struct edgekv_chat_template * tmpl, char ** out);
// request: {"messages", "tools", "tool_choice", "parallel_tool_calls", "json_schema", "grammar",
// "add_generation_prompt", "continue_final_message", "reasoning_format", "enable_thinking",
// "chat_template_kwargs"}, as in llama-server's requests, and "plain": the prompt alone, which is
// quicker. out: {"prompt", "generation_prompt", "grammar", "grammar_lazy", "grammar_triggers",
// "preserved_tokens", "additional_stops", "thinking_start_tag", "thinking_end_tags", "parser"}; the
// last one is what edgekv_chat_parser_open takes
EDGEKV_CHAT_API int edgekv_chat_template_apply(
    const struct edgekv_chat_template * tmpl, const char * request, char ** out);

// ---- what a model wrote (edgekv-chat.cpp)

struct edgekv_chat_parser;

EDGEKV_CHAT_API int edgekv_chat_parser_open(const char * parser, struct edgekv_chat_parser ** out);
EDGEKV_CHAT_API void edgekv_chat_parser_close(struct edgekv_chat_parser * parser);
// text: all that was written so far, n_bytes long. out: {"content", "reasoning_content",
// "tool_calls": [{"name", "arguments", "id"}]}. Fails for a text that does not have the template's
// format, and for the beginning of one that cannot get it any more.
EDGEKV_CHAT_API int edgekv_chat_parse(const struct edgekv_chat_parser * parser, const char * text,
    size_t n_bytes, bool is_partial, char ** out);

// ---- grammars (edgekv-grammar.cpp)

// out: the grammar of a JSON schema, in GBNF
EDGEKV_CHAT_API int edgekv_chat_schema(const char * schema, char ** out);
// fails for a grammar that llama.cpp cannot read
EDGEKV_CHAT_API int edgekv_chat_check_grammar(
    const struct llama_model * model, const char * grammar);

// ---- samplers (edgekv-sampler.cpp)

struct edgekv_chat_sampler;

// settings: llama-server's names of its samplers' settings (logit_bias: {token: number, or false
// for never}), and "grammar", "grammar_lazy",
// "grammar_triggers", "preserved_tokens", "generation_prompt", "prefills_grammar" (the grammar
// begins with the generation prompt), "thinking_start_tag", "thinking_end_tags", "reasoning_budget"
// as a template's application says them. stop: where this is set, a grammar that thinks gives up;
// it has to outlive the sampler; may be null
EDGEKV_CHAT_API int edgekv_chat_sampler_open(const struct llama_model * model,
    const char * settings, bool * stop, struct edgekv_chat_sampler ** out);
EDGEKV_CHAT_API void edgekv_chat_sampler_close(struct edgekv_chat_sampler * sampler);
// a token of the prompt, which penalties count
EDGEKV_CHAT_API int edgekv_chat_sampler_accept(
    struct edgekv_chat_sampler * sampler, llama_token token);
// the next token, from the logits [n_vocab] of the last one. It is the model's end where the
// grammar lets only that through, whatever a bias says. Fails if the grammar lets nothing through,
// or takes longer than a second.
EDGEKV_CHAT_API int edgekv_chat_sampler_draw(
    struct edgekv_chat_sampler * sampler, const float * logits, llama_token * out);
// The tokens that the last draw chose among and their probabilities, likeliest first: `room` of
// them at most. n: how many there were.
EDGEKV_CHAT_API int edgekv_chat_sampler_candidates(const struct edgekv_chat_sampler * sampler,
    llama_token * tokens, float * probabilities, size_t room, size_t * n);

#ifdef __cplusplus
}
#endif
