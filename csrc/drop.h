// SPDX-License-Identifier: Apache-2.0
// How far the outputs of attention move as ever more blocks of states are dropped. The same as
// AttentionRows.drop_losses of sphkv/retention/rows.py, with sums over blocks in double.
#pragma once

#include <cstdint>

namespace sphkv {

struct DropRows {
  int heads, rows, tokens, dim;
  const float* weight;      // [heads, rows, tokens]
  const uint8_t* is_valid;  // [rows, tokens]
  const float* share;       // [heads, rows]
  const float* values;      // [heads, tokens, dim]
  const float* output;      // [heads, rows, dim]
  int blocks, block_units, unit_tokens;
  const int64_t* units;     // [heads, blocks, block_units], -1 for none; the last block goes first
  float least_mass;
};

struct PromptRows;

// Loss [heads, blocks] once the last 1, 2, ... blocks are gone.
void drop_losses(const PromptRows& rows, const DropRows& job, int num_threads, float* loss);

}  // namespace sphkv
