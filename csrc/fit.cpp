// SPDX-License-Identifier: Apache-2.0
#include "fit.h"

#include "prompt_rows.h"
#include "team.h"

namespace sphkv {

void nearest_points(const PromptRows& rows, const PlaneSamples& samples, int levels,
                    const float* points, int num_threads, int64_t* index) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    rows.nearest(samples, levels, points, row, index);
  }}});
}

void grow_points(const PromptRows& rows, const PlaneSamples& samples, const Growth& growth,
                 const float* points, int num_threads, float* found) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    rows.grow(samples, growth, row, points, found);
  }}});
}

void alternate_stages(const PromptRows& rows, const PlaneSamples& samples, int levels, int rounds,
                      int num_threads, float* first, float* second) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    rows.alternate(samples, levels, rounds, row, first, second);
  }}});
}

void refine_stages(const PromptRows& rows, const PlaneSamples& samples, const SumFit& fit,
                   int num_threads, float* first, float* second) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    rows.refine(samples, fit, row, first, second);
  }}});
}

}  // namespace sphkv
