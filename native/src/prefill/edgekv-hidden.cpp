// Hidden states: in memory as f32 or f16, in a temporary file, or on a device
#include "edgekv-hidden.h"
#include "edgekv-kernels.h"
#include "edgekv-pages.h"
#include "edgekv-temporary.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

static std::FILE * open_temporary(const std::string & dir) {
    const int fd = edgekv_temporary(dir);
    return fd < 0 ? nullptr : fdopen(fd, "w+b");
}

// by which power of two a state is too large for f16: a few channels of some models go beyond
// 65504. Divided by it, a state keeps its relative precision
static int8_t excess(const float * x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    int exponent = 0;
    if (std::isfinite(most)) std::frexp(most, &exponent);
    return (int8_t) std::max(exponent - 15, 0); // below 2^15
}

static void scale(float * x, int64_t n, int exponent) {
    if (exponent == 0) return;
    const float factor = std::ldexp(1.0f, exponent);
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

static bool seek(std::FILE * f, int64_t at) {
#ifdef _WIN32
    return _fseeki64(f, at, SEEK_SET) == 0;
#else
    return fseeko(f, (off_t) at, SEEK_SET) == 0;
#endif
}

static ggml_backend_buffer_type_t memory_for(edgekv_hidden_mode mode, ggml_backend_dev_t device) {
    if (mode == EDGEKV_HIDDEN_DEVICE) return ggml_backend_dev_buffer_type(device);
    const auto pinned = device ? ggml_backend_dev_host_buffer_type(device) : nullptr;
    return pinned ? pinned : ggml_backend_cpu_buffer_type();
}

static size_t value_size(edgekv_hidden_mode mode) {
    return mode == EDGEKV_HIDDEN_F16 ? sizeof(ggml_fp16_t) : sizeof(float);
}

edgekv_hidden::edgekv_hidden(edgekv_hidden_mode mode, int64_t width, int64_t n_tokens,
    ggml_backend_dev_t device, const std::string & dir)
    : mode(mode), width(width), buft(memory_for(mode, device)),
      in_place(mode == EDGEKV_HIDDEN_DEVICE || (mode == EDGEKV_HIDDEN_F32 && !device)) {
    if (mode != EDGEKV_HIDDEN_DISK) buf = allocate((size_t) n_tokens * width * value_size(mode));
    if (mode == EDGEKV_HIDDEN_F16) exponents.resize(n_tokens);
    if (mode == EDGEKV_HIDDEN_DISK) file = open_temporary(dir);
    if (mode == EDGEKV_HIDDEN_DISK && !file) {
        throw std::runtime_error("no temporary file for the hidden states: set TMPDIR");
    }
}

edgekv_hidden::~edgekv_hidden() {
    if (file) fclose(file);
}

ggml_backend_buffer_ptr edgekv_hidden::allocate(size_t n_bytes) const {
    ggml_backend_buffer_ptr p { ggml_backend_buft_alloc_buffer(buft, n_bytes) };
    if (!p) throw std::bad_alloc();
    return p;
}

size_t edgekv_hidden::n_bytes() const {
    const auto size = [](const auto & b) { return b ? ggml_backend_buffer_get_size(b.get()) : 0; };
    return size(buf) + size(staging) + exponents.size();
}

float * edgekv_hidden::f32(int64_t first) const {
    return (float *) ggml_backend_buffer_get_base(buf.get()) + first * width;
}
ggml_fp16_t * edgekv_hidden::f16(int64_t first) const {
    return (ggml_fp16_t *) ggml_backend_buffer_get_base(buf.get()) + first * width;
}

float * edgekv_hidden::place(int64_t first) const { return in_place ? f32(first) : nullptr; }

// the tensor's own memory if the CPU can reach it
float * edgekv_hidden::staged(const ggml_tensor * t, int64_t n) {
    if (ggml_backend_buffer_is_host(t->buffer)) return (float *) t->data;
    const size_t n_bytes = n * width * sizeof(float);
    if (!staging || ggml_backend_buffer_get_size(staging.get()) < n_bytes)
        staging = allocate(n_bytes);
    return (float *) ggml_backend_buffer_get_base(staging.get());
}

bool edgekv_hidden::load(int64_t first, int64_t n, ggml_tensor * to) {
    if (in_place) return true;
    float * x = mode == EDGEKV_HIDDEN_F32 ? f32(first) : staged(to, n);
    if (mode == EDGEKV_HIDDEN_F16) {
        edgekv_cpu().f16_to_f32(f16(first), x, n * width);
        for (int64_t i = 0; i < n; ++i) scale(x + i * width, width, exponents[first + i]);
    }
    if (mode == EDGEKV_HIDDEN_DISK &&
        (!seek(file, first * width * sizeof(float)) ||
            fread(x, sizeof(float), n * width, file) != (size_t) (n * width)))
        return false;
    if (x != to->data) ggml_backend_tensor_set(to, x, 0, n * width * sizeof(float));
    return true;
}

void edgekv_hidden::drop(int64_t first, int64_t n) {
    if (!buf || buft != ggml_backend_cpu_buffer_type()) return;
    const size_t each = width * value_size(mode);
    edgekv_give_back_pages(
        (char *) ggml_backend_buffer_get_base(buf.get()) + first * each, n * each);
}

bool edgekv_hidden::save(int64_t first, int64_t n, const ggml_tensor * from) {
    if (in_place) return true;
    float * x = mode == EDGEKV_HIDDEN_F32 ? f32(first) : staged(from, n);
    if (x != from->data) ggml_backend_tensor_get(from, x, 0, n * width * sizeof(float));
    if (mode == EDGEKV_HIDDEN_F16) {
        for (int64_t i = 0; i < n; ++i) {
            exponents[first + i] = excess(x + i * width, width);
            scale(x + i * width, width, -exponents[first + i]);
        }
        edgekv_cpu().f32_to_f16(x, f16(first), n * width);
    }
    if (mode == EDGEKV_HIDDEN_DISK)
        return seek(file, first * width * sizeof(float)) &&
            fwrite(x, sizeof(float), n * width, file) == (size_t) (n * width);
    return true;
}
