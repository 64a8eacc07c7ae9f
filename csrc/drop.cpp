// SPDX-License-Identifier: Apache-2.0
#include "drop.h"

#include <algorithm>
#include <vector>

#include "prompt_rows.h"
#include "team.h"

namespace sphkv {

void drop_losses(const PromptRows& rows, const DropRows& job, int num_threads, float* loss) {
  const int groups = (job.rows + kDropRows - 1) / kDropRows;
  const int width = (job.dim + rows.lanes - 1) / rows.lanes * rows.lanes;
  // values lie as they shall where their dimensions fill whole vectors
  const bool is_wide = width == job.dim;
  std::vector<float> widened(is_wide ? 0 : static_cast<size_t>(job.heads) * job.tokens * width);
  const float* values = is_wide ? job.values : widened.data();
  std::vector<double> parts(static_cast<size_t>(job.heads) * groups * job.blocks);
  const Phase fill{is_wide ? 0 : job.heads, [&](int head) {
    for (int t = 0; t < job.tokens; ++t) {
      const size_t at = static_cast<size_t>(head) * job.tokens + t;
      std::copy_n(job.values + at * job.dim, job.dim, widened.data() + at * width);
    }
  }};
  const Phase drop{job.heads * groups, [&](int task) {
    const int head = task / groups;
    rows.drop(job, head, task % groups * kDropRows,
              values + static_cast<size_t>(head) * job.tokens * width, width,
              parts.data() + static_cast<size_t>(task) * job.blocks);
  }};
  const Phase add{job.heads, [&](int head) {
    for (int block = 0; block < job.blocks; ++block) {
      double sum = 0;
      for (int group = 0; group < groups; ++group) {
        sum += parts[(static_cast<size_t>(head) * groups + group) * job.blocks + block];
      }
      // the last block is the first to go
      loss[static_cast<size_t>(head) * job.blocks + job.blocks - 1 - block] = static_cast<float>(sum);
    }
  }};
  run_phases(num_threads, {fill, drop, add});
}

}  // namespace sphkv
