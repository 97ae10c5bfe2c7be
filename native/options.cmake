# CMake options of llama.cpp: included by ../CMakeLists.txt, and given to the
# unpatched build with `cmake -C`, so that both libraries are compiled alike.
# An option given on the command line wins.

set(BUILD_SHARED_LIBS ON CACHE BOOL "")
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "")
endforeach()
set(LLAMA_CURL OFF CACHE BOOL "")
set(GGML_RPC ON CACHE BOOL "")
set(GGML_RPC_RDMA OFF CACHE BOOL "") # else whoever has libibverbs gets a library that needs it
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/amx.cmake" CACHE FILEPATH "")

# The tree has no repository of its own: git would report the commit of whatever
# repository lies around it, and every commit there would recompile the libraries.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../patches/UPSTREAM" commit REGEX "^commit *=")
string(REGEX REPLACE "^commit *= *" "" commit "${commit}")
set(LLAMA_BUILD_COMMIT "${commit}" CACHE STRING "")
set(LLAMA_BUILD_NUMBER 0 CACHE STRING "")
set(GIT_EXE "" CACHE FILEPATH "")
