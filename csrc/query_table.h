// SPDX-License-Identifier: Apache-2.0
// Queries of one KV head, turned by every row of a tile and quantised beside one codebook.
//
// A logit is a sum over entries of x*a + y*b, where (x, y) is the coded point turned by the tile
// base and (a, b) the query turned back by the row. Two entries make a unit: four bytes
// (a0, b0, a1, b1) per row, one lane of an int8 dot product. A unit's query bytes are scaled by a
// power of two so that they fill the byte; units of one power form a level, and the accumulator
// is shifted from level to level. So a small term keeps as many digits as a large one.
//
// An entry that must be better than 8 bits adds two units: the low byte of its points, and what
// rounding took from its query.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codebook.h"
#include "plan.h"

namespace sphkv {

constexpr int kTableBytes = 4 * kSlotLevels;
constexpr int kQueryBlock = 4;  // query rows whose sums stay in registers

struct Unit {
  int32_t entry[2];  // -1: nothing
  int32_t slot[2];
  int32_t table;     // which rotated table it reads
  int32_t exponent;
  int32_t main_exponent;
  bool is_constant;
  bool is_low_point;  // multiplies the low byte of points
  bool is_rest;       // carries the rounding rest of the query
};

// Rotated bytes (x0, y0, x1, y1), 16 each.
struct PointTable {
  int32_t entry[2];
  bool is_low;
};

// What the inner loop needs of a unit: byte offsets of two slots' codes and of the points.
struct UnitOffsets {
  int32_t codes[2];
  int32_t points;
};

struct Level {
  int begin, first_constant, end;
  int shift;  // of the accumulator, before the level
};

struct QueryTable {
  int num_rows = 0;    // rows of a tile: positions one rotation of the codebook serves
  int num_queries = 0;
  std::vector<Unit> units;
  std::vector<PointTable> tables;
  std::vector<UnitOffsets> offsets;
  std::vector<Level> levels;
  std::vector<float> scale;  // [queries] of the integer sum
  // By blocks of up to kQueryBlock queries: [units, rows / 4, queries of the block, 4, 4], so that
  // what a group of tokens needs of a unit lies together.
  std::vector<int8_t> rows;

  int block_size(int first_query) const {
    return std::min(kQueryBlock, num_queries - first_query);
  }
  size_t unit_bytes(int first_query) const {
    return static_cast<size_t>(num_rows) * 4 * block_size(first_query);
  }
  const int8_t* block(int first_query) const {
    return rows.data() + static_cast<size_t>(first_query) * num_rows * 4 * units.size();
  }
};

// Planes of all query rows of one KV head, softmax scale applied: [rows, planes, 2].
inline void plane_queries(const Rotary& rotary, const float* query, int num_rows, float scale,
                          std::vector<float>& out) {
  const int planes = rotary.num_planes, dim = 2 * planes;
  out.resize(static_cast<size_t>(num_rows) * dim);
  for (int v = 0; v < num_rows; ++v) {
    for (int i = 0; i < dim; ++i) out[v * dim + i] = scale * query[v * dim + rotary.channel[i]];
  }
}

class QueryTableBuilder {
 public:
  QueryTableBuilder(const Codebook& codebook, int head, const float* planes, int num_queries)
      : head_(codebook.heads[head]), rotary_(*codebook.rotary), planes_(planes),
        num_queries_(num_queries) {}

  void build(QueryTable& out, int slot_stride, int row_bytes_budget) {
    out.num_queries = num_queries_;
    out.units.clear();
    out.tables.clear();
    out.levels.clear();
    measure();
    pair_entries(out);
    refine(out);
    order(out);
    out.num_rows = choose_rows(static_cast<int>(out.units.size()), row_bytes_budget);
    fill(out);
    out.offsets.clear();
    for (const Unit& unit : out.units) {
      out.offsets.push_back({{unit.slot[0] * slot_stride, unit.slot[1] * slot_stride},
                             unit.table * kTableBytes});
    }
  }

 private:
  const HeadCodebook& head_;
  const Rotary& rotary_;
  const float* planes_;
  int num_queries_;
  std::vector<float> top_;    // [queries] largest term
  std::vector<float> share_;  // [entries] largest share of a term in its query's largest

  static constexpr int kMaxExponent = 6;
  static constexpr int kLowBits = 8;
  // four products of 127 * 127 per unit must fit 31 bits after all shifts
  static constexpr double kAccumulator = 2147483647.0 / (4.0 * 128 * 127);

  float amplitude(int query, int entry) const {
    const float* q = planes_ + static_cast<size_t>(query) * 2 * rotary_.num_planes +
                     2 * head_.entries[entry].plane;
    return std::sqrt(q[0] * q[0] + q[1] * q[1]) * head_.entries[entry].radius;
  }

  void measure() {
    const int n = static_cast<int>(head_.entries.size());
    top_.assign(num_queries_, 0.0f);
    share_.assign(n, 0.0f);
    for (int v = 0; v < num_queries_; ++v) {
      float top = 0.0f;
      for (int e = 0; e < n; ++e) top = std::max(top, amplitude(v, e));
      top_[v] = top;
      if (top == 0.0f) continue;
      for (int e = 0; e < n; ++e) share_[e] = std::max(share_[e], amplitude(v, e) / top);
    }
  }

  void add_unit(QueryTable& out, int a, int b) const {
    Unit unit{};
    unit.entry[0] = a;
    unit.entry[1] = b;
    const float share = std::max(share_[a], b >= 0 ? share_[b] : 0.0f);
    unit.slot[0] = head_.entries[a].slot;
    unit.slot[1] = b >= 0 ? head_.entries[b].slot : unit.slot[0];
    unit.is_constant = unit.slot[0] < 0;
    unit.exponent = kMaxExponent;
    if (share > 0.0f) unit.exponent = std::min(kMaxExponent, -std::ilogb(share) - 1);
    unit.exponent = std::max(unit.exponent, 0);
    unit.main_exponent = unit.exponent;
    unit.table = static_cast<int>(out.tables.size());
    out.tables.push_back({{a, b}, false});
    out.units.push_back(unit);
  }

  void pair_entries(QueryTable& out) const {
    std::vector<int> loose[2];  // single slots, constants
    const int n = static_cast<int>(head_.entries.size());
    for (int e = 0; e < n; ++e) {
      if (head_.entries[e].is_pair_first) {
        add_unit(out, e, e + 1);
        ++e;
      } else {
        loose[head_.entries[e].slot < 0].push_back(e);
      }
    }
    for (auto& list : loose) {
      std::sort(list.begin(), list.end(), [&](int a, int b) { return share_[a] > share_[b]; });
      for (size_t i = 0; i < list.size(); i += 2) {
        add_unit(out, list[i], i + 1 < list.size() ? list[i + 1] : -1);
      }
    }
  }

  void refine(QueryTable& out) const {
    const size_t num_main = out.units.size();
    for (size_t u = 0; u < num_main; ++u) {
      const Unit main = out.units[u];
      const bool is_fine = head_.entries[main.entry[0]].is_fine ||
                           (main.entry[1] >= 0 && head_.entries[main.entry[1]].is_fine);
      if (main.is_constant || !is_fine) continue;
      Unit low = main;
      low.exponent += kLowBits;
      low.is_low_point = true;
      low.table = static_cast<int>(out.tables.size());
      out.tables.push_back({{main.entry[0], main.entry[1]}, true});
      out.units.push_back(low);
      Unit rest = main;
      rest.exponent += kLowBits;
      rest.is_rest = true;
      out.units.push_back(rest);
    }
  }

  void order(QueryTable& out) const {
    double sum = 0.0;
    for (const Unit& unit : out.units) sum += std::ldexp(1.0, -unit.exponent);
    const int most = sum > 0.0 ? std::ilogb(kAccumulator / sum) : kMaxExponent;
    for (Unit& unit : out.units) unit.exponent = std::max(0, std::min(unit.exponent, most));
    std::stable_sort(out.units.begin(), out.units.end(), [](const Unit& a, const Unit& b) {
      return a.exponent != b.exponent ? a.exponent < b.exponent : a.is_constant < b.is_constant;
    });
    const int n = static_cast<int>(out.units.size());
    int previous = n > 0 ? out.units[0].exponent : 0;
    for (int at = 0; at < n;) {
      Level level{at, at, at, out.units[at].exponent - previous};
      previous = out.units[at].exponent;
      while (level.end < n && out.units[level.end].exponent == previous) {
        if (!out.units[level.end].is_constant) ++level.first_constant;
        ++level.end;
      }
      out.levels.push_back(level);
      at = level.end;
    }
    out.scale.resize(num_queries_);
    for (int v = 0; v < num_queries_; ++v) {
      out.scale[v] = std::ldexp(top_[v] / (127.0f * 127.0f), -previous);
    }
  }

  int choose_rows(int num_units, int budget) const {
    const int row_bytes = std::max(1, num_units * 4 * num_queries_);
    const int fit = std::max(1, budget / row_bytes / kGroupTokens) * kGroupTokens;
    const int tiles = (kMaxRows + fit - 1) / fit;
    const int groups = kMaxRows / kGroupTokens;
    return std::min(fit, (groups + tiles - 1) / tiles * kGroupTokens);
  }

  void fill(QueryTable& out) const {
    out.rows.resize(out.units.size() * 4 * out.num_rows * num_queries_);
    thread_local std::vector<uint32_t> words;
    words.resize(out.num_rows);
    auto* place = reinterpret_cast<uint32_t*>(out.rows.data());
    for (int first = 0; first < num_queries_; first += kQueryBlock) {
      const int size = out.block_size(first);
      for (const Unit& unit : out.units) {
        for (int v = 0; v < size; ++v) {
          fill_unit(unit, first + v, out.num_rows, words.data());
          for (int r = 0; r < out.num_rows; r += 4) {
            std::memcpy(place + r * size + 4 * v, words.data() + r, 16);
          }
        }
        place += out.num_rows * size;
      }
    }
  }

  // Rounds to the nearest integer and leaves it, two's complement, in the low bits.
  static uint32_t round_bits(float x) {
    const float shifted = x + 12582912.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits;
  }

  static float round_float(float x) { return (x + 12582912.0f) - 12582912.0f; }

  void fill_unit(const Unit& unit, int v, int num_rows, uint32_t* word) const {
    for (int half = 0; half < 2; ++half) {
      const int e = unit.entry[half];
      float qx = 0.0f, qy = 0.0f;
      const float* cosine = rotary_.cos_row.data();
      const float* sine = rotary_.sin_row.data();
      const int exponent = unit.is_rest ? unit.main_exponent
                                        : unit.exponent - (unit.is_low_point ? kLowBits : 0);
      if (e >= 0 && top_[v] > 0.0f) {
        const Entry& entry = head_.entries[e];
        const float* q = planes_ + static_cast<size_t>(v) * 2 * rotary_.num_planes;
        const float f = std::ldexp(127.0f * entry.radius / top_[v], exponent);
        qx = q[2 * entry.plane] * f;
        qy = q[2 * entry.plane + 1] * f;
        cosine += static_cast<size_t>(entry.plane) * kMaxRows;
        sine += static_cast<size_t>(entry.plane) * kMaxRows;
      }
      const float rest = unit.is_rest ? std::ldexp(1.0f, unit.exponent - exponent) : 0.0f;
      if (unit.is_rest) {
        for (int r = 0; r < num_rows; ++r) {
          const float a = qx * cosine[r] + qy * sine[r], b = qy * cosine[r] - qx * sine[r];
          const float c = std::min(127.0f, rest * (a - round_float(a)));
          const float d = std::min(127.0f, rest * (b - round_float(b)));
          const uint32_t pair = (round_bits(c) & 255u) | (round_bits(d) & 255u) << 8;
          word[r] = half ? word[r] | pair << 16 : pair;
        }
      } else {
        for (int r = 0; r < num_rows; ++r) {
          const float a = qx * cosine[r] + qy * sine[r], b = qy * cosine[r] - qx * sine[r];
          const uint32_t pair = (round_bits(a) & 255u) | (round_bits(b) & 255u) << 8;
          word[r] = half ? word[r] | pair << 16 : pair;
        }
      }
    }
  }
};

}  // namespace sphkv
