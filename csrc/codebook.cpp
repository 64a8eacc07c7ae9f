// SPDX-License-Identifier: Apache-2.0
#include "codebook.h"

#include <algorithm>
#include <cmath>

namespace sphkv {

namespace {

constexpr long double kTurn = 6.283185307179586476925286766559L;

void add_entry(HeadCodebook& head, int slot, int plane, const float* xy, int stride) {
  float radius = 0.0f;
  const size_t at = head.points.size();
  head.points.resize(at + 2 * kSlotLevels);
  head.scaled.resize(at + 2 * kSlotLevels);
  for (int code = 0; code < kSlotLevels; ++code) {
    const float x = xy[code * stride], y = xy[code * stride + 1];
    head.points[at + code] = x;
    head.points[at + kSlotLevels + code] = y;
    radius = std::max(radius, std::hypot(x, y));
  }
  const float scale = radius > 0.0f ? kPointPeak / radius : 0.0f;
  for (int i = 0; i < 2 * kSlotLevels; ++i) {
    head.scaled[at + i] = head.points[at + i] * scale;
  }
#if defined(__aarch64__)
  for (int i = 0; i < 2 * kSlotLevels; ++i) {
    head.halves.push_back(static_cast<__fp16>(head.scaled[at + i] / 256.0f));
  }
#endif
  head.entries.push_back({slot, plane, radius, false, false});
}

}  // namespace

Rotary::Rotary(int planes, const double* radians, const int64_t* channels)
    : num_planes(planes), turns(planes), channel(channels, channels + 2 * planes),
      cos_row(static_cast<size_t>(planes) * kMaxRows),
      sin_row(static_cast<size_t>(planes) * kMaxRows) {
  for (int plane = 0; plane < planes; ++plane) {
    // Integer phases wrap by themselves and stay exact at any position; the extended type
    // keeps the bits that a double of this size has lost.
    const long double turn = radians[plane] / kTurn;
    turns[plane] = static_cast<uint64_t>(std::ldexp(turn - std::floor(turn), 64));
    for (int row = 0; row < kMaxRows; ++row) {
      cos_row[plane * kMaxRows + row] = static_cast<float>(std::cos(radians[plane] * row));
      sin_row[plane * kMaxRows + row] = static_cast<float>(std::sin(radians[plane] * row));
    }
  }
}

Codebook::Codebook(const Rotary* rotary_, int num_heads, int num_slots_, const float* points,
                   const int64_t* slot_plane, const int64_t* num_pairs, const float* constant)
    : rotary(rotary_), num_slots(num_slots_), heads(num_heads) {
  constexpr int kHalf = 2 * kSlotLevels;
  for (int h = 0; h < num_heads; ++h) {
    const int first_pair = num_slots - static_cast<int>(num_pairs[h]);
    for (int s = 0; s < num_slots; ++s) {
      const size_t at = static_cast<size_t>(h) * num_slots + s;
      const float* half = points + at * 2 * kHalf;
      add_entry(heads[h], s, static_cast<int>(slot_plane[2 * at]), half, 2);
      if (s < first_pair) continue;
      heads[h].entries.back().is_pair_first = true;
      add_entry(heads[h], s, static_cast<int>(slot_plane[2 * at + 1]), half + kHalf, 2);
    }
    for (int plane = 0; plane < rotary->num_planes; ++plane) {
      const float* xy = constant + (static_cast<size_t>(h) * rotary->num_planes + plane) * 2;
      if (xy[0] != 0.0f || xy[1] != 0.0f) add_entry(heads[h], -1, plane, xy, 0);
    }
  }
}

}  // namespace sphkv
