// SPDX-License-Identifier: Apache-2.0
#define SPHKV_VECTOR_BYTES 16
#include "encode.h"

#include "team.h"
#include "variant_begin.h"

namespace sphkv {

namespace {

constexpr bool kIsExact = true;
#include "softmax.h"
#include "states.h"
#include "search.h"

// The search of one plane of a row, whose slots are the plane's own.
PlaneSearch plane_search(const KeyRows& keys, int row, int plane) {
  const size_t at = static_cast<size_t>(row) * keys.planes + plane;
  PlaneSearch search(keys.metric_root + at * 4);
  const auto owner = [&](int slot) {
    return keys.slot_plane + (static_cast<size_t>(row) * keys.slots + slot) * 2;
  };
  const auto next = [&](int slot) {
    while (owner(slot)[0] != plane && owner(slot)[1] != plane) ++slot;
    return slot;
  };
  const auto add = [&](int slot, int half, int levels) {
    const size_t place = (static_cast<size_t>(row) * keys.slots + slot) * 2 + half;
    const float* points = keys.points + place * 2 * kSlotLevels;
    // the second plane of a pair steps its code by four
    search.add(slot, half ? 2 : 0, levels, points, points + 1, half ? 2 * kPairLevels : 2, 1.0f);
  };
  const int64_t bits = keys.plane_bits[at];
  int slot = bits == 0 ? 0 : next(0);
  for (int i = 0; i < bits / 4; ++i) add(slot++, 0, kSlotLevels);
  if (bits % 4 != 0) {
    // the plane's other slots, if any, are all before it
    slot = next(slot);
    add(slot, owner(slot)[0] != plane, kPairLevels);
  }
  return search;
}

// Adds a plane's codes, and its share of cosine and squared length.
void encode_plane(const KeyRows& keys, int row, int plane, const PlaneSearch& search,
                  uint8_t* codes, float* cosine, float* square) {
  for (int first = 0; first < keys.tokens; first += kSearchTokens) {
    const int count = std::min(kSearchTokens, keys.tokens - first);
    PlaneTokens unit = {}, coded;
    for (int t = 0; t < count; ++t) {
      const size_t at = (static_cast<size_t>(row) * keys.tokens + first + t) * keys.planes;
      unit.x[t] = keys.unit[2 * (at + plane)];
      unit.y[t] = keys.unit[2 * (at + plane) + 1];
    }
    int32_t index[3][kSearchTokens];
    search.find(unit, index, coded);
    for (int i = 0; i < search.num_stages(); ++i) {
      const size_t slot = static_cast<size_t>(row) * keys.slots + search.stage(i).slot;
      uint8_t* out = codes + slot * keys.tokens + first;
      for (int t = 0; t < count; ++t) {
        out[t] = static_cast<uint8_t>(out[t] + (index[i][t] << search.stage(i).shift));
      }
    }
    for (int t = 0; t < count; ++t) {
      cosine[first + t] += unit.x[t] * coded.x[t] + unit.y[t] * coded.y[t];
      square[first + t] += coded.x[t] * coded.x[t] + coded.y[t] * coded.y[t];
    }
  }
}

void encode_key_row(const KeyRows& keys, int row, uint8_t* codes, float* cosine, float* length) {
  const int tokens = keys.tokens, planes = keys.planes;
  cosine += static_cast<size_t>(row) * tokens;
  length += static_cast<size_t>(row) * tokens;
  std::fill_n(cosine, tokens, 0.0f);
  std::fill_n(length, tokens, 0.0f);
  std::fill_n(codes + static_cast<size_t>(row) * keys.slots * tokens,
              static_cast<size_t>(keys.slots) * tokens, uint8_t{0});
  for (int plane = 0; plane < planes; ++plane) {
    const PlaneSearch search = plane_search(keys, row, plane);
    if (search.num_stages() > 0) {
      encode_plane(keys, row, plane, search, codes, cosine, length);
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

}  // namespace

void encode_key_rows(const KeyRows& keys, int num_threads, uint8_t* codes, float* cosine,
                     float* length) {
  run_phases(num_threads, {{keys.rows, [&](int row) {
    encode_key_row(keys, row, codes, cosine, length);
  }}});
}

void fit_value_steps(const ValueRows& values, const ClipTable& clips, int num_refinements,
                     int num_threads, float* step) {
  run_phases(num_threads, {{values.rows, [&](int row) {
    for (int t = 0; t < values.tokens; ++t) {
      const size_t at = static_cast<size_t>(row) * values.tokens + t;
      const float* unit = values.unit + at * values.dim;
      step[at] = fit_step(unit, values.dim, values.bits, clips, num_refinements);
    }
  }}});
}

void encode_value_rows(const ValueRows& values, const ScaleRows& scales, int num_threads,
                       uint8_t* scale_code, uint8_t* codes) {
  const auto half = static_cast<float>(1 << (values.bits - 1));
  run_phases(num_threads, {{values.rows, [&](int row) {
    const Affine scale{scales.low[row], scales.width[row]};
    for (int t = 0; t < values.tokens; ++t) {
      const size_t at = static_cast<size_t>(row) * values.tokens + t;
      uint8_t* out = codes + at * values.dim;
      if (!scales.is_live[at]) {
        std::fill_n(out, values.dim, uint8_t{0});
        scale_code[at] = 0;
        continue;
      }
      const float* unit = values.unit + at * values.dim;
      const int best = best_scale(unit, values.dim, half, scale, scales.inverse_peak[at],
                                  scales.coarse, scale_code[at]);
      scale_code[at] = static_cast<uint8_t>(best);
      const float inverse = inverse_or_zero(scale.at(best) * scales.inverse_peak[at]);
      for (int i = 0; i < values.dim; ++i) {
        out[i] = static_cast<uint8_t>(snap(unit[i] * inverse, half) + (half - 0.5f));
      }
    }
  }}});
}

}  // namespace sphkv
