#pragma once
// What the devices for tests share: memory that is locked outside of a device's own functions, and
// upstream's CPU backend, which computes there what is not ours.

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <cstdlib>
#include <cstring>
#include <map>

#include <sys/mman.h>

namespace fake {

inline std::map<char *, size_t> memory;
inline int n_inside = 0;

struct inside { // the device may touch its memory
    inside() {
        if (n_inside++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    ~inside() {
        if (--n_inside == 0) protect(PROT_NONE);
    }
    static void protect(int how) {
        for (auto [p, n] : memory)
            if (mprotect(p, n, how)) abort();
    }
};

// poisoned; null: there is none
inline char * map_memory(size_t n) {
    const size_t n_pages = (n + 16) / 4096 * 4096 + 4096;
    void * p = mmap(nullptr, n_pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    memset(p, 0xff, n_pages);
    if (!n_inside) mprotect(p, n_pages, PROT_NONE);
    memory[(char *) p] = n_pages;
    return (char *) p;
}

inline void unmap_memory(char * p) {
    munmap(p, memory.at(p));
    memory.erase(p);
}

inline char * data_of(const ggml_tensor * t) { return (char *) t->data; }

inline ggml_backend_t cpu() {
    static ggml_backend_t b = [] {
        ggml_backend_t x = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(x, 1);
        return x;
    }();
    return b;
}

// ours(from, to): nodes [from, to) are ours or compute nothing
template <typename F>
ggml_status compute(ggml_cgraph * graph, F && ours) {
    const inside i;
    auto is_ours = [&](int at) { return graph->nodes[at]->op == GGML_OP_CUSTOM; };
    for (int from = 0; from < graph->n_nodes;) {
        int to = from;
        while (to < graph->n_nodes && !is_ours(to)) ++to;
        ggml_cgraph part = ggml_graph_view(graph, from, to);
        const ggml_status status =
            to > from ? ggml_backend_graph_compute(cpu(), &part) : GGML_STATUS_SUCCESS;
        if (status != GGML_STATUS_SUCCESS) return status;
        for (from = to;
            to < graph->n_nodes && (is_ours(to) || ggml_op_is_empty(graph->nodes[to]->op));)
            ++to;
        if (to > from) ours(from, to);
        from = to;
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace fake
