#pragma once
// Groups of the rows that a head loses: those of a group answer alike

#include "../../include/edgekv-lost.h"
#include "edgekv-arranged.h"

namespace edgekv {

// [n] the group of each lost row, below params.n_groups: k-means, where two keys are as far apart
// as their logits are for the queries, and values count as much
std::vector<int32_t> find_groups(const edgekv_lost & lost, const edgekv_centroid_params & params);

} // namespace edgekv
