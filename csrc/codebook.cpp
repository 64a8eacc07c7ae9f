// SPDX-License-Identifier: Apache-2.0
#include "codebook.h"

#include <algorithm>
#include <cmath>
#include <limits>

// The one home of these, see codebook.h.
template class std::vector<float>;
template class std::vector<int8_t>;
template class std::vector<uint8_t>;
template class std::vector<int32_t>;
template class std::vector<uint32_t>;

namespace sphkv {

namespace {

constexpr long double kTurn = 6.283185307179586476925286766559L;

// What is allocated, used or not.
template <class T>
size_t bytes_of(const std::vector<T>& part) {
  return part.capacity() * sizeof(T);
}

void add_entry(HeadCodebook& head, int slot, int plane, const float* xy, int stride) {
  float radius = 0.0f;
  const size_t at = head.scaled.size();
  head.scaled.resize(at + 2 * kSlotLevels);
  for (int code = 0; code < kSlotLevels; ++code) {
    const float x = xy[code * stride], y = xy[code * stride + 1];
    head.scaled[at + code] = x;
    head.scaled[at + kSlotLevels + code] = y;
    // not hypot: its newest version would bind the extension to glibc 2.35
    radius = std::max(radius, std::sqrt(x * x + y * y));
  }
  const float scale = radius > 0.0f ? kPointPeak / radius : 0.0f;
  for (int i = 0; i < 2 * kSlotLevels; ++i) {
    head.scaled[at + i] *= scale;
  }
#if defined(__aarch64__)
  for (int i = 0; i < 2 * kSlotLevels; ++i) {
    head.halves.push_back(static_cast<__fp16>(head.scaled[at + i] / 256.0f));
  }
#endif
  head.entries.push_back({slot, plane, radius, 0.0f, false, false});
}

// Vectors that grow by doubling would keep up to half of their bytes unused.
void reserve_entries(HeadCodebook& head, int count) {
  head.entries.reserve(count);
  head.scaled.reserve(static_cast<size_t>(count) * 2 * kSlotLevels);
#if defined(__aarch64__)
  head.halves.reserve(static_cast<size_t>(count) * 2 * kSlotLevels);
#endif
}

int count_constants(const float* constant, int head, int num_planes) {
  const float* xy = constant + static_cast<size_t>(head) * num_planes * 2;
  int count = 0;
  for (int plane = 0; plane < num_planes; ++plane, xy += 2) {
    count += xy[0] != 0.0f || xy[1] != 0.0f;
  }
  return count;
}

// Squared error a plane's code leaves, guessed from the spacing of its last stage: a cell of side
// s has the error s * s / 6.
double spacing_error(const float* x, const float* y) {
  double sum = 0.0;
  for (int i = 0; i < kSlotLevels; ++i) {
    double nearest = std::numeric_limits<double>::infinity();
    for (int j = 0; j < kSlotLevels; ++j) {
      const double dx = x[i] - x[j], dy = y[i] - y[j];
      const double square = dx * dx + dy * dy;
      // a pair slot repeats the points of each of its planes
      if (square > 0.0) nearest = std::min(nearest, square);
    }
    if (nearest < std::numeric_limits<double>::infinity()) sum += nearest;
  }
  return sum / kSlotLevels / 6.0;
}

// The last entry of a plane is its finest: that one carries the plane's error.
void guess_errors(HeadCodebook& head, int num_planes) {
  std::vector<int32_t> last(num_planes, -1);
  for (size_t e = 0; e < head.entries.size(); ++e) {
    if (head.entries[e].slot >= 0) last[head.entries[e].plane] = static_cast<int32_t>(e);
  }
  for (const int32_t e : last) {
    if (e < 0) continue;
    const float* x = head.scaled.data() + static_cast<size_t>(e) * 2 * kSlotLevels;
    const double unit = head.entries[e].unit();
    head.entries[e].plane_error =
        static_cast<float>(spacing_error(x, x + kSlotLevels) * unit * unit);
  }
}

}  // namespace

Rotary::Rotary(int planes, const double* radians, const int64_t* channels)
    : num_planes(planes), turns(planes), channel(channels, channels + 2 * planes),
      cos_row(static_cast<size_t>(planes) * kMaxRows),
      sin_row(static_cast<size_t>(planes) * kMaxRows),
      cos_step(static_cast<size_t>(planes) * (kMaxRows + 1)),
      sin_step(static_cast<size_t>(planes) * (kMaxRows + 1)),
      cos_point(static_cast<size_t>(planes) * kMaxRows),
      sin_point(static_cast<size_t>(planes) * kMaxRows),
      cos_quad(static_cast<size_t>(planes) * kMaxRows / kQuad),
      sin_quad(static_cast<size_t>(planes) * kMaxRows / kQuad), is_slow(planes) {
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
      const size_t at = static_cast<size_t>(plane) * kMaxRows + row;
      cos_row[at] = cosine;
      sin_row[at] = sine;
      cos_point[at] = static_cast<Point>(cosine);
      sin_point[at] = static_cast<Point>(sine);
    }
    is_slow[plane] = std::abs(radians[plane]) <= kSlowRadians;
    for (int quad = 0; quad < kMaxRows / kQuad; ++quad) {
      const size_t at = static_cast<size_t>(plane) * kMaxRows / kQuad + quad;
      const double middle = radians[plane] * (kQuad * quad + 0.5 * (kQuad - 1));
      cos_quad[at] = static_cast<Point>(std::cos(middle));
      sin_quad[at] = static_cast<Point>(std::sin(middle));
    }
  }
}

Codebook::Codebook(const Rotary* rotary_, int num_heads, int num_slots_, const float* points,
                   const int64_t* slot_plane, const int64_t* num_pairs, const float* constant)
    : rotary(rotary_), num_slots(num_slots_), heads(num_heads) {
  constexpr int kHalf = 2 * kSlotLevels;
  for (int h = 0; h < num_heads; ++h) {
    const int first_pair = num_slots - static_cast<int>(num_pairs[h]);
    reserve_entries(heads[h], num_slots + static_cast<int>(num_pairs[h]) +
                                  count_constants(constant, h, rotary->num_planes));
    for (int s = 0; s < num_slots; ++s) {
      const size_t at = static_cast<size_t>(h) * num_slots + s;
      const float* half = points + at * 2 * kHalf;
      add_entry(heads[h], s, static_cast<int>(slot_plane[2 * at]), half, 2);
      if (s < first_pair) continue;
      heads[h].entries.back().is_pair_first = heads[h].entries.back().is_paired = true;
      add_entry(heads[h], s, static_cast<int>(slot_plane[2 * at + 1]), half + kHalf, 2);
      heads[h].entries.back().is_paired = true;
    }
    for (int plane = 0; plane < rotary->num_planes; ++plane) {
      const float* xy = constant + (static_cast<size_t>(h) * rotary->num_planes + plane) * 2;
      if (xy[0] != 0.0f || xy[1] != 0.0f) add_entry(heads[h], -1, plane, xy, 0);
    }
    guess_errors(heads[h], rotary->num_planes);
  }
}

size_t Rotary::nbytes() const {
  return bytes_of(turns) + bytes_of(channel) + bytes_of(cos_row) + bytes_of(sin_row) +
         bytes_of(cos_step) + bytes_of(sin_step) + bytes_of(cos_point) + bytes_of(sin_point) +
         bytes_of(cos_quad) + bytes_of(sin_quad) + bytes_of(is_slow);
}

size_t Codebook::nbytes() const {
  size_t total = 0;
  for (const HeadCodebook& head : heads) {
    total += bytes_of(head.entries) + bytes_of(head.scaled);
#if defined(__aarch64__)
    total += bytes_of(head.halves);
#endif
  }
  return total;
}

}  // namespace sphkv
