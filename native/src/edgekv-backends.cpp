// Functions of backends that are found by name, about what they have computed
#include "edgekv-backends.h"
#include "edgekv-context.h"

#include "llama-context.h"

#include <algorithm>

// null: this backend has no such function
static void * function_of(const ggml_backend_ptr & b, const char * name) {
    const auto reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(b.get()));
    return ggml_backend_reg_get_proc_address(reg, name);
}

bool edgekv_devices_are_well(llama_context & ctx) {
    const auto is_well = [&](const ggml_backend_ptr & b) {
        const auto state = (int (*)(ggml_backend_t)) function_of(b, "edgekv_metal_state");
        if (!state) return true;
        ggml_backend_sched_synchronize(ctx.get_sched());
        return state(b.get()) == GGML_STATUS_SUCCESS;
    };
    const auto & all = edgekv_context::backends(ctx);
    return std::all_of(all.begin(), all.end(), is_well);
}

edgekv_unrecorded::edgekv_unrecorded(const std::vector<ggml_backend_ptr> & backends) {
    for (const auto & b : backends) {
        const auto record = (void (*)(bool)) function_of(b, "edgekv_cuda_record");
        if (record) all.push_back(record);
    }
    for (auto record : all) record(false);
}

edgekv_unrecorded::~edgekv_unrecorded() {
    for (auto record : all) record(true);
}
