// SPDX-License-Identifier: Apache-2.0
// Points of the plane where samples would have them. Every row of samples is a plane of its own.
// The same steps as the torch operations of sphkv/codec/codebook.py, with sums in double.
#pragma once

#include <cstdint>

namespace sphkv {

struct PlaneSamples {
  int rows, tokens;
  const float* x;       // [rows, tokens, 2]
  const float* weight;  // [rows, tokens]; null where nothing is weighed
};

struct PromptRows;

// Index [rows, tokens] of the nearest of points [rows, levels, 2], the first of equally near ones.
void nearest_points(const PromptRows& rows, const PlaneSamples& samples, int levels,
                    const float* points, int num_threads, int64_t* index);

// Twice as many points, [rows, 2 * levels, 2]: each moved both ways along its cluster's longer
// axis, then so many rounds of Lloyd's algorithm.
struct Growth {
  int levels, rounds;
  float split;  // of a standard deviation
};
void grow_points(const PromptRows& rows, const PlaneSamples& samples, const Growth& growth,
                 const float* points, int num_threads, float* found);

// Two stages [rows, levels, 2] in place, each fitted in turn to what the other leaves over.
void alternate_stages(const PromptRows& rows, const PlaneSamples& samples, int levels, int rounds,
                      int num_threads, float* first, float* second);

// Two stages in place, fitted by all sums of a point of each.
struct SumFit {
  int first, second;  // points of each stage
  int rounds, sweeps;
  float relaxation;   // how far all rounds but the last go
};
void refine_stages(const PromptRows& rows, const PlaneSamples& samples, const SumFit& fit,
                   int num_threads, float* first, float* second);

// Most points, or sums of points, that are searched.
constexpr int kMostPoints = 256;

}  // namespace sphkv
