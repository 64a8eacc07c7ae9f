// SPDX-License-Identifier: Apache-2.0
// Values to codes and scale codes: rotate, fit a step per state, snap, pack. The arithmetic is that
// of codec/values.py. A warp has 16 states; lane (g, t) holds dimensions 8 f + g of states 2 t + odd
// + 8 upper, just those whose codes make up its words of the page.
#pragma once
#include "encode_clip.cuh"
#include "lane_words.cuh"

constexpr int FEATURES = HEAD_DIM / 8;  // components of a lane's state
constexpr int REFINEMENTS = SPHKV_REFINEMENTS;
constexpr float COARSE_STEP = SPHKV_COARSE_STEP;  // of a state's own step, see codec/values.py
constexpr int VALUE_WORDS = HEAD_DIM * VALUE_BITS / 64;

struct ValueMemory {
  ClipMemory clip;
  float edge[2][WARPS];
};

// State of the tile that a lane holds as its `s`.
INLINE int state_of(int s, int lane) { return s / 2 * 8 + lane % 4 * 2 + s % 2; }

INLINE float reciprocal(float x) { return x > 1.2e-38f ? 1.f / x : 0.f; }
INLINE float sum(float a, float b) { return a + b; }
INLINE float larger(float a, float b) { return fmaxf(a, b); }

// What the lanes of a state hold together, to those of g / 2 == 2 * upper + odd.
template <float (*JOIN)(float, float)>
INLINE float collect(const float (&x)[STATES], int lane) {
  const bool is_upper = lane & 16, is_odd = lane & 8;
  const float even = JOIN(is_upper ? x[2] : x[0],
                          __shfl_xor_sync(ALL_LANES, is_upper ? x[0] : x[2], 16));
  const float odd = JOIN(is_upper ? x[3] : x[1],
                         __shfl_xor_sync(ALL_LANES, is_upper ? x[1] : x[3], 16));
  const float own = JOIN(is_odd ? odd : even, __shfl_xor_sync(ALL_LANES, is_odd ? even : odd, 8));
  return JOIN(own, __shfl_xor_sync(ALL_LANES, own, 4));
}

// The other way round: what those lanes know of a state, for all its lanes.
INLINE float spread(float own, int state, int lane) {
  return __shfl_sync(ALL_LANES, own, 8 * state + lane % 4);
}

template <int COUNT>
INLINE void butterfly(float (&x)[COUNT]) {
#pragma unroll
  for (int k = 1; k < COUNT; k *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!(i & k)) {
        const float a = x[i], b = x[i | k];
        x[i] = a + b, x[i | k] = a - b;
      }
}

// Signs of a Hadamard matrix of order 32 as the left factor of a product. Columns are channels in
// the order lanes load them: 8 t + 4 step + 2 word + half.
struct Signs {
  uint32_t a[2][2][4];  // [step][row block]

  INLINE explicit Signs(int lane) {
    constexpr uint32_t FLIP = 0x80008000u;
    const int g = lane / 4, t = lane % 4;
    const uint32_t first = 0x3f803f80u ^ (uint32_t)(g & 1) << 31;
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int block = 0; block < 2; block++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int is_minus = (g >> 1 & k / 2) ^ (t & k % 2) ^ (g >> 2 & step) ^ (t >> 1 & block);
          a[step][block][k] = first ^ FLIP * (is_minus & 1);
        }
  }
};

constexpr int CHUNKS = HEAD_DIM / 32;

// Channels 32 chunk + 8 t ... of states g and g + 8.
struct Raw {
  uint4 word[2][CHUNKS];

  INLINE Raw(const EncodeParams& p, long long first_state, int lane) {
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      const long long state = first_state + 8 * upper + lane / 4;
      const uint4* value = (const uint4*)(p.values + state * HEAD_DIM) + lane % 4;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) word[upper][chunk] = value[4 * chunk];
    }
  }

  // States past the last live one count as zero.
  INLINE void hide(int num_live, int lane) {
#pragma unroll
    for (int upper = 0; upper < 2; upper++)
      if (8 * upper + lane / 4 >= num_live)
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) word[upper][chunk] = {0, 0, 0, 0};
  }
};

struct Value {
  float x[STATES][FEATURES];  // rotated, peak 1
  int lane;

  // Rotated but for a factor: 32 channels at a time by products, then across these chunks.
  INLINE void rotate(const Raw& raw) {
    const Signs signs(lane);
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      float sums[CHUNKS][2][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const uint4 v = raw.word[upper][chunk];
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
          for (int block = 0; block < 2; block++) {
            const uint32_t(&a)[4] = signs.a[step][block];
            mma_bf16(sums[chunk][block], a[0], a[1], a[2], a[3], word[2 * step], word[2 * step + 1]);
          }
      }
#pragma unroll
      for (int k = 0; k < 8; k++) {
        // block k / 4 of 16 rows, feature k % 4 / 2 in it, state k % 2
        float sum[CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) sum[chunk] = sums[chunk][k / 4][k % 4];
        butterfly(sum);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++)
          x[2 * upper + k % 2][4 * chunk + k / 2] = sum[chunk];
      }
    }
  }

  // Divides by the peak; returns it for the state of the lane.
  INLINE float scale() {
    float peaks[STATES] = {};
#pragma unroll
    for (int s = 0; s < STATES; s++)
#pragma unroll
      for (int f = 0; f < FEATURES; f++) peaks[s] = fmaxf(peaks[s], fabsf(x[s][f]));
    const float norm = rsqrtf((float)HEAD_DIM), peak = collect<larger>(peaks, lane) * norm;
    const float inverse = reciprocal(peak) * norm;
#pragma unroll
    for (int s = 0; s < STATES; s++) {
      const float factor = spread(inverse, s, lane);
#pragma unroll
      for (int f = 0; f < FEATURES; f++) x[s][f] *= factor;
    }
    // components that overflowed or are no numbers would find no cell; of the latter no peak is left
    if (__any_sync(ALL_LANES, !(peak > 0.f && peak < INFINITE)))
#pragma unroll
      for (int s = 0; s < STATES; s++)
#pragma unroll
        for (int f = 0; f < FEATURES; f++) x[s][f] = fabsf(x[s][f]) <= 2.f ? x[s][f] : 0.f;
    return peak < INFINITE ? peak : 0.f;
  }

  // Magnitude of the nearest centred level. Levels are symmetric, so signs stay out of it.
  static INLINE float level(float x, float inverse_step) {
    const float whole = __fmaf_rd(fabsf(x), inverse_step, FLOOR);
    return fminf(whole, FLOOR + HALF_LEVELS - 1) - (FLOOR - 0.5f);
  }

  // Best step for the levels that `step` selects.
  INLINE float least_squares(float step) const {
    const float own_inverse = reciprocal(step);
    float along[STATES] = {}, square[STATES] = {};
#pragma unroll
    for (int s = 0; s < STATES; s++) {
      const float inverse = spread(own_inverse, s, lane);
#pragma unroll
      for (int f = 0; f < FEATURES; f++) {
        const float c = level(x[s][f], inverse);
        along[s] = fmaf(fabsf(x[s][f]), c, along[s]);
        square[s] = fmaf(c, c, square[s]);
      }
    }
    return collect<sum>(along, lane) / collect<sum>(square, lane);
  }

  // Step to begin from.
  INLINE float start(const EncodeParams& p, ClipMemory& m, int warp) const {
    if constexpr (IS_CLIPPED) {
      const uint32_t column = shared_address(m.counts[warp][lane % 4]);
#pragma unroll
      for (int s = 0; s < STATES; s++) count_cells(column, x[s], s);
      __syncwarp();
      return best_clip(p, shared_address(m.counts[warp]), lane);
    } else {
      return 1.f / (HALF_LEVELS - 0.5f);
    }
  }

  // Squared error at a step.
  INLINE float error(float step) const {
    const float own_inverse = reciprocal(step);
    float squares[STATES] = {};
#pragma unroll
    for (int s = 0; s < STATES; s++) {
      const float inverse = spread(own_inverse, s, lane), width = spread(step, s, lane);
#pragma unroll
      for (int f = 0; f < FEATURES; f++) {
        const float rest = fmaf(level(x[s][f], inverse), width, -fabsf(x[s][f]));
        squares[s] = fmaf(rest, rest, squares[s]);
      }
    }
    return collect<sum>(squares, lane);
  }
};

// Adds the code in the lowest bits of FLOOR + code to a word. Bits of FLOOR that are not shifted out
// are taken off again.
INLINE void add_code(uint32_t& word, float code, int shift) {
  word += (__float_as_uint(code) << shift) - (FLOOR_BITS << shift);
}

// Puts the code of a feature where the reader expects it, see fragments.py.
INLINE void place_code(uint32_t (&word)[VALUE_WORDS], int state, int feature, float code) {
  const int upper = state / 2, odd = state % 2;
  if constexpr (VALUE_BITS == 3) {
    const int single = 2 * (feature - 2 * VALUE_WORDS) + upper;
    if (feature < 2 * VALUE_WORDS)
      add_code(word[feature % VALUE_WORDS], code, 16 * odd + 3 * (feature / VALUE_WORDS) + 9 * upper);
    else if (single < VALUE_WORDS)
      add_code(word[single], code, 16 * odd + 6);
    else
#pragma unroll
      for (int bit = 0; bit < 3; bit++)
        word[3 * (single - VALUE_WORDS) + bit] |= (__float_as_uint(code) >> bit & 1)
                                                  << (16 * odd + 15);
  } else {
    constexpr int PER_BYTE = 8 / VALUE_BITS;
    add_code(word[feature / PER_BYTE], code,
             8 * (2 * odd + upper) + feature % PER_BYTE * VALUE_BITS);
  }
}

// Codes at the step of each state, as words of the page.
INLINE void write_values(const Value& value, float step, uint8_t* tile, int num_live) {
  const float own_inverse = reciprocal(step) * (0.5f / HALF_LEVELS);
  uint32_t word[VALUE_WORDS] = {};
#pragma unroll
  for (int s = 0; s < STATES; s++) {
    const float inverse = spread(own_inverse, s, value.lane);
    // a little above one half, so that zero stays the lowest level above it
    const float most = state_of(s, value.lane) < num_live ? 2 * HALF_LEVELS * (1.f - 6e-8f) : 0.f;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
      const float part = __saturatef(fmaf(value.x[s][f], inverse, 0.5f + 6e-8f));
      place_code(word, s, f, __fmaf_rd(part, most, FLOOR));
    }
  }
  LaneWords<VALUE_WORDS>::store(word, tile, value.lane);
}

// Scale code, the one below and the one above: that of least error.
INLINE float best_code(const Value& value, const Affine& affine, float nearest, float to_unit) {
  float best = nearest, least = INFINITE;
#pragma unroll 1
  for (int k = 0; k < 3; k++) {
    const float offset = k == 0 ? 0.f : k == 1 ? -1.f : 1.f;
    const float code = fminf(fmaxf(nearest + offset, 0.f), 255.f);
    const float error = value.error(affine.value(code) * to_unit);
    if (error < least) least = error, best = code;
  }
  return best;
}

// Codes, scale codes; returns the range of the steps.
INLINE Affine encode_values(const EncodeParams& p, ValueMemory& m, uint8_t* page, long long row,
                            int tid) {
  const int warp = tid / 32, lane = tid % 32, first = warp * TILE;
  Raw raw(p, row * PAGE + first, lane);
  const int count = (int)p.counts[row];
  if constexpr (IS_CLIPPED) {
    clear_counts(m.clip, warp, lane);
    __syncwarp();
  }
  Value value;
  value.lane = lane;
  if (count < PAGE) raw.hide(count - first, lane);
  value.rotate(raw);
  const float peak = value.scale();
  float step = value.start(p, m.clip, warp);
#pragma unroll 1
  for (int k = 0; k < REFINEMENTS; k++) step = value.least_squares(step);
  step *= peak;
  // the state whose sums `collect` leaves in this lane
  const int state = first + state_of(lane / 8, lane);
  const bool is_live = state < count;
  const Affine affine(m.edge, is_live ? step : INFINITE, is_live ? step : MINUS_INFINITY, tid);
  const float to_unit = reciprocal(peak);
  float code = affine.code(step);
  const bool is_coarse = is_live && affine.step > COARSE_STEP * affine.value(code);
  if (__any_sync(ALL_LANES, is_coarse)) {
    const float best = best_code(value, affine, code, to_unit);
    if (is_coarse) code = best;
  }
  if (lane % 8 < 4) page[gain_offset(state, 1)] = is_live ? (uint8_t)code : 0;
  write_values(value, affine.value(code) * to_unit,
               page + VALUE_OFFSET + warp * VALUE_WORDS * 128, count - first);
  return affine;
}
