// SPDX-License-Identifier: Apache-2.0
#include "codebook.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

// Squared error a plane's code leaves, guessed from the spacing of its last stage: a cell of side
// s has the error s * s / 6.
double spacing_error(const float* x, const float* y) {
  double sum = 0.0;
  for (int i = 0; i < kSlotLevels; ++i) {
    double nearest = std::numeric_limits<double>::infinity();
    for (int j = 0; j < kSlotLevels; ++j) {
      const double dx = x[i] - x[j], dy = y[i] - y[j];
      if (j != i) nearest = std::min(nearest, dx * dx + dy * dy);
    }
    sum += nearest;
  }
  return sum / kSlotLevels / 6.0;
}

// Marks single slots whose points are so long beside their plane's error that rounding point and
// query to bytes would add more than kMaxShare of that error.
void mark_fine(HeadCodebook& head) {
  constexpr double kByteError = 1.2e-5;  // of a term's square, both roundings together
  static const double kMaxShare = getenv("FS") ? atof(getenv("FS")) : 0.02;
  const int n = static_cast<int>(head.entries.size());
  for (int last = n - 1; last >= 0; --last) {
    const Entry& entry = head.entries[last];
    const bool is_pair =
        entry.is_pair_first || (last > 0 && head.entries[last - 1].is_pair_first);
    // stages of a plane are adjacent, the finest last
    const bool is_last = last + 1 == n || head.entries[last + 1].plane != entry.plane;
    if (entry.slot < 0 || is_pair || !is_last) continue;
    const float* x = head.points.data() + static_cast<size_t>(last) * 2 * kSlotLevels;
    int first = last;
    while (first > 0 && head.entries[first - 1].plane == entry.plane) --first;
    const double allowed =
        kMaxShare * spacing_error(x, x + kSlotLevels) / (last - first + 1);
    for (int e = first; e <= last; ++e) {
      const double square = static_cast<double>(head.entries[e].radius) * head.entries[e].radius;
      head.entries[e].is_fine = kByteError * square > allowed;
    }
  }
}

}  // namespace

Rotary::Rotary(int planes, const double* radians, const int64_t* channels)
    : num_planes(planes), turns(planes), channel(channels, channels + 2 * planes),
      cos_row(static_cast<size_t>(planes) * kMaxRows),
      sin_row(static_cast<size_t>(planes) * kMaxRows),
      cos_step(static_cast<size_t>(planes) * (kMaxRows + 1)),
      sin_step(static_cast<size_t>(planes) * (kMaxRows + 1)) {
  for (int plane = 0; plane < planes; ++plane) {
    // Integer phases wrap by themselves and stay exact at any position; the extended type
    // keeps the bits that a double of this size has lost.
    const long double turn = radians[plane] / kTurn;
    turns[plane] = static_cast<uint64_t>(std::ldexp(turn - std::floor(turn), 64));
    for (int row = 0; row <= kMaxRows; ++row) {
      const auto cosine = static_cast<float>(std::cos(radians[plane] * row));
      const auto sine = static_cast<float>(std::sin(radians[plane] * row));
      cos_step[static_cast<size_t>(row) * planes + plane] = cosine;
      sin_step[static_cast<size_t>(row) * planes + plane] = sine;
      if (row == kMaxRows) continue;
      cos_row[static_cast<size_t>(plane) * kMaxRows + row] = cosine;
      sin_row[static_cast<size_t>(plane) * kMaxRows + row] = sine;
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
    mark_fine(heads[h]);
  }
}

}  // namespace sphkv
