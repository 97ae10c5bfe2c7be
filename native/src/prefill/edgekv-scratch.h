#pragma once
// The scratch: layers in full, while a prompt is read. All layers of a shape take turns in one, or
// each has its own where all are read at once.

#include "edgekv-prompt.h"

#include <memory>
#include <vector>

// Numbers of rows that flash attention of devices is made for: with others, CUDA's loads K and V
// anew for each query head of a group
constexpr int EDGEKV_FLASH_ROWS = 256;

// One layer in full: head k owns rows [k*cap, (k + 1)*cap); its kept rows of earlier turns end at
// n_old, the new tokens follow. So the row of a new token is the same in every layer and head. On a
// device EDGEKV_FLASH_ROWS - 1 rows in front of the longest head's are nobody's.
struct edgekv_scratch {
    edgekv_tensors t;
    std::vector<float> pos; // with ALiBi: token of each row
    int64_t cap = 0, n_old = 0;

    int64_t first(const edgekv_layer & l, int head) const {
        return head * cap + n_old - l.len[head];
    }
    size_t n_bytes() const { return t.n_bytes() + pos.size() * sizeof(float); }
};

// rows of one head, some of which are about to be evicted: row i lies at
// first + (order ? order[i] : i)
struct edgekv_head_rows {
    const edgekv_tensors * t;
    int64_t first;
    int32_t n;
    const int32_t * order;
};

class edgekv_scratches {
public:
    explicit edgekv_scratches(const edgekv_prompt & prompt) : prompt(prompt) {}

    void make(); // throws std::bad_alloc
    void clear();
    int count() const { return (int) all.size(); }
    int index(const edgekv_layer & l) const { return of_layer[l.il]; }
    const edgekv_scratch & of(const edgekv_layer & l) const { return *all[index(l)]; }

    // the kept rows of earlier turns go where the new ones of this layer will follow
    void lay_out_old(const edgekv_layer & l);
    // this layer's rows in full are not needed again
    void drop(const edgekv_layer & l) { all[index(l)]->t = {}; }

    // the layer that was read last, while its rows are there; throws edgekv_error
    const edgekv_layer & in_work() const;
    // all rows of one of its heads; throws edgekv_error
    edgekv_head_rows rows_read(int head) const;

    size_t n_bytes() const;
    mutable edgekv_matrix device_work; // on a device with kernels of ours, for whoever calls one

private:
    bool taken(int scratch, int slice) const;

    const edgekv_prompt & prompt;
    std::vector<std::unique_ptr<edgekv_scratch>> all;
    std::vector<int> of_layer; // [n_layer]
};
