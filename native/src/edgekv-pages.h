#pragma once
// Pages of memory that stays allocated, whose content nobody needs any more.

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

// the pages that lie wholly inside go back to the system, and are zeros when they are touched again
inline void edgekv_give_back_pages(void * from, size_t n_bytes) {
#ifdef __linux__
    const uintptr_t page = sysconf(_SC_PAGESIZE), at = (uintptr_t) from;
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + n_bytes) / page * page;
    if (begin < end) madvise((void *) begin, end - begin, MADV_DONTNEED);
#else
    (void) from;
    (void) n_bytes;
#endif
}

// fewer and larger pages, where the system has them: they are touched anew for every layer
inline void edgekv_want_large_pages(void * from, size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = sysconf(_SC_PAGESIZE), at = (uintptr_t) from;
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + n_bytes) / page * page;
    if (begin < end) madvise((void *) begin, end - begin, MADV_HUGEPAGE);
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
