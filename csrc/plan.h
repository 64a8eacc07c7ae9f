// SPDX-License-Identifier: Apache-2.0
// What one decode step reads: pages by KV head, the open tail, queries and options.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codebook.h"
#include "page.h"

namespace sphkv {

// Pages that share a layout and a codebook.
struct PageKind {
  PageLayout layout;
  const Codebook* codebook = nullptr;  // null for the dense tier
  bool has_value_codes() const { return codebook != nullptr && layout.value_bits < 16; }
};

// Pages of one layer of one sequence. Addresses stay valid until the pointer table changes.
struct Plan {
  int num_heads = 0;
  int head_dim = 0;
  std::vector<PageKind> kinds;
  std::vector<int64_t> first_page;   // [heads + 1] into the two arrays below
  std::vector<const uint8_t*> page;  // head by head, pages of one kind adjacent
  std::vector<int32_t> kind;
};

struct Tail {
  const uint16_t* keys = nullptr;    // [heads, tokens, head_dim] bfloat16
  const uint16_t* values = nullptr;
  int64_t head_stride = 0;           // elements
  int num_tokens = 0;
  int64_t first_position = 0;
};

struct Options {
  float scale = 1.0f;
  float softcap = 0.0f;   // 0 for none
  int64_t window = 0;     // 0 for none
  int num_threads = 1;
  bool is_exact = false;  // float32 arithmetic throughout
};

// Queries of all heads; row v of a KV head is (query head in the group, query).
struct Queries {
  const float* data = nullptr;         // [heads * rows, head_dim]
  const int64_t* position = nullptr;   // [queries]
  int num_queries = 0;
  int num_rows = 0;                    // group * queries
};

// Softmax state over some keys: output sums are scaled by exp(-peak).
struct Partial {
  float* peak;     // [rows]
  float* mass;     // [rows]
  float* rotated;  // [rows, head_dim] values that were stored rotated
  float* plain;    // [rows, head_dim] values that were not
};

}  // namespace sphkv
