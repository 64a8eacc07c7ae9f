// SPDX-License-Identifier: Apache-2.0
// What encoding searches for: the nearest points of a plane, the step of a value, codes of scalars.
// Included inside a namespace, after softmax.h: whoever encodes compiles its own copy.

constexpr int kVectors = kGroupTokens / kLanes;
constexpr int kPairLevels = 4;
constexpr int kMaxPoints = kSlotLevels * kSlotLevels;
constexpr int kMaxCode = 255;

// A group of tokens in one plane.
struct PlaneGroup {
  float x[kGroupTokens], y[kGroupTokens];
};

// Index of the nearest of `count` points for every token; the first of equals.
inline void find_nearest(const PlaneGroup& group, const float* px, const float* py, int count,
                         int32_t* index) {
  Floats x[kVectors], y[kVectors], best[kVectors];
  Integers found[kVectors];
  std::memcpy(x, group.x, sizeof x);
  std::memcpy(y, group.y, sizeof y);
  for (int v = 0; v < kVectors; ++v) {
    best[v] = same(std::numeric_limits<float>::infinity());
    found[v] = Integers{};
  }
  for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats dx = x[v] - px[i], dy = y[v] - py[i];
      const Floats distance = dx * dx + dy * dy;
      const Integers is_nearer = distance < best[v];
      best[v] = is_nearer ? distance : best[v];
      found[v] = is_nearer ? i - Integers{} : found[v];
    }
  }
  std::memcpy(index, found, sizeof found);
}

// Codes one plane of the keys of a head: single slots, adjacent, then half a pair slot; points add.
class PlaneSearch {
 public:
  // Points of one slot, or of half a slot, as they are and as queries see them (in the metric).
  struct Stage {
    int slot, shift, levels;
    float x[kSlotLevels], y[kSlotLevels];
    float seen_x[kSlotLevels], seen_y[kSlotLevels];
  };

  explicit PlaneSearch(const float* metric_root) : root_(metric_root) {}

  int num_stages() const { return num_stages_; }
  const Stage& stage(int i) const { return stages_[i]; }

  // The next stage of the plane: coordinates of code i are unit * x[i * step].
  void add(int slot, int shift, int levels, const float* x, const float* y, int step, float unit) {
    Stage& out = stages_[num_stages_++];
    out.slot = slot;
    out.shift = shift;
    out.levels = levels;
    for (int i = 0; i < levels; ++i) {
      out.x[i] = unit * x[i * step];
      out.y[i] = unit * y[i * step];
      out.seen_x[i] = root_[0] * out.x[i] + root_[1] * out.y[i];
      out.seen_y[i] = root_[2] * out.x[i] + root_[3] * out.y[i];
    }
    if (num_stages_ != 2) return;
    for (int i = 0; i < kSlotLevels; ++i) {
      for (int j = 0; j < levels; ++j) {
        sum_x_[i * levels + j] = stages_[0].seen_x[i] + out.seen_x[j];
        sum_y_[i * levels + j] = stages_[0].seen_y[i] + out.seen_y[j];
      }
    }
  }

  // Codes of every stage, and the coded points.
  void find(const PlaneGroup& unit, int32_t (&index)[3][kGroupTokens], PlaneGroup& coded) const {
    PlaneGroup seen;
    for (int t = 0; t < kGroupTokens; ++t) {
      seen.x[t] = root_[0] * unit.x[t] + root_[1] * unit.y[t];
      seen.y[t] = root_[2] * unit.x[t] + root_[3] * unit.y[t];
    }
    search(seen, index);
    coded = {};
    for (int i = 0; i < num_stages_; ++i) {
      for (int t = 0; t < kGroupTokens; ++t) {
        coded.x[t] += stages_[i].x[index[i][t]];
        coded.y[t] += stages_[i].y[index[i][t]];
      }
    }
  }

 private:
  const float* root_;
  int num_stages_ = 0;
  Stage stages_[3];
  float sum_x_[kMaxPoints], sum_y_[kMaxPoints];  // of the first two stages, in the metric

  void search(PlaneGroup& seen, int32_t (&index)[3][kGroupTokens]) const {
    if (num_stages_ == 1) {
      find_nearest(seen, stages_[0].seen_x, stages_[0].seen_y, stages_[0].levels, index[0]);
      return;
    }
    const int levels = stages_[1].levels;
    int32_t joint[kGroupTokens];
    find_nearest(seen, sum_x_, sum_y_, kSlotLevels * levels, joint);
    // sixteen levels or four
    const int bits = levels == kSlotLevels ? 4 : 2;
    for (int t = 0; t < kGroupTokens; ++t) {
      index[0][t] = joint[t] >> bits;
      index[1][t] = joint[t] & (levels - 1);
    }
    if (num_stages_ < 3) return;
    for (int t = 0; t < kGroupTokens; ++t) {
      seen.x[t] -= sum_x_[joint[t]];
      seen.y[t] -= sum_y_[joint[t]];
    }
    find_nearest(seen, stages_[2].seen_x, stages_[2].seen_y, stages_[2].levels, index[2]);
  }
};

inline float inverse_or_zero(float x) {
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
inline float clipped_start(const float* unit, int dim, const ClipTable& clips) {
  int16_t counts[kClipCells] = {};
  const float per_unit = kClipCells - 0.5f;
  for (int i = 0; i < dim; ++i) {
    ++counts[static_cast<int>(std::min(1.0f, std::fabs(unit[i])) * per_unit)];
  }
  float best = 0.0f, most = -1.0f;
  for (int ratio = 0; ratio < clips.ratios; ++ratio) {
    const int16_t* along = clips.weights + static_cast<size_t>(ratio) * kClipCells;
    const int16_t* square = along + static_cast<size_t>(clips.ratios) * kClipCells;
    int32_t along_sum = 0, square_sum = 0;
    for (int i = 0; i < kClipCells; ++i) along_sum += counts[i] * along[i];
    for (int i = 0; i < kClipCells; ++i) square_sum += counts[i] * square[i];
    const auto sum = static_cast<float>(along_sum);
    const float step = sum / static_cast<float>(square_sum), gain = sum * step;
    if (gain > most) most = gain, best = step;
  }
  return best / per_unit;
}

// Best step for the levels that `step` selects.
inline float least_squares(const float* unit, int dim, float step, float half) {
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

// Step of least squared error of a value of peak 1: that of the best clipping ratio, then refined.
inline float fit_step(const float* unit, int dim, int bits, const ClipTable& clips,
                      int num_refinements) {
  const auto half = static_cast<float>(1 << (bits - 1));
  float step = clips.weights ? clipped_start(unit, dim, clips) : 1.0f / (half - 0.5f);
  for (int i = 0; i < num_refinements; ++i) step = least_squares(unit, dim, step, half);
  return step;
}

inline float squared_error(const float* unit, int dim, float step, float half) {
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

// Scalars of a page by code: low + width * code.
struct Affine {
  float low, width;
  float at(int code) const { return low + width * static_cast<float>(code); }
};

// Writes the codes of a value of peak 1 and returns its scale code: `nearest`, or one beside it of
// less error where the page's width is coarse, above that part of the value's own step.
inline uint8_t encode_value(const float* unit, int dim, int bits, const Affine& scale,
                            float inverse_peak, float coarse, int nearest, uint8_t* codes) {
  const auto half = static_cast<float>(1 << (bits - 1));
  const float midpoint = half - 0.5f;
  int best = nearest;
  if (scale.width > coarse * scale.at(nearest)) {
    float least = std::numeric_limits<float>::infinity();
    for (int offset : {0, -1, 1}) {
      const int code = std::min(std::max(nearest + offset, 0), kMaxCode);
      const float error = squared_error(unit, dim, scale.at(code) * inverse_peak, half);
      if (error < least) least = error, best = code;
    }
  }
  const float inverse = inverse_or_zero(scale.at(best) * inverse_peak);
  for (int i = 0; i < dim; ++i) {
    codes[i] = static_cast<uint8_t>(snap(unit[i] * inverse, half) + midpoint);
  }
  return static_cast<uint8_t>(best);
}
