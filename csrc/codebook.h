// SPDX-License-Identifier: Apache-2.0
// Codebooks of one layer at one tier, in the form the kernels rotate and look up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "page.h"

// Variants are compiled for instruction sets that a processor may lack. Were each to bring its own
// copy of a vector's functions, the linker could keep one of those for everybody.
extern template class std::vector<float>;
extern template class std::vector<int8_t>;
extern template class std::vector<uint8_t>;
extern template class std::vector<int32_t>;
extern template class std::vector<uint32_t>;

namespace sphkv {

// Largest coordinate of a point as a 16-bit integer; its upper byte then never exceeds 127.
constexpr int kPointPeak = 127 * 256;

// Rows that share a phase in slow planes. Below this many radians per position they err by a
// third of what rounding to bytes does.
constexpr int kQuad = 4;
constexpr double kSlowRadians = 1e-3;

// What is rounded to bytes after a turn: eleven bits are enough for that.
#if defined(__aarch64__)
using Point = __fp16;
#else
using Point = float;
#endif

// Frequencies of one layer's rotary embedding, and phases of the first positions.
struct Rotary {
  int num_planes = 0;
  std::vector<uint64_t> turns;   // [planes] turns per position, in units of 2^-64: wraps
  std::vector<int32_t> channel;  // [planes, 2]
  std::vector<float> cos_row;    // [planes, kMaxRows]
  std::vector<float> sin_row;
  std::vector<float> cos_step;   // [kMaxRows + 1, planes], the same transposed
  std::vector<float> sin_step;
  std::vector<Point> cos_point;  // as cos_row
  std::vector<Point> sin_point;
  std::vector<Point> cos_quad;   // [planes, kMaxRows / kQuad] amid each quad of rows
  std::vector<Point> sin_quad;
  std::vector<uint8_t> is_slow;  // [planes] whether a quad of rows may share one phase

  Rotary(int planes, const double* radians, const int64_t* channels);

  size_t nbytes() const;  // of everything above
};

// Phases of every plane at one position.
struct Phases {
  std::vector<uint32_t> word;       // turns in units of 2^-32
  std::vector<float> cosine, sine;
#if defined(__aarch64__)
  std::vector<Point> half_cosine, half_sine;
#endif
  int64_t position = 0;
  int num_advances = -1;            // since the last exact start; -1 before the first
};

// One plane's contribution: a point chosen by a slot's code, or a constant point.
struct Entry {
  int32_t slot;   // -1 for a constant
  int32_t plane;
  float radius;   // longest point
  float plane_error;   // squared error of the plane's code, at its last stage; 0 elsewhere
  bool is_pair_first;  // shares its slot with the next entry
  bool is_paired;      // is one of such two

  // what one of the scaled points' units is
  float unit() const { return radius / kPointPeak; }
};

struct HeadCodebook {
  std::vector<Entry> entries;   // single slots, pair slots (two entries each), constants
  std::vector<float> scaled;    // [entries, 2, 16] x then y, scaled so that the radius is kPointPeak
#if defined(__aarch64__)
  std::vector<Point> halves;    // the same, scaled so that the radius is 127
#endif
};

struct Codebook {
  const Rotary* rotary;
  int num_slots;
  std::vector<HeadCodebook> heads;

  // points [heads, slots, 2, 16, 2], slot_plane [heads, slots, 2], num_pairs [heads],
  // constant [heads, planes, 2]
  Codebook(const Rotary* rotary, int num_heads, int num_slots, const float* points,
           const int64_t* slot_plane, const int64_t* num_pairs, const float* constant);

  size_t nbytes() const;  // of all heads; the phases, which others share, count for themselves
};

}  // namespace sphkv
