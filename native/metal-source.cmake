# The Metal kernels as one text without includes of our own: what the system's compiler gets when the program runs.
# edgekv_metal_source(text source): writes it to the file `text`, and a C++ file that defines edgekv_metal_source to `source`.
function(edgekv_metal_source text source)
    set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/src/metal")
    set(all "")
    foreach(name metal.h values.h logits.h attend.metal score.metal evict.metal merge.metal) # what is included stands before what includes it
        file(READ "${folder}/edgekv-${name}" one)
        string(REGEX REPLACE "(#include \"[^\"]*\"|#pragma once)\n" "" one "${one}")
        string(APPEND all "${one}")
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${folder}/edgekv-${name}")
    endforeach()
    file(CONFIGURE OUTPUT "${text}" CONTENT "${all}" @ONLY)
    file(CONFIGURE OUTPUT "${source}" @ONLY
        CONTENT "extern const char edgekv_metal_source[];\nconst char edgekv_metal_source[] = R\"metal(${all})metal\";\n")
endfunction()
