// A step's graph while it is computed: products of weights by edgekv's kernels
#include "edgekv-cache.h"
#include "edgekv-hooks.h"
#include "edgekv-switches.h"
#include "prefill/edgekv-products.h"

#include <algorithm>
#include <cstdint>

ggml_status edgekv_compute(llama_memory_i * mem, ggml_backend_sched_t sched, ggml_cgraph * gf) {
    const auto * store = edgekv_store_of(mem);
    const auto in_main_memory = [](const auto & l) { return ggml_backend_buft_is_host(l->buft); };
    if (!store || store->active || !edgekv_switches::products() ||
        !std::all_of(store->layers.begin(), store->layers.end(), in_main_memory))
        return ggml_backend_sched_graph_compute_async(sched, gf);
    auto & products = dynamic_cast<edgekv_memory *>(mem)->products;
    if (!products) products = std::make_shared<edgekv_products>();
    products->find(*gf, false, SIZE_MAX);
    edgekv_work work, of_levels;
    edgekv_products::running as_ours(*products, work, of_levels);
    const ggml_status status = ggml_backend_sched_graph_compute_async(sched, gf);
    ggml_backend_sched_synchronize(sched); // nodes are llama.cpp's own again
    return status;
}
