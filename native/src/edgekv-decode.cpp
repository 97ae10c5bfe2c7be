// The boundary of llama_decode. Nothing that is thrown behind it leaves it, and a step that failed
// leaves no trace in the store.
#include "edgekv-backends.h"
#include "edgekv-cache.h"
#include "edgekv-hooks.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <new>
#include <stdexcept>

namespace {

// what llama_decode returns, see llama.h
enum : int32_t { NO_ROOM = 1, ABORTED = 2, REFUSED = -1, NO_MEMORY = -2, FAILED = -3 };

const char * why(int32_t status) {
    switch (status) {
        case NO_ROOM: return "the context has no room for more tokens: use a larger --ctx-size";
        case ABORTED: return "the computation was stopped";
        case REFUSED: return "llama.cpp refused the tokens";
        case NO_MEMORY: return "not enough memory for more tokens";
        default: return "the tokens could not be computed: a device failed";
    }
}

int32_t failed(int32_t status, const char * what) {
    edgekv_note_error(what, status == NO_MEMORY ? EDGEKV_NO_MEMORY : EDGEKV_FAILED);
    return status;
}

int32_t decode(llama_context & ctx, const llama_batch & batch) {
    try {
        const int32_t status = ctx.decode(batch);
        if (status == 0 && !edgekv_devices_are_well(ctx)) return failed(FAILED, why(FAILED));
        return status == 0 ? 0 : failed(status, why(status));
    } catch (const std::bad_alloc &) {
        return failed(NO_MEMORY, why(NO_MEMORY));
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("edgekv: %s\n", e.what());
        return failed(FAILED, e.what());
    }
}

} // namespace

int32_t edgekv_decode(llama_context * ctx, const llama_batch & batch) {
    if (!ctx) return failed(REFUSED, "there is no context: it was closed");
    llama_memory_i * memory = ctx->get_memory();
    edgekv_store * store = edgekv_store_of(memory);
    if (!store) return decode(*ctx, batch);
    if (store->active) return failed(REFUSED, "a prompt is being read");
    const llama_pos n_past = store->n_past;
    const int32_t status = decode(*ctx, batch);
    if (status != 0) edgekv_take_back(memory, n_past);
    return status;
}
