// SPDX-License-Identifier: Apache-2.0
// Dense states to codes: nearest points of unit keys, steps and codes of rotated values. The same
// arithmetic as sphkv/codec/keys.py and values.py, apart from the order of float32 sums.
#pragma once

#include <cstdint>

namespace sphkv {

// Unit keys of some pages before rotary embedding, and the codebook of each page's head.
struct KeyRows {
  int rows, tokens, planes, slots;
  const float* unit;           // [rows, tokens, planes, 2]
  const int64_t* plane_bits;   // [rows, planes]
  const int64_t* slot_plane;   // [rows, slots, 2]
  const float* points;         // [rows, slots, 2, 16, 2]
  const float* constant;       // [rows, planes, 2]
  const float* metric_root;    // [rows, planes, 2, 2]
};

// Codes [rows, slots, tokens]; the product of each unit key with its coded direction and that
// direction's length, both [rows, tokens].
void encode_key_rows(const KeyRows& keys, int num_threads, uint8_t* codes, float* cosine,
                     float* length);

// Rotated values, each divided by its largest component: [rows, tokens, dim].
struct ValueRows {
  int rows, tokens, dim, bits;
  const float* unit;
};

// What components of each cell count for, clipping ratio by clipping ratio; see codec/clipping.py.
constexpr int kClipCells = 128, kClipRatios = 16;
struct ClipTable {
  const int32_t* weights;  // [cells, 2, ratios]: along, square; null for a width without a choice
};

// Step of least squared error of every token, [rows, tokens]: that of the best clipping ratio, then
// refined.
void fit_value_steps(const ValueRows& values, const ClipTable& clips, int num_refinements,
                     int num_threads, float* step);

// Where a page's steps lie: low + width * code, one of each per row.
struct ScaleRows {
  const float* low;           // [rows]
  const float* width;         // [rows]
  const float* inverse_peak;  // [rows, tokens]
  const uint8_t* is_live;     // [rows, tokens]
  float coarse;               // a width above this part of a token's own step is coarse
};

// Moves each scale code, [rows, tokens], that is coarse to the best of itself and its neighbours, then
// writes the codes, [rows, tokens, dim]; both are 0 for tokens that are not live.
void encode_value_rows(const ValueRows& values, const ScaleRows& scales, int num_threads,
                       uint8_t* scale_code, uint8_t* codes);

}  // namespace sphkv
