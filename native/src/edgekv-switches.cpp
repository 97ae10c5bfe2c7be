// The only place in libllama that reads variables for tests; the CPU backend has EDGEKV_TILES
// (cpu/edgekv-tiles.h) and EDGEKV_LEVELS (cpu/edgekv-product.cpp)
#include "edgekv-switches.h"

#include <cstdlib>
#include <cstring>

static bool is(const char * variable, const char * value) {
    const char * set = std::getenv(variable);
    return set && strcmp(set, value) == 0;
}

bool edgekv_switches::graph_attend() { return is("EDGEKV_ATTEND", "graph"); }
bool edgekv_switches::f32_attend() { return is("EDGEKV_ATTEND", "f32"); }
bool edgekv_switches::node_attend() { return is("EDGEKV_ATTEND", "node"); }

bool edgekv_switches::rounded() { return is("EDGEKV_RECENT", "rounded"); }

bool edgekv_switches::products() { return !is("EDGEKV_PRODUCTS", "0"); }

bool edgekv_switches::whole() {
    const char * set = std::getenv("EDGEKV_WHOLE");
    return set && std::atoi(set);
}

double edgekv_switches::work(double otherwise) {
    const char * set = std::getenv("EDGEKV_WORK");
    return set ? std::atof(set) : otherwise;
}
