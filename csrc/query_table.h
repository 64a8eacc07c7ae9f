// SPDX-License-Identifier: Apache-2.0
// Queries of one KV head, turned by every row of a tile and quantised beside one codebook.
//
// A logit is a sum over entries of x*a + y*b, where (x, y) is the coded point turned by the tile
// base and (a, b) the query turned back by the row. Two entries make a unit: four bytes
// (a0, b0, a1, b1) per row, one lane of an int8 dot product. A unit's query bytes are scaled by a
// power of two so that they fill the byte; units are added by falling size, and the sum is doubled
// wherever the power rises. So a small term keeps as many digits as a large one.
//
// Four rows share their bytes in planes that turn so slowly that it does not show: units of such
// entries are called shared.
//
// An entry that must be better than 8 bits adds two units: the low byte of its points, and what
// rounding took from its query.
//
// Included inside a variant's namespace, after its simd header.

constexpr int kTableBytes = 4 * kSlotLevels;
constexpr int kQueryBlock = 4;  // query rows whose sums stay in registers

struct Unit {
  int32_t entry[2];  // -1: nothing
  int32_t slot[2];
  int32_t table;     // which rotated table it reads
  int32_t exponent;
  int32_t main_exponent;
  bool is_constant;
  bool is_shared;     // four rows have the same bytes
  bool is_low_point;  // multiplies the low byte of points
  bool is_rest;       // carries the rounding rest of the query
};

// Rotated bytes (x0, y0, x1, y1), 16 each; a pair of entries.
struct PointTable {
  int32_t entry[2];
};

// What the inner loop needs of a unit: byte offsets of two slots' codes and of the points.
struct UnitOffsets {
  int32_t codes[2];
  int32_t points;
};

// Units of one kind that follow each other.
struct UnitRun {
  int32_t count;
  int16_t shift;  // doublings of the sum before they are added
  int16_t is_shared;
};

struct QueryTable {
  int num_rows = 0;    // rows of a tile: positions one rotation of the codebook serves
  int num_queries = 0;
  std::vector<Unit> units;  // by rising exponent
  int num_full = 0;         // units that are not shared
  std::vector<PointTable> tables;
  int num_upper = 0;   // tables of upper bytes come first, then those of lower bytes
  std::vector<UnitOffsets> offsets;  // [units + 2]: the kernel looks ahead
  std::vector<UnitRun> runs;
  std::vector<int32_t> turn_plane;  // [2 * tables] plane whose phase turns the entry
  std::vector<Point> turn_points;   // [2 * upper tables, 2, 16] points in the order of tables
  std::vector<float> scale;         // [queries] of the integer sum
  // By blocks of up to kQueryBlock queries: of each unit [rows / 4, queries of the block, 4, 4], of
  // a shared one [rows / 4, queries of the block, 4]: what a group needs of a unit lies together.
  std::vector<int8_t> rows;

  int block_size(int first_query) const {
    return std::min(kQueryBlock, num_queries - first_query);
  }
  // bytes of one query in one unit
  size_t unit_bytes(bool is_shared) const {
    return static_cast<size_t>(num_rows) * (is_shared ? 1 : 4);
  }
  size_t query_bytes() const {
    return num_full * unit_bytes(false) + (units.size() - num_full) * unit_bytes(true);
  }
  const int8_t* block(int first_query) const { return rows.data() + first_query * query_bytes(); }
};

class QueryTableBuilder {
 public:
  QueryTableBuilder(const Codebook& codebook, int head, const float* planes, int num_queries)
      : head_(codebook.heads[head]), rotary_(*codebook.rotary), planes_(planes),
        num_queries_(num_queries) {}

  void build(QueryTable& out, int slot_stride, int row_bytes_budget, int most_rows) {
    out.num_queries = num_queries_;
    out.units.clear();
    out.tables.clear();
    measure();
    pair_entries(out);
    refine(out);
    order(out);
    out.num_rows = std::min(most_rows, choose_rows(out, row_bytes_budget));
    fill(out);
    list_runs(out, slot_stride);
  }

 private:
  const HeadCodebook& head_;
  const Rotary& rotary_;
  const float* planes_;
  int num_queries_;
  std::vector<float> top_;    // [queries] largest term
  std::vector<float> share_;  // [entries] largest share of a term in its query's largest
  std::vector<uint8_t> fine_;  // [entries] whether eight bits are too few

  struct Cost {
    int entry;
    float share;
  };
  static constexpr double kByteError = 1.2e-5;  // of a term's square, both roundings together
  static constexpr double kMaxCost = 0.015;

  // Terms below a sixteenth of the largest share a power: their rounding no longer counts, unless
  // the large ones are refined.
  static constexpr int kCoarseExponent = 4;
  static constexpr int kFineExponent = 8;
  int max_exponent_ = kCoarseExponent;
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
    choose_fine();
  }

  // Squared error of a query's logits that the code itself leaves, per squared key radius.
  double code_error(int query) const {
    double sum = 0.0;
    for (const Entry& entry : head_.entries) {
      const float* q =
          planes_ + (static_cast<size_t>(query) * rotary_.num_planes + entry.plane) * 2;
      sum += static_cast<double>(q[0] * q[0] + q[1] * q[1]) * entry.plane_error;
    }
    return sum;
  }

  // Rounding an entry and its query to bytes costs a share of the code's own error; the costliest
  // entries are refined until what the others cost is small.
  void choose_fine() {
    const int n = static_cast<int>(head_.entries.size());
    fine_.assign(n, 0);
    std::vector<Cost> costs;
    for (int e = 0; e < n; ++e) {
      if (head_.entries[e].slot >= 0 && !head_.entries[e].is_paired) costs.push_back({e, 0.0f});
    }
    for (int v = 0; v < num_queries_; ++v) {
      const double own = code_error(v);
      if (own <= 0.0) continue;
      for (Cost& cost : costs) {
        const double size = amplitude(v, cost.entry);
        cost.share = std::max(cost.share, static_cast<float>(kByteError * size * size / own));
      }
    }
    std::sort(costs.begin(), costs.end(),
              [](const Cost& a, const Cost& b) { return a.share > b.share; });
    double total = 0.0;
    for (const Cost& cost : costs) total += cost.share;
    for (const Cost& cost : costs) {
      if (total <= kMaxCost) break;
      fine_[cost.entry] = 1;
      max_exponent_ = kFineExponent;
      total -= cost.share;
    }
  }

  void add_unit(QueryTable& out, int a, int b) const {
    Unit unit{};
    unit.entry[0] = a;
    unit.entry[1] = b;
    const float share = std::max(share_[a], b >= 0 ? share_[b] : 0.0f);
    unit.is_constant = head_.entries[a].slot < 0;
    // all points of a constant are alike, so that any code finds it
    unit.slot[0] = std::max(0, head_.entries[a].slot);
    unit.slot[1] = b >= 0 ? std::max(0, head_.entries[b].slot) : unit.slot[0];
    unit.is_shared = is_slow(a) && (b < 0 || is_slow(b));
    unit.exponent = max_exponent_;
    if (share > 0.0f) unit.exponent = std::min(max_exponent_, -std::ilogb(share) - 1);
    unit.exponent = std::max(unit.exponent, 0);
    unit.main_exponent = unit.exponent;
    unit.table = static_cast<int>(out.tables.size());
    out.tables.push_back({{a, b}});
    out.units.push_back(unit);
  }

  bool is_slow(int entry) const {
    return rotary_.is_slow[head_.entries[entry].plane] && !fine_[entry];
  }

  void pair_entries(QueryTable& out) const {
    // constants, single slots, fine single slots; slow ones apart, to be shared
    std::vector<int> loose[6];
    const int n = static_cast<int>(head_.entries.size());
    for (int e = 0; e < n; ++e) {
      const Entry& entry = head_.entries[e];
      if (entry.is_pair_first) {
        add_unit(out, e, e + 1);
        ++e;
      } else {
        loose[(entry.slot < 0 ? 0 : 1 + fine_[e]) + 3 * is_slow(e)].push_back(e);
      }
    }
    for (auto& list : loose) {
      // neighbours in size share a unit, so that neither loses digits to the other
      std::sort(list.begin(), list.end(), [&](int a, int b) { return share_[a] > share_[b]; });
      for (size_t i = 0; i < list.size(); i += 2) {
        add_unit(out, list[i], i + 1 < list.size() ? list[i + 1] : -1);
      }
    }
  }

  void refine(QueryTable& out) const {
    const size_t num_main = out.units.size();
    out.num_upper = static_cast<int>(out.tables.size());
    for (size_t u = 0; u < num_main; ++u) {
      const Unit main = out.units[u];
      if (main.is_constant || !fine_[main.entry[0]]) continue;
      Unit low = main;
      low.exponent += kLowBits;
      low.is_low_point = true;
      low.table = static_cast<int>(out.tables.size());
      out.tables.push_back({{main.entry[0], main.entry[1]}});
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
    const int most = std::ilogb(kAccumulator / sum);
    int last = 0;
    out.num_full = 0;
    for (Unit& unit : out.units) {
      unit.exponent = std::max(0, std::min(unit.exponent, most));
      last = std::max(last, unit.exponent);
      out.num_full += !unit.is_shared;
    }
    std::stable_sort(out.units.begin(), out.units.end(), [](const Unit& a, const Unit& b) {
      return a.exponent != b.exponent ? a.exponent < b.exponent : a.is_shared < b.is_shared;
    });
    out.scale.resize(num_queries_);
    for (int v = 0; v < num_queries_; ++v) {
      out.scale[v] = std::ldexp(top_[v] / (127.0f * 127.0f), -last);
    }
  }

  static void list_runs(QueryTable& out, int slot_stride) {
    out.offsets.clear();
    out.runs.clear();
    int exponent = 0;
    for (const Unit& unit : out.units) {
      out.offsets.push_back({{unit.slot[0] * slot_stride, unit.slot[1] * slot_stride},
                             unit.table * kTableBytes});
      if (out.runs.empty() || unit.exponent != exponent ||
          unit.is_shared != out.runs.back().is_shared) {
        out.runs.push_back({0, static_cast<int16_t>(unit.exponent - exponent), unit.is_shared});
      }
      ++out.runs.back().count;
      exponent = unit.exponent;
    }
    out.offsets.resize(out.offsets.size() + 2, UnitOffsets{});
  }

  int choose_rows(const QueryTable& table, int budget) const {
    const int num_shared = static_cast<int>(table.units.size()) - table.num_full;
    const int row_bytes = std::max(1, (table.num_full * 4 + num_shared) * num_queries_);
    const int fit = std::max(1, budget / row_bytes / kGroupTokens) * kGroupTokens;
    const int tiles = (kMaxRows + fit - 1) / fit;
    const int groups = kMaxRows / kGroupTokens;
    return std::min(fit, (groups + tiles - 1) / tiles * kGroupTokens);
  }

  void fill(QueryTable& out) const {
    // the kernel loads the beginning of the unit after the last
    out.rows.resize(num_queries_ * out.query_bytes() +
                    out.block_size(0) * out.unit_bytes(false));
    int8_t* place = out.rows.data();
    for (int first = 0; first < num_queries_; first += kQueryBlock) {
      const int size = out.block_size(first);
      for (const Unit& unit : out.units) {
        for (int v = 0; v < size; ++v) {
          const Turning a = turning(unit, 0, first + v), b = turning(unit, 1, first + v);
          if (unit.is_shared) {
            fill_quads(a, b, out.num_rows / kQuad, place + 4 * v, 4 * size);
          } else if (unit.is_rest) {
            const float gain = std::ldexp(1.0f, unit.exponent - unit.main_exponent);
            fill_fine<true>(a, b, gain, out.num_rows, place + 16 * v, 16 * size);
          } else if (fine_[unit.entry[0]]) {
            fill_fine<false>(a, b, 1.0f, out.num_rows, place + 16 * v, 16 * size);
          } else {
            fill_rows(a, b, out.num_rows, place + 16 * v, 16 * size);
          }
        }
        place += out.unit_bytes(unit.is_shared) * size;
      }
    }
  }

  Turning turning(const Unit& unit, int half, int v) const {
    Turning out{0.0f, 0.0f, 0};
    const int e = unit.entry[half];
    if (e < 0 || top_[v] == 0.0f) return out;
    const Entry& entry = head_.entries[e];
    const int exponent = unit.is_rest ? unit.main_exponent
                                      : unit.exponent - (unit.is_low_point ? kLowBits : 0);
    const float scale = std::ldexp(127.0f * entry.radius / top_[v], exponent);
    const float* q = planes_ + (static_cast<size_t>(v) * rotary_.num_planes + entry.plane) * 2;
    out.x = q[0] * scale;
    out.y = q[1] * scale;
    out.at = static_cast<size_t>(entry.plane) * (unit.is_shared ? kMaxRows / kQuad : kMaxRows);
    return out;
  }

  // One word for every quad, `stride` bytes apart.
  void fill_quads(const Turning& a, const Turning& b, int num_quads, int8_t* out,
                  int stride) const {
    for (int quad = 0; quad < num_quads; quad += kTurnLanes) {
      const TurnedWords words =
          turn_rows(a, b, rotary_.cos_quad.data(), rotary_.sin_quad.data(), quad);
      for (int i = 0; i < kTurnLanes && quad + i < num_quads; ++i) {
        std::memcpy(out + (quad + i) * stride, reinterpret_cast<const char*>(&words) + 4 * i, 4);
      }
    }
  }

  // Words (a0, b0, a1, b1) of all rows; four rows lie together, then `stride` bytes follow.
  void fill_rows(const Turning& a, const Turning& b, int num_rows, int8_t* out,
                 int stride) const {
    for (int r = 0; r < num_rows; r += kTurnLanes) {
      store_rows(turn_rows(a, b, rotary_.cos_point.data(), rotary_.sin_point.data(), r), r, out,
                 stride);
    }
  }

  // The same of entries that have a rest, or what rounding took from them, times `gain`.
  template <bool IS_REST>
  void fill_fine(const Turning& a, const Turning& b, float gain, int num_rows, int8_t* out,
                 int stride) const {
    for (int r = 0; r < num_rows; r += kLanes) {
      const Words words = fine_bytes<IS_REST>(a, gain, r) | fine_bytes<IS_REST>(b, gain, r) << 16;
      store_rows(words, r, out, stride);
    }
  }

  template <class W>
  static void store_rows(const W& words, int row, int8_t* out, int stride) {
    for (size_t i = 0; i < sizeof words; i += 16) {
      std::memcpy(out + (row / 4 + i / 16) * stride, reinterpret_cast<const char*>(&words) + i,
                  16);
    }
  }

  template <bool IS_REST>
  Words fine_bytes(const Turning& q, float gain, int row) const {
    const Floats c = load_floats(rotary_.cos_row.data() + q.at + row);
    const Floats s = load_floats(rotary_.sin_row.data() + q.at + row);
    return fine_byte<IS_REST>(q.x * c + q.y * s, gain) |
           fine_byte<IS_REST>(q.y * c - q.x * s, gain) << 8;
  }

  // A sum with 1.5 * 2^23 leaves the rounded integer, two's complement, in a float's low bits.
  template <bool IS_REST>
  static Words fine_byte(Floats x, float gain) {
    constexpr float kInteger = 12582912.0f;
    if (IS_REST) {
      x = (x - ((x + kInteger) - kInteger)) * gain;
      x = x > 127.0f ? same(127.0f) : x < -127.0f ? same(-127.0f) : x;
    }
    x += kInteger;
    Words bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 255;
  }
};
