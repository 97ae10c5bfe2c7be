#pragma once
// Pages of memory: of what stays allocated and nobody needs any more, and large ones.

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifdef __linux__
// of the pages that lie wholly inside
inline void edgekv_advise_pages(void * from, size_t n_bytes, int advice) {
    const uintptr_t page = sysconf(_SC_PAGESIZE), at = (uintptr_t) from;
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + n_bytes) / page * page;
    if (begin < end) madvise((void *) begin, end - begin, advice);
}
#endif

// fewer and larger pages, where the system has them, for memory that is touched anew for every
// layer; what holds none of them stays as it is
inline void edgekv_want_large_pages(void * from, size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    if (n_bytes >= 2u << 20) edgekv_advise_pages(from, n_bytes, MADV_HUGEPAGE);
#else
    (void) from;
    (void) n_bytes;
#endif
}

// the pages that lie wholly inside go back to the system; touched again they are zeros, or what the
// file has that they are mapped from
inline void edgekv_give_back_pages(void * from, size_t n_bytes) {
#ifdef __linux__
    edgekv_advise_pages(from, n_bytes, MADV_DONTNEED);
#else
    (void) from;
    (void) n_bytes;
#endif
}

// the same of a tensor, if it lies in plain main memory: a device may hold on to other pages
inline void edgekv_give_back_pages(const ggml_tensor * t) {
    if (t && ggml_backend_buffer_get_type(t->buffer) == ggml_backend_cpu_buffer_type())
        edgekv_give_back_pages(t->data, ggml_nbytes(t));
}
