// SPDX-License-Identifier: Apache-2.0
// What encoding searches for: the nearest points of a plane, the step of a value, codes of scalars.
// Included inside a namespace, after states.h: whoever encodes compiles its own copy.

// Tokens searched together: a group, or two vectors, so that one sum need not wait for another.
constexpr int kSearchTokens = kGroupTokens < 2 * kLanes ? 2 * kLanes : kGroupTokens;
constexpr int kVectors = kSearchTokens / kLanes;
constexpr int kPairLevels = 4;
constexpr int kMaxPoints = kSlotLevels * kSlotLevels;
constexpr int kMaxCode = 255;

// Some tokens in one plane.
struct PlaneTokens {
  float x[kSearchTokens], y[kSearchTokens];
};

// Points to search, with half their squared length: that less the product with a token ranks them.
template <int COUNT>
struct PointList {
  float x[COUNT], y[COUNT], half_square[COUNT];

  void set(int i, float px, float py) {
    x[i] = px;
    y[i] = py;
    half_square[i] = 0.5f * (px * px + py * py);
  }
};

inline Floats smaller(Floats a, Floats b) {
#if defined(__aarch64__)
  return vminnmq_f32(a, b);
#elif defined(__AVX512F__) && SPHKV_VECTOR_BYTES == 64
  return _mm512_min_ps(a, b);  // GCC would compare and blend
#elif defined(__AVX2__) && SPHKV_VECTOR_BYTES == 32
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__) && SPHKV_VECTOR_BYTES == 16
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// For every token, which of `count` sets has the nearest point, `size` points one after the other
// in each; the first of equals.
template <int COUNT>
inline void find_nearest(const PlaneTokens& tokens, const PointList<COUNT>& points, int count,
                         int size, int32_t* index) {
  Floats x[kVectors], y[kVectors], best[kVectors];
  Integers found[kVectors], now = {};
  std::memcpy(x, tokens.x, sizeof x);
  std::memcpy(y, tokens.y, sizeof y);
  for (int v = 0; v < kVectors; ++v) {
    best[v] = same(std::numeric_limits<float>::infinity());
    found[v] = Integers{};
  }
  for (int set = 0, i = 0; set < count; ++set, now += 1) {
    Floats least[kVectors];
    for (int v = 0; v < kVectors; ++v) least[v] = same(std::numeric_limits<float>::infinity());
    for (const int end = i + size; i < end; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Floats score = points.half_square[i] - x[v] * points.x[i] - y[v] * points.y[i];
        least[v] = smaller(score, least[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Integers is_nearer = least[v] < best[v];
      found[v] = is_nearer ? now : found[v];
      best[v] = smaller(least[v], best[v]);
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
    PointList<kSlotLevels> seen;
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
      const float px = out.x[i] = unit * x[i * step], py = out.y[i] = unit * y[i * step];
      out.seen.set(i, root_[0] * px + root_[1] * py, root_[2] * px + root_[3] * py);
    }
    if (num_stages_ != 2) return;
    const PointList<kSlotLevels>& first = stages_[0].seen;
    for (int i = 0; i < kSlotLevels; ++i) {
      for (int j = 0; j < levels; ++j) {
        sums_.set(i * levels + j, first.x[i] + out.seen.x[j], first.y[i] + out.seen.y[j]);
      }
    }
  }

  // Codes of every stage, and the coded points.
  void find(const PlaneTokens& unit, int32_t (&index)[3][kSearchTokens], PlaneTokens& coded) const {
    PlaneTokens rest;
    for (int t = 0; t < kSearchTokens; ++t) {
      rest.x[t] = root_[0] * unit.x[t] + root_[1] * unit.y[t];
      rest.y[t] = root_[2] * unit.x[t] + root_[3] * unit.y[t];
    }
    coded = {};
    for (int i = 0; i < num_stages_; ++i) {
      const Stage& stage = stages_[i];
      if (i == 0 && num_stages_ > 1) {
        // the code whose sums with the next stage come nearest
        find_nearest(rest, sums_, kSlotLevels, stages_[1].levels, index[0]);
      } else {
        find_nearest(rest, stage.seen, stage.levels, 1, index[i]);
      }
      for (int t = 0; t < kSearchTokens; t += kGroupTokens) {
        const int32_t* code = index[i] + t;
        add_picked(stage.x, stage.y, code, 1.0f, coded.x + t, coded.y + t);
        add_picked(stage.seen.x, stage.seen.y, code, -1.0f, rest.x + t, rest.y + t);
      }
    }
  }

 private:
  const float* root_;
  int num_stages_ = 0;
  Stage stages_[3];
  PointList<kMaxPoints> sums_;  // of the first two stages, in the metric
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

inline Integers load_integers(const int32_t* p) {
  Integers out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

// Step of the clipping ratio that explains most; components count as the middle of their cells.
inline float clipped_start(const float* unit, int dim, const ClipTable& clips) {
  constexpr int kParts = kClipRatios / kLanes;
  const float per_unit = kClipCells - 0.5f;
  Integers along[kParts] = {}, square[kParts] = {};
  for (int first = 0; first < dim; first += kWays) {
    const int count = std::min(kWays, dim - first);
    int32_t cell[kWays];
    for (int i = 0; i < count; ++i) {
      cell[i] = static_cast<int32_t>(std::min(1.0f, std::fabs(unit[first + i])) * per_unit);
    }
    for (int i = 0; i < count; ++i) {
      const int32_t* weights = clips.weights + cell[i] * 2 * kClipRatios;
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        along[part] += load_integers(weights + part * kLanes);
        square[part] += load_integers(weights + kClipRatios + part * kLanes);
      }
    }
  }
  float step[kClipRatios], gain[kClipRatios];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const Floats sum = __builtin_convertvector(along[part], Floats);
    const Floats own = sum / __builtin_convertvector(square[part], Floats);
    store_floats(step + part * kLanes, own);
    store_floats(gain + part * kLanes, sum * own);
  }
  int best = 0;
  for (int ratio = 1; ratio < kClipRatios; ++ratio) {
    if (gain[ratio] > gain[best]) best = ratio;
  }
  return step[best] / per_unit;
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

// Scale code of a value of peak 1: `nearest`, or one beside it of less error where the page's width
// is coarse, above that part of the value's own step.
inline int best_scale(const float* unit, int dim, float half, const Affine& scale,
                      float inverse_peak, float coarse, int nearest) {
  if (!(scale.width > coarse * scale.at(nearest))) return nearest;
  float least = std::numeric_limits<float>::infinity();
  int best = nearest;
  for (int offset : {0, -1, 1}) {
    const int code = std::min(std::max(nearest + offset, 0), kMaxCode);
    const float error = squared_error(unit, dim, scale.at(code) * inverse_peak, half);
    if (error < least) least = error, best = code;
  }
  return best;
}
