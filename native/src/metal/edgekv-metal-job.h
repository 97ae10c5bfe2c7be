#pragma once
// A custom node that encodes what was queued: ggml-metal's C interface makes command buffers for
// graphs only.

struct ggml_metal_device;
struct ggml_metal_encoder;
struct ggml_tensor;

// false: another node
bool edgekv_metal_run_job(
    ggml_metal_device * dev, ggml_metal_encoder * enc, const ggml_tensor * node);
