// SPDX-License-Identifier: Apache-2.0
// Whole pages out of dense states, or out of states of other pages. Those are demoted: coded again at
// a lower tier, from the coordinates that their codes name; no coded key is turned to its position and
// no coded value is rotated on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "encode.h"
#include "plan.h"

namespace sphkv {

// How the values of a tier are coded; see sphkv/codec/values.py.
struct ValueRule {
  ClipTable clips;
  int num_refinements;
  float coarse;  // as ScaleRows::coarse
  float gain;    // what a reader's steps are multiplied with
};

// Pages of one layout and of several layers.
struct Recoding {
  int head_dim, num_heads;          // of a layer
  std::vector<PageKind> targets;    // [layers]
  const float* metric_root;         // [layers * heads, planes, 2, 2]
  int rows;
  const int64_t* head;              // [rows] among the heads of all layers
  ValueRule rule;
  uint8_t* pages;                   // [rows, page_bytes] with header and positions, else zero

  // States of pages of any layouts.
  std::vector<PageKind> sources;    // [kinds, layers]
  const int64_t* address = nullptr; // [pages] of the sources
  const int64_t* kind = nullptr;    // [pages]
  const int64_t* pick = nullptr;    // [rows, tokens] page * kMaxPageTokens + token

  // Or, where there is no pick, dense ones [rows, tokens, head_dim], keys after rotary embedding.
  const float* keys = nullptr;
  const float* values = nullptr;
};

// Codes one page.
using RecodePage = void (*)(const Recoding& job, int row);

void recode_pages(const Recoding& job, RecodePage recode, int num_threads);

// Null where the compiler or the processor lacks the instruction set.
RecodePage avx512_recoder();
RecodePage avx2_recoder();
RecodePage plain_recoder();

}  // namespace sphkv
