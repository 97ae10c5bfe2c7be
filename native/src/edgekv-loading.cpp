// While weights are loaded
#include "edgekv-hooks.h"
#include "edgekv-pages.h"

void edgekv_copied(void * from, size_t n_bytes) { edgekv_give_back_pages(from, n_bytes); }
