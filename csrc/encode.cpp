// SPDX-License-Identifier: Apache-2.0
#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "page.h"
#include "team.h"

namespace sphkv {

namespace {

constexpr int kLanes = 4, kVectors = 4;
constexpr int kBlock = kLanes * kVectors;  // tokens searched together, all in registers
constexpr int kPairLevels = 4;
constexpr int kMaxPoints = kSlotLevels * kSlotLevels;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Words __attribute__((vector_size(4 * kLanes)));

// Points of one slot or of half a slot, as queries see them (in the metric) and as they are.
struct Stage {
  int slot, shift, levels;
  float x[kSlotLevels], y[kSlotLevels];
  float seen_x[kSlotLevels], seen_y[kSlotLevels];
};

struct Block {
  float x[kBlock], y[kBlock];  // of the key in the metric
};

// Index of the nearest of `count` points for every token of the block; the first of equals.
void find_nearest(const Block& block, const float* px, const float* py, int count,
                  int32_t* index) {
  Floats x[kVectors], y[kVectors], best[kVectors];
  Words found[kVectors];
  std::memcpy(x, block.x, sizeof x);
  std::memcpy(y, block.y, sizeof y);
  for (int v = 0; v < kVectors; ++v) {
    best[v] = std::numeric_limits<float>::infinity() - Floats{};
    found[v] = Words{};
  }
  for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats dx = x[v] - px[i], dy = y[v] - py[i];
      const Floats distance = dx * dx + dy * dy;
      const Words is_nearer = distance < best[v];
      best[v] = is_nearer ? distance : best[v];
      found[v] = is_nearer ? i - Words{} : found[v];
    }
  }
  std::memcpy(index, found, sizeof found);
}

// Codes one plane of one row of keys: single slots, adjacent, then half a pair slot; points add.
class PlaneEncoder {
 public:
  PlaneEncoder(const KeyRows& keys, int row, int plane)
      : keys_(keys), row_(row), plane_(plane),
        root_(keys.metric_root + (static_cast<size_t>(row) * keys.planes + plane) * 4) {
    const int64_t bits = keys.plane_bits[static_cast<size_t>(row) * keys.planes + plane];
    const int num_singles = static_cast<int>(bits / 4);
    int slot = 0;
    while (num_stages_ < num_singles) {
      if (num_stages_ == 0) slot = find(0);
      load(slot++, 0, kSlotLevels);
    }
    if (bits % 4 != 0) {
      // the plane's other slots, if any, are all before it
      slot = find(slot);
      load(slot, owner(slot)[0] != plane_, kPairLevels);
    }
    if (num_stages_ < 2) return;
    const int levels = stages_[1].levels;
    for (int i = 0; i < kSlotLevels * levels; ++i) {
      sum_x_[i] = stages_[0].seen_x[i / levels] + stages_[1].seen_x[i % levels];
      sum_y_[i] = stages_[0].seen_y[i / levels] + stages_[1].seen_y[i % levels];
    }
  }

  int num_stages() const { return num_stages_; }

  // Adds this plane's codes, and its share of cosine and squared length.
  void encode(uint8_t* codes, float* cosine, float* square) const {
    for (int first = 0; first < keys_.tokens; first += kBlock) {
      const int count = std::min(kBlock, keys_.tokens - first);
      Block block;
      float unit_x[kBlock] = {}, unit_y[kBlock] = {};
      for (int t = 0; t < count; ++t) {
        const size_t at = (static_cast<size_t>(row_) * keys_.tokens + first + t) * keys_.planes;
        unit_x[t] = keys_.unit[2 * (at + plane_)];
        unit_y[t] = keys_.unit[2 * (at + plane_) + 1];
      }
      for (int t = 0; t < kBlock; ++t) {
        block.x[t] = root_[0] * unit_x[t] + root_[1] * unit_y[t];
        block.y[t] = root_[2] * unit_x[t] + root_[3] * unit_y[t];
      }
      int32_t index[3][kBlock];
      search(block, index);
      for (int t = 0; t < count; ++t) {
        float x = 0.0f, y = 0.0f;
        for (int stage = 0; stage < num_stages_; ++stage) {
          const int code = index[stage][t];
          x += stages_[stage].x[code];
          y += stages_[stage].y[code];
          const size_t at = (static_cast<size_t>(row_) * keys_.slots + stages_[stage].slot) *
                                keys_.tokens + first + t;
          codes[at] = static_cast<uint8_t>(codes[at] + (code << stages_[stage].shift));
        }
        cosine[first + t] += unit_x[t] * x + unit_y[t] * y;
        square[first + t] += x * x + y * y;
      }
    }
  }

 private:
  const KeyRows& keys_;
  int row_, plane_;
  const float* root_;
  int num_stages_ = 0;
  Stage stages_[3];
  float sum_x_[kMaxPoints], sum_y_[kMaxPoints];  // of the first two stages, in the metric

  const int64_t* owner(int slot) const {
    return keys_.slot_plane + (static_cast<size_t>(row_) * keys_.slots + slot) * 2;
  }

  // The next slot of the plane.
  int find(int slot) const {
    while (owner(slot)[0] != plane_ && owner(slot)[1] != plane_) ++slot;
    return slot;
  }

  // The second plane of a pair steps its code by four.
  void load(int slot, int half, int levels) {
    const size_t at = (static_cast<size_t>(row_) * keys_.slots + slot) * 2 + half;
    const float* points = keys_.points + at * 2 * kSlotLevels;
    const int stride = half ? kPairLevels : 1;
    Stage& out = stages_[num_stages_++];
    out.slot = slot;
    out.shift = half ? 2 : 0;
    out.levels = levels;
    for (int i = 0; i < levels; ++i) {
      const float x = points[2 * i * stride], y = points[2 * i * stride + 1];
      out.x[i] = x;
      out.y[i] = y;
      out.seen_x[i] = root_[0] * x + root_[1] * y;
      out.seen_y[i] = root_[2] * x + root_[3] * y;
    }
  }

  void search(Block& block, int32_t (&index)[3][kBlock]) const {
    if (num_stages_ == 1) {
      find_nearest(block, stages_[0].seen_x, stages_[0].seen_y, stages_[0].levels, index[0]);
      return;
    }
    const int levels = stages_[1].levels;
    int32_t joint[kBlock];
    find_nearest(block, sum_x_, sum_y_, kSlotLevels * levels, joint);
    for (int t = 0; t < kBlock; ++t) {
      index[0][t] = joint[t] / levels;
      index[1][t] = joint[t] % levels;
    }
    if (num_stages_ < 3) return;
    for (int t = 0; t < kBlock; ++t) {
      block.x[t] -= sum_x_[joint[t]];
      block.y[t] -= sum_y_[joint[t]];
    }
    find_nearest(block, stages_[2].seen_x, stages_[2].seen_y, stages_[2].levels, index[2]);
  }
};

void encode_key_row(const KeyRows& keys, int row, uint8_t* codes, float* cosine, float* length) {
  const int tokens = keys.tokens, planes = keys.planes;
  cosine += static_cast<size_t>(row) * tokens;
  length += static_cast<size_t>(row) * tokens;
  std::fill_n(cosine, tokens, 0.0f);
  std::fill_n(length, tokens, 0.0f);
  std::fill_n(codes + static_cast<size_t>(row) * keys.slots * tokens,
              static_cast<size_t>(keys.slots) * tokens, uint8_t{0});
  for (int plane = 0; plane < planes; ++plane) {
    const PlaneEncoder encoder(keys, row, plane);
    if (encoder.num_stages() > 0) {
      encoder.encode(codes, cosine, length);
      continue;
    }
    const float* point = keys.constant + (static_cast<size_t>(row) * planes + plane) * 2;
    for (int t = 0; t < tokens; ++t) {
      const float* unit =
          keys.unit + ((static_cast<size_t>(row) * tokens + t) * planes + plane) * 2;
      cosine[t] += unit[0] * point[0] + unit[1] * point[1];
      length[t] += point[0] * point[0] + point[1] * point[1];
    }
  }
  for (int t = 0; t < tokens; ++t) length[t] = std::sqrt(length[t]);
}

float inverse_or_zero(float x) {
  const float inverse = 1.0f / x;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// Nearest centred level; exact floor from a truncation, which every instruction set has.
inline float snap(float ratio, float half) {
  const float bounded = std::min(std::max(ratio, -half), half - 0.5f);
  const auto whole = static_cast<float>(static_cast<int32_t>(bounded));
  return whole - (bounded < whole ? 1.0f : 0.0f) + 0.5f;
}

constexpr int kWays = 16;  // independent sums, so that loops vectorise without reordering

// Step of the clipping ratio that explains most, out of a histogram of the value's components.
float clipped_start(const float* unit, int dim, const ClipTable& clips, std::vector<int32_t>& counts) {
  counts.assign(clips.cells, 0);
  const float per_unit = static_cast<float>(clips.cells) - 0.5f;
  for (int i = 0; i < dim; ++i) {
    ++counts[static_cast<int>(std::min(1.0f, std::fabs(unit[i])) * per_unit)];
  }
  float best = 0.0f, most = -1.0f;
  for (int ratio = 0; ratio < clips.ratios; ++ratio) {
    const int16_t* along = clips.weights + static_cast<size_t>(ratio) * clips.cells;
    const int16_t* square = along + static_cast<size_t>(clips.ratios) * clips.cells;
    int32_t along_sum = 0, square_sum = 0;
    for (int i = 0; i < clips.cells; ++i) {
      along_sum += counts[i] * along[i];
      square_sum += counts[i] * square[i];
    }
    const auto sum = static_cast<float>(along_sum);
    const float step = sum / static_cast<float>(square_sum), gain = sum * step;
    if (gain > most) most = gain, best = step;
  }
  return best / per_unit;
}

// Best step for the levels that `step` selects.
float least_squares(const float* unit, int dim, float step, float half) {
  const float inverse = inverse_or_zero(step);
  float along[kWays] = {}, square[kWays] = {};
  int i = 0;
  for (; i + kWays <= dim; i += kWays) {
    for (int j = 0; j < kWays; ++j) {
      const float level = snap(unit[i + j] * inverse, half);
      along[j] += unit[i + j] * level;
      square[j] += level * level;
    }
  }
  for (; i < dim; ++i) {
    const float level = snap(unit[i] * inverse, half);
    along[0] += unit[i] * level;
    square[0] += level * level;
  }
  for (int j = 1; j < kWays; ++j) {
    along[0] += along[j];
    square[0] += square[j];
  }
  return along[0] / square[0];
}

float squared_error(const float* unit, int dim, float step, float half) {
  const float inverse = inverse_or_zero(step);
  float sums[kWays] = {};
  int i = 0;
  for (; i + kWays <= dim; i += kWays) {
    for (int j = 0; j < kWays; ++j) {
      const float rest = snap(unit[i + j] * inverse, half) * step - unit[i + j];
      sums[j] += rest * rest;
    }
  }
  for (; i < dim; ++i) {
    const float rest = snap(unit[i] * inverse, half) * step - unit[i];
    sums[0] += rest * rest;
  }
  for (int j = 1; j < kWays; ++j) sums[0] += sums[j];
  return sums[0];
}

// The scale code of least error: `nearest`, or one beside it where the page's step is coarse.
uint8_t best_scale(const ValueRows& values, const ScaleRows& scales, int row, size_t token,
                   int nearest, float half) {
  if (!(scales.width[row] > scales.coarse * scales.step(row, nearest))) {
    return static_cast<uint8_t>(nearest);
  }
  float least = std::numeric_limits<float>::infinity();
  int best = nearest;
  for (int offset : {0, -1, 1}) {
    const int code = std::min(std::max(nearest + offset, 0), 255);
    const float step = scales.step(row, code) * scales.inverse_peak[token];
    const float error = squared_error(values.unit + token * values.dim, values.dim, step, half);
    if (error < least) least = error, best = code;
  }
  return static_cast<uint8_t>(best);
}

}  // namespace

void encode_key_rows(const KeyRows& keys, int num_threads, uint8_t* codes, float* cosine,
                     float* length) {
  run_phases(num_threads, {{keys.rows, [&](int row) {
    encode_key_row(keys, row, codes, cosine, length);
  }}});
}

void fit_value_steps(const ValueRows& values, const ClipTable& clips, int num_refinements,
                     int num_threads, float* step) {
  const auto half = static_cast<float>(1 << (values.bits - 1));
  run_phases(num_threads, {{values.rows, [&](int row) {
    std::vector<int32_t> counts;
    for (int t = 0; t < values.tokens; ++t) {
      const size_t at = static_cast<size_t>(row) * values.tokens + t;
      const float* unit = values.unit + at * values.dim;
      step[at] = clips.weights ? clipped_start(unit, values.dim, clips, counts) : 1.0f / (half - 0.5f);
      for (int i = 0; i < num_refinements; ++i) {
        step[at] = least_squares(unit, values.dim, step[at], half);
      }
    }
  }}});
}

void encode_value_rows(const ValueRows& values, const ScaleRows& scales, int num_threads,
                       uint8_t* scale_code, uint8_t* codes) {
  const auto half = static_cast<float>(1 << (values.bits - 1));
  const float midpoint = half - 0.5f;
  run_phases(num_threads, {{values.rows, [&](int row) {
    for (int t = 0; t < values.tokens; ++t) {
      const size_t at = static_cast<size_t>(row) * values.tokens + t;
      const float* unit = values.unit + at * values.dim;
      uint8_t* out = codes + at * values.dim;
      if (!scales.is_live[at]) {
        std::fill_n(out, values.dim, uint8_t{0});
        scale_code[at] = 0;
        continue;
      }
      scale_code[at] = best_scale(values, scales, row, at, scale_code[at], half);
      const float inverse = inverse_or_zero(scales.step(row, scale_code[at]) * scales.inverse_peak[at]);
      for (int i = 0; i < values.dim; ++i) {
        out[i] = static_cast<uint8_t>(snap(unit[i] * inverse, half) + midpoint);
      }
    }
  }}});
}

}  // namespace sphkv
