// The kernels as a table
#include "edgekv-cpu.h"

#include "ggml-cpu.h"

const edgekv_cpu_kernels * edgekv_cpu_kernels_of_backend() {
    static const edgekv_cpu_kernels all = {
        edgekv_cpu_attend_part,
        edgekv_cpu_attend_combine,
        edgekv_cpu_attend_prompt,
        edgekv_cpu_codes_learn,
        edgekv_cpu_codes_put,
        edgekv_cpu_recall,
        edgekv_cpu_recall_groups,
        edgekv_cpu_score_columns,
        edgekv_cpu_product_words,
        edgekv_cpu_product_room,
        edgekv_cpu_product_unpacked,
        edgekv_cpu_product,
        edgekv_cpu_product_peak,
        edgekv_cpu_merge_nearest,
        edgekv_cpu_merge_fold,
        edgekv_cpu_key_sum,
        edgekv_cpu_predict,
        edgekv_cpu_moments,
        edgekv_cpu_centroids,
        edgekv_cpu_rows_to_f32,
        edgekv_cpu_turn,
        edgekv_cpu_whole_keys,
        ggml_cpu_fp16_to_fp32,
        ggml_cpu_fp32_to_fp16,
    };
    return &all;
}
