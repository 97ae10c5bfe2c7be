# Leaves Intel's AMX out where it crashes. GCC 12 drops the stores to a tile configuration
# on the stack that ggml loads (its intrinsic names 8 of the 64 bytes; llama.cpp's issue
# 20824 and pull request 26954), and some virtual machines announce what they do not have.
# Included by every project() (see options.cmake), so the unpatched build is compiled alike.

if(CMAKE_CROSSCOMPILING OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$"
        OR NOT CMAKE_C_COMPILER_LOADED OR (DEFINED GGML_NATIVE AND NOT GGML_NATIVE))
    return()
endif()

include(CheckCSourceRuns)
set(CMAKE_REQUIRED_FLAGS "-march=native -O3")
check_c_source_runs("
#ifdef __AMX_INT8__
#include <immintrin.h>
#include <unistd.h>
long syscall(long, ...);
struct config { unsigned char palette, start, unused[14]; unsigned short bytes[16]; unsigned char rows[16]; };
int main(void) {
    if (syscall(158, 0x1023, 18)) { return 0; } /* no permission for tiles: ggml leaves them alone */
    struct config one __attribute__((aligned(64))) = {0};
    one.palette = 1;
    one.bytes[0] = 64;
    one.rows[0] = 16;
    _tile_loadconfig(&one);
    _tile_zero(0);
    _tile_release();
    return 0;
}
#else
int main(void) { return 0; }
#endif" EDGEKV_AMX_WORKS)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT EDGEKV_AMX_WORKS)
    message(STATUS "edgekv: AMX is left out, it crashes here")
    foreach(part tile int8 bf16)
        add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-mno-amx-${part}>)
    endforeach()
endif()
