// SPDX-License-Identifier: Apache-2.0
// The fast kernel: byte look-ups in registers and int8 dot products. Included inside a variant's
// namespace, after its simd header.
//
// A group of 16 tokens of one slot is one register of codes. It looks up x and y of the codebook
// turned by the tile base; two entries interleave to (x0, y0, x1, y1) per token, and one dot
// product with the query's row bytes (query_table.h) adds both to the logit of a query row.


struct LookupScratch {
  std::vector<float> logits;         // [rows, kMaxPageTokens]
  std::vector<float> peak;           // [rows] largest weight times step
  std::vector<uint8_t> weights;      // [row blocks, groups, kQueryBlock, 2, kGroupTokens]
  std::vector<float> weight_scale;   // [rows]
  std::vector<float> weight_sum;     // [rows]
  std::vector<uint8_t> turned;       // [tables, kTableBytes] codebook at the tile base
  Phases phases;
  int32_t position[kMaxPageTokens];
  float radius[kMaxPageTokens];
  float step[kMaxPageTokens];  // of the value codes
  int64_t base = 0;
  bool has_base = false;

  void reserve(int num_rows) {
    if (logits.size() >= static_cast<size_t>(num_rows) * kMaxPageTokens) return;
    logits.resize(static_cast<size_t>(num_rows) * kMaxPageTokens);
    peak.resize(num_rows);
    const size_t blocks = (num_rows + kQueryBlock - 1) / kQueryBlock;
    weights.resize(blocks * kQueryBlock * 2 * kMaxPageTokens);
    weight_scale.resize(num_rows);
    weight_sum.resize(num_rows);
  }
  void forget_base() {
    has_base = false;
    phases.num_advances = -1;
  }
};

struct GroupArgs {
  const QueryTable* table;
  const uint8_t* codes;    // of slot 0, this group
  const uint8_t* turned;
  int first_query;
  const int32_t* row;      // row of each token; of the first alone if they follow each other
  float* logits;           // of the first query
};

// `query` points to the unit's bytes, of this group's rows or, if gathered, of row 0.
template <int NV, bool IS_GATHERED>
inline void add_unit(const int8_t* query, const int32_t* place, const Bytes points[4],
                     Ints (&sum)[NV][4]) {
  for (int i = 0; i < 4; ++i) {
    for (int v = 0; v < NV; ++v) {
      const Bytes q = IS_GATHERED ? gather_words(query + 16 * v, place + 4 * i)
                                  : load_bytes(query + 16 * (NV * i + v));
      sum[v][i] = dot(sum[v][i], points[i], q);
    }
  }
}

// Points of both entries for every token of the group.
template <bool IS_HIGH>
inline void look_up_unit(const GroupArgs& args, const UnitOffsets& unit, Bytes lanes[4]) {
  const uint8_t* points = args.turned + unit.points;
  if (unit.codes[0] < 0) {
    const uint8_t word[4] = {points[0], points[16], points[32], points[48]};
    lanes[0] = lanes[1] = lanes[2] = lanes[3] = broadcast_word(word);
    return;
  }
  Bytes a = load_bytes(args.codes + unit.codes[0]);
  Bytes b = load_bytes(args.codes + unit.codes[1]);
  a = IS_HIGH ? high_nibbles(a) : low_nibbles(a);
  b = IS_HIGH ? high_nibbles(b) : low_nibbles(b);
  interleave(look_up(load_bytes(points), a), look_up(load_bytes(points + 16), a),
             look_up(load_bytes(points + 32), b), look_up(load_bytes(points + 48), b), lanes);
}

// Logits of one group for NV query rows; IS_HIGH: its codes are the upper nibbles.
template <int NV, bool IS_HIGH, bool IS_GATHERED>
void group_logits(const GroupArgs& args) {
  Ints sum[NV][4];
  for (auto& row : sum) {
    for (auto& lane : row) lane = zero_ints();
  }
  const QueryTable& table = *args.table;
  const size_t unit_bytes = table.unit_bytes(args.first_query);
  const int8_t* query = table.block(args.first_query);
  int32_t place[kGroupTokens];  // of each token's word in a unit
  if (IS_GATHERED) {
    for (int t = 0; t < kGroupTokens; ++t) {
      place[t] = (args.row[t] / 4 * NV) * 4 + args.row[t] % 4;
    }
  } else {
    query += static_cast<size_t>(args.row[0]) * 4 * NV;
  }
  const UnitOffsets* unit = table.offsets.data();
  const UnitOffsets* const end = unit + table.units.size();
  // one unit ahead: its look-ups fill the time that these dot products take
  Bytes lanes[4];
  look_up_unit<IS_HIGH>(args, *unit, lanes);
  for (; unit < end; ++unit, query += unit_bytes) {
    // additions run on every vector unit, shifts often on one only
    for (int bit = unit->shift; bit > 0; --bit) {
      for (auto& row : sum) {
        for (auto& lane : row) lane = twice(lane);
      }
    }
    Bytes next[4];
    look_up_unit<IS_HIGH>(args, unit[1], next);
    add_unit<NV, IS_GATHERED>(query, place, lanes, sum);
    for (int i = 0; i < 4; ++i) lanes[i] = next[i];
  }
  for (int v = 0; v < NV; ++v) {
    for (int i = 0; i < 4; ++i) {
      store_scaled(args.logits + v * kMaxPageTokens + 4 * i, sum[v][i],
                   table.scale[args.first_query + v]);
    }
  }
}

template <bool IS_HIGH, bool IS_GATHERED>
void group_block(GroupArgs args, int num_queries) {
  float* logits = args.logits;
  for (int v = 0; v < num_queries; v += kQueryBlock) {
    args.first_query = v;
    args.logits = logits + static_cast<size_t>(v) * kMaxPageTokens;
    switch (num_queries - v) {
      case 1: group_logits<1, IS_HIGH, IS_GATHERED>(args); break;
      case 2: group_logits<2, IS_HIGH, IS_GATHERED>(args); break;
      case 3: group_logits<3, IS_HIGH, IS_GATHERED>(args); break;
      default: group_logits<4, IS_HIGH, IS_GATHERED>(args); break;
    }
  }
}

inline void turn_codebook(const Codebook& codebook, int head, const QueryTable& table,
                          int64_t base, LookupScratch& scratch) {
  const Rotary& rotary = *codebook.rotary;
  scratch.turned.resize(table.tables.size() * kTableBytes);
  move_phases(rotary, base, scratch.phases);
  finish_phases(rotary.num_planes, scratch.phases);
  const int32_t* plane = table.turn_plane.data();
  rotate_bytes(table.turn_points.data(), plane, 2 * table.num_upper, scratch.phases,
               scratch.turned.data());
  const HeadCodebook& points = codebook.heads[head];
  for (size_t i = table.num_upper; i < table.tables.size(); ++i) {
    for (int half = 0; half < 2; ++half) {
      const int entry = table.tables[i].entry[half];
      uint8_t* out = scratch.turned.data() + i * kTableBytes + half * kTableBytes / 2;
      if (entry < 0) {
        std::memset(out, 0, kTableBytes / 2);
        continue;
      }
      const int p = plane[2 * i + half];
      rotate_low_bytes(points.scaled.data() + static_cast<size_t>(entry) * 2 * kSlotLevels,
                       scratch.phases.cosine[p], scratch.phases.sine[p], out);
    }
  }
  scratch.base = base;
  scratch.has_base = true;
}

struct LookupKernel {
  using Table = QueryTable;
  using Scratch = LookupScratch;

  static void build(const PageKind& kind, int head, const float* planes, int queries,
                    Table& out) {
    QueryTableBuilder(*kind.codebook, head, planes, queries)
        .build(out, kind.layout.slot_stride(), kRowBytesBudget);
    const HeadCodebook& points = kind.codebook->heads[head];
    out.turn_plane.clear();
    out.turn_points.assign(static_cast<size_t>(out.num_upper) * 4 * kSlotLevels, Point{});
    for (size_t i = 0; i < 2 * out.tables.size(); ++i) {
      const int entry = out.tables[i / 2].entry[i % 2];
      out.turn_plane.push_back(entry < 0 ? 0 : points.entries[entry].plane);
      if (entry < 0 || i >= 2 * static_cast<size_t>(out.num_upper)) continue;
      std::copy_n(entry_points(points, entry), 2 * kSlotLevels,
                  out.turn_points.begin() + i * 2 * kSlotLevels);
    }
  }

  static void logits(const uint8_t* page, const uint8_t* next, const PageKind& kind, int head,
                     const Table& table, Scratch& scratch) {
    const PageLayout& layout = kind.layout;
    const int count = header_of(page).count;
    const int half_groups = layout.tokens / 2 / kGroupTokens;
    const int share = layout.page_bytes / (2 * half_groups);
    for (int g = 0; g * kGroupTokens < count; ++g) {
      if (next != nullptr) prefetch(next + g * share, share);
      GroupArgs args{};
      args.table = &table;
      args.codes = page + layout.key_offset + g % half_groups * kGroupTokens;
      args.logits = scratch.logits.data() + g * kGroupTokens;
      const int live = std::min(kGroupTokens, count - g * kGroupTokens);
      const int32_t* position = scratch.position + g * kGroupTokens;
      if (layout.mode == PositionMode::kTokens) {
        scattered(args, *kind.codebook, head, position, live, g >= half_groups, scratch);
        continue;
      }
      use_base(*kind.codebook, head, table, position[0], kGroupTokens, scratch);
      const int32_t row = static_cast<int32_t>(position[0] - scratch.base);
      args.turned = scratch.turned.data();
      args.row = &row;
      g >= half_groups ? group_block<true, false>(args, table.num_queries)
                       : group_block<false, false>(args, table.num_queries);
    }
  }

  static void values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                     Scratch& scratch, float* out);

 private:
  static void prefetch(const uint8_t* at, int bytes) {
    constexpr int kLineBytes = 64, kSecondLevel = 2;
    for (int i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(at + i, 0, kSecondLevel);
  }

  static void use_base(const Codebook& codebook, int head, const Table& table, int64_t first,
                       int length, Scratch& scratch) {
    const int64_t row = first - scratch.base;
    if (scratch.has_base && row >= 0 && row + length <= table.num_rows &&
        (length == 1 || row % 4 == 0)) {
      return;
    }
    turn_codebook(codebook, head, table, first, scratch);
  }

  // Any positions: tokens whose positions fall in one tile are taken together.
  static void scattered(GroupArgs args, const Codebook& codebook, int head,
                        const int32_t* position, int live, bool is_high, Scratch& scratch) {
    const Table& table = *args.table;
    auto& part = thread_scratch<std::vector<float>>();
    part.resize(static_cast<size_t>(table.num_queries) * kMaxPageTokens);
    float* logits = args.logits;
    uint32_t todo = (1u << live) - 1u;
    while (todo != 0) {
      int first = 0;
      while (!(todo >> first & 1u)) ++first;
      use_base(codebook, head, table, position[first], 1, scratch);
      int32_t row[kGroupTokens];
      uint32_t done = 0;
      for (int t = 0; t < kGroupTokens; ++t) {
        const int64_t offset = t < live ? position[t] - scratch.base : -1;
        const bool is_in = offset >= 0 && offset < table.num_rows;
        row[t] = is_in ? static_cast<int32_t>(offset) : 0;
        done |= is_in ? 1u << t : 0u;
      }
      args.row = row;
      args.turned = scratch.turned.data();
      args.logits = part.data();
      is_high ? group_block<true, true>(args, table.num_queries)
              : group_block<false, true>(args, table.num_queries);
      for (int v = 0; v < table.num_queries; ++v) {
        for (int t = 0; t < live; ++t) {
          if (done >> t & 1u) logits[v * kMaxPageTokens + t] = part[v * kMaxPageTokens + t];
        }
      }
      todo &= ~done;
    }
  }
};
