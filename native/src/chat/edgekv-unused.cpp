// Functions that llama.cpp's common.cpp and sampling.cpp name in functions of theirs that nobody
// calls here. Some linkers want them before they look who calls whom.
#include "build-info.h"
#include "fit.h"
#include "speculative.h"

int llama_build_number(void) { return 0; }
const char * llama_commit(void) { return ""; }
const char * llama_compiler(void) { return ""; }
const char * llama_build_target(void) { return ""; }

common_params_fit_status common_fit_params(const char *, llama_model_params *,
    llama_context_params *, float *, llama_model_tensor_buft_override *, size_t *, uint32_t,
    const common_fit_extra_model *, ggml_log_level) {
    return COMMON_PARAMS_FIT_STATUS_FAILURE;
}

void common_memory_breakdown_print(const llama_context *) {}

common_params common_base_params_to_speculative(const common_params & params) { return params; }
