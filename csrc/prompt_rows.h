// SPDX-License-Identifier: Apache-2.0
// What codebooks and prices of a prompt take longest with, row by row, for one instruction set.
#pragma once

#include "drop.h"
#include "fit.h"

namespace sphkv {

constexpr int kDropRows = 16;  // of a task, whatever the number of threads

// See fit.h and drop.h; every function is given all rows and does one, or one task.
struct PromptRows {
  void (*nearest)(const PlaneSamples& samples, int levels, const float* points, int row,
                  int64_t* index);
  void (*grow)(const PlaneSamples& samples, const Growth& growth, int row, const float* points,
               float* found);
  void (*alternate)(const PlaneSamples& samples, int levels, int rounds, int row, float* first,
                    float* second);
  void (*refine)(const PlaneSamples& samples, const SumFit& fit, int row, float* first,
                 float* second);
  // Values are `width` apart, in whole vectors; the part of the task's rows in the loss of each block.
  void (*drop)(const DropRows& job, int head, int first, const float* values, int width,
               double* loss);
  int lanes;  // floats of a vector
};

// Null where the compiler or the processor lacks the instruction set.
const PromptRows* avx512_prompt_rows();
const PromptRows* avx2_prompt_rows();
const PromptRows* plain_prompt_rows();

}  // namespace sphkv
