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
//
// A window needs no more than its own rows in front of a chunk. Where a prompt is longer, they
// slide: whenever the next chunk finds no room, the last `window` rows go back to `front`.
//
// Rows that the cache will round wait in halves: attention within a prompt does not suffer, and a
// row is rounded once, when it is known to stay. Layers that are read all at once have the cache's
// types: there is no room for halves of all.
struct edgekv_scratch {
    edgekv_shape shape;
    edgekv_tensors t;
    std::vector<float> pos; // with ALiBi: token of each row
    int64_t cap = 0, n_old = 0;
    int64_t window = 0;            // 0: all rows stay
    int64_t front = 0, n_step = 1; // n_step: tokens of a chunk

    // where in a head the chunk lies whose first token is number `row` of the prompt
    int64_t at(int64_t row) const {
        const int64_t i = since_slide(row);
        return i < 0 ? n_old + row : front + window + i * n_step;
    }
    bool slides_before(int64_t row) const { return since_slide(row) == 0; }
    void slide(int64_t row, int n_head_kv); // throws what the device throws
    // where row 0 of a head would lie: its rows in front of that chunk are numbered on from there
    int64_t origin(const edgekv_layer & l, int head, int64_t row) const {
        return head * cap + at(row) - row - l.len[head];
    }
    size_t n_bytes() const { return t.n_bytes() + pos.size() * sizeof(float); }

private:
    // chunks since the last slide; -1: none was needed yet
    int64_t since_slide(int64_t row) const {
        const int64_t n = row / n_step - (cap - n_old) / n_step;
        return window && n >= 0 ? n % ((cap - front - window) / n_step) : -1;
    }
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

    // a chunk of this layer is next, with token `row`
    void make_room(const edgekv_layer & l, int64_t row);
    // the kept rows of earlier turns go where the new ones of this layer will follow
    void lay_out_old(const edgekv_layer & l);
    // the prompt's rows of this layer, which attends to everything, go into the archive
    void archive(const edgekv_layer & l) const;
    // this layer's rows in full are not needed again
    void drop(const edgekv_layer & l) { all[index(l)]->t = {}; }

    // the layer that was read last, while its rows are there; throws edgekv_error
    const edgekv_layer & in_work() const;
    // all rows of one of its heads, which has no window; throws edgekv_error
    edgekv_head_rows rows_read(int head) const;

    size_t n_bytes() const;
    mutable edgekv_matrix device_work; // on a device with kernels of ours, for whoever calls one

private:
    bool taken(int scratch, int slice) const;
    int64_t sliding_rows(const edgekv_layer & l) const;

    const edgekv_prompt & prompt;
    std::vector<std::unique_ptr<edgekv_scratch>> all;
    std::vector<int> of_layer; // [n_layer]
};
