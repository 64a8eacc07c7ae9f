// SPDX-License-Identifier: Apache-2.0
// The fast kernel: byte look-ups in registers and int8 dot products. Included inside a variant's
// namespace, after its simd header.
//
// A group of 16 tokens of one slot is one register of codes. It looks up x and y of the codebook
// turned by the tile base; two entries interleave to (x0, y0, x1, y1) per token, and one dot
// product with the query's row bytes (query_table.h) adds both to the logit of a query row.


template <int LOCALITY>  // 3: into the first-level cache, 2: into the second
inline void prefetch(const uint8_t* at, int bytes) {
  constexpr int kLineBytes = 64;
  for (int i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(at + i, 0, LOCALITY);
}

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

// Points of both entries of a unit, for every token of a group: lanes[i] holds (x0, y0, x1, y1) of
// tokens 4 * i .. 4 * i + 3. The rest is the next unit's look-up on its way there.
struct UnitPoints {
  Bytes lanes[4];
  Bytes code[2];      // as stored, until the look-up begins
  Bytes coordinate[4];
  Bytes half[4];
};

SPHKV_INLINE void read_codes(const GroupArgs& args, const UnitOffsets& unit, UnitPoints& s) {
  s.code[0] = pin(load_bytes(args.codes + unit.codes[0]));
  s.code[1] = pin(load_bytes(args.codes + unit.codes[1]));
}

constexpr int kLookUpOps = 14;

// One operation of the look-up of `unit`. They are spread between dot products of the unit before,
// and the last four take the place of its points. Nothing waits for a load: the queues in front of
// the vector units are short. So the codes of the unit after are read as soon as there is room.
template <int OP, bool IS_HIGH>
SPHKV_INLINE void look_up_op(const GroupArgs& args, const UnitOffsets* unit, UnitPoints& s) {
  if constexpr (OP < 2) {
    load_pair<2 * OP * kSlotLevels>(args.turned + unit->points, s.coordinate[2 * OP],
                                    s.coordinate[2 * OP + 1]);
    s.code[OP] = pin(IS_HIGH ? high_nibbles(s.code[OP]) : low_nibbles(s.code[OP]));
  } else if constexpr (OP < 6) {
    s.coordinate[OP - 2] = pin(look_up(s.coordinate[OP - 2], s.code[(OP - 2) / 2]));
    if constexpr (OP == 5) read_codes(args, unit[1], s);
  } else if constexpr (OP < 10) {
    constexpr int kEntry = (OP - 6) % 2, kIsUpper = (OP - 6) / 2;
    const Bytes x = s.coordinate[2 * kEntry], y = s.coordinate[2 * kEntry + 1];
    s.half[OP - 6] = pin(kIsUpper ? zip_high(x, y) : zip_low(x, y));
  } else {
    constexpr int kLane = OP - 10, kFirst = kLane / 2 * 2;
    s.lanes[kLane] = pin(kLane % 2 ? zip_pairs_high(s.half[kFirst], s.half[kFirst + 1])
                                   : zip_pairs_low(s.half[kFirst], s.half[kFirst + 1]));
  }
}

template <int FIRST, int LAST, bool IS_HIGH>
SPHKV_INLINE void look_up_ops(const GroupArgs& args, const UnitOffsets* unit, UnitPoints& s) {
  if constexpr (FIRST < LAST) {
    look_up_op<FIRST, IS_HIGH>(args, unit, s);
    look_up_ops<FIRST + 1, LAST, IS_HIGH>(args, unit, s);
  }
}

// Where a group's rows lie in a unit of query bytes: [0] of a full unit, [1] of a shared one.
struct RowPlaces {
  size_t first[2];                  // of this group's rows
  int32_t word[2][kGroupTokens];    // gathered: of each token's word
};

struct UnitQuery {
  const int8_t* bytes;  // of this group's rows or, if gathered, of row 0
  size_t unit_bytes;
  const int32_t* word;  // gathered: of each token's word
  Bytes held[4];        // what has been loaded of them
};

// Loads what dot products from DOT on need, of the next unit if that is past the end of this one.
template <int DOT, int NV, bool IS_SHARED>
SPHKV_INLINE void load_query(UnitQuery& query) {
  constexpr int kDots = 4 * NV, kDot = DOT % kDots;
  const int8_t* at = DOT < kDots ? query.bytes : query.bytes + query.unit_bytes;
  if constexpr (IS_SHARED) {
    if constexpr (DOT % 4 == 0) query.held[kDot / 4] = pin(load_bytes(at + 4 * kDot));
  } else if constexpr (DOT % 2 == 0) {
    load_pair<16 * kDot>(at, query.held[DOT % 4], query.held[DOT % 4 + 1]);
  }
}

// Dot product number DOT of a unit: tokens 4 * i .. 4 * i + 3, query row v.
template <int DOT, int NV, bool IS_GATHERED, bool IS_SHARED>
SPHKV_INLINE void add_dot(UnitQuery& query, const UnitPoints& points, Ints (&sum)[NV][4]) {
  constexpr int i = DOT / NV, v = DOT % NV;
  if constexpr (IS_GATHERED) {
    const Bytes q = gather_words(query.bytes + (IS_SHARED ? 4 : 16) * v, query.word + 4 * i);
    sum[v][i] = dot(sum[v][i], points.lanes[i], q);
  } else if constexpr (IS_SHARED) {
    constexpr int kAhead = NV == 1 ? 1 : 4;  // a single register must have been used
    sum[v][i] = pin(dot_word<DOT % 4>(sum[v][i], points.lanes[i], query.held[DOT / 4]));
    load_query<DOT + kAhead, NV, true>(query);
  } else {
    load_query<DOT + 2, NV, false>(query);
    sum[v][i] = pin(dot(sum[v][i], points.lanes[i], query.held[DOT % 4]));
  }
}

// Adds a unit and looks up the next.
template <int DOT, int NV, bool IS_HIGH, bool IS_GATHERED, bool IS_SHARED>
SPHKV_INLINE void add_unit(const GroupArgs& args, const UnitOffsets* next, UnitQuery& query,
                           UnitPoints& points, Ints (&sum)[NV][4]) {
  constexpr int kDots = 4 * NV;
  if constexpr (DOT < kDots) {
    add_dot<DOT, NV, IS_GATHERED, IS_SHARED>(query, points, sum);
    look_up_ops<DOT * kLookUpOps / kDots, (DOT + 1) * kLookUpOps / kDots, IS_HIGH>(args, next,
                                                                                 points);
    add_unit<DOT + 1, NV, IS_HIGH, IS_GATHERED, IS_SHARED>(args, next, query, points, sum);
  }
}

template <int NV>
inline void double_sums(int times, Ints (&sum)[NV][4]) {
  // additions run on every vector unit, shifts often on one only
  for (; times > 0; --times) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[v][i] = twice(sum[v][i]);
    }
  }
}

// Adds the units of a run, whose query bytes begin at `query`; `unit` moves to the first after it.
template <int NV, bool IS_HIGH, bool IS_GATHERED, bool IS_SHARED>
SPHKV_INLINE const int8_t* add_run(const GroupArgs& args, const RowPlaces& places, int count,
                                   const int8_t* query, const UnitOffsets*& unit,
                                   UnitPoints& points, Ints (&sum)[NV][4]) {
  UnitQuery at{query + places.first[IS_SHARED], args.table->unit_bytes(IS_SHARED) * NV,
               places.word[IS_SHARED], {}};
  if constexpr (!IS_GATHERED) load_query<0, NV, IS_SHARED>(at);
  const UnitOffsets* const end = unit + count;
  do {
    add_unit<0, NV, IS_HIGH, IS_GATHERED, IS_SHARED>(args, ++unit, at, points, sum);
    at.bytes += at.unit_bytes;
  } while (unit != end);
  return query + count * at.unit_bytes;
}

// Adds all units to the sums of a group.
template <int NV, bool IS_HIGH, bool IS_GATHERED>
SPHKV_INLINE void add_units(const GroupArgs& args, const RowPlaces& places, Ints (&sum)[NV][4]) {
  const UnitOffsets* unit = args.table->offsets.data();
  const int8_t* query = args.table->block(args.first_query);
  UnitPoints points;
  read_codes(args, *unit, points);
  look_up_ops<0, kLookUpOps, IS_HIGH>(args, unit, points);
  for (const UnitRun& run : args.table->runs) {
    double_sums<NV>(run.shift, sum);
    query = run.is_shared ? add_run<NV, IS_HIGH, IS_GATHERED, true>(args, places, run.count, query,
                                                                    unit, points, sum)
                          : add_run<NV, IS_HIGH, IS_GATHERED, false>(args, places, run.count,
                                                                     query, unit, points, sum);
  }
}

// Logits of one group for NV query rows; IS_HIGH: its codes are the upper nibbles.
template <int NV, bool IS_HIGH, bool IS_GATHERED>
__attribute__((noinline)) void group_logits(const GroupArgs& args) {
  Ints sum[NV][4];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[v][i] = zero_ints();
  }
  RowPlaces places{};
  if (IS_GATHERED) {
    for (int t = 0; t < kGroupTokens; ++t) {
      const int quad = args.row[t] / kQuad * NV;
      places.word[true][t] = quad;
      places.word[false][t] = quad * kQuad + args.row[t] % kQuad;
    }
  } else {
    places.first[true] = static_cast<size_t>(args.row[0]) * NV;
    places.first[false] = 4 * places.first[true];
  }
  add_units<NV, IS_HIGH, IS_GATHERED>(args, places, sum);
  float scale[NV];  // a copy: the compiler must not fear that logits overwrite it
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) scale[v] = args.table->scale[args.first_query + v];
  float* const logits = args.logits;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      store_scaled(logits + v * kMaxPageTokens + 4 * i, sum[v][i], scale[v]);
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
                    Table& out, int row_bytes_budget = kRowBytesBudget, int most_rows = kMaxRows) {
    QueryTableBuilder(*kind.codebook, head, planes, queries)
        .build(out, kind.layout.slot_stride(), row_bytes_budget, most_rows);
    const HeadCodebook& points = kind.codebook->heads[head];
    out.turn_plane.resize(2 * out.tables.size());
    out.turn_points.assign(static_cast<size_t>(out.num_upper) * 4 * kSlotLevels, Point{});
    for (size_t i = 0; i < 2 * out.tables.size(); ++i) {
      const int entry = out.tables[i / 2].entry[i % 2];
      out.turn_plane[i] = entry < 0 ? 0 : points.entries[entry].plane;
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
    const int value_share = (layout.page_bytes - layout.value_offset) / (2 * half_groups);
    for (int g = 0; g * kGroupTokens < count; ++g) {
      if (next != nullptr) prefetch<2>(next + g * share, share);
      prefetch<3>(page + layout.value_offset + g * value_share, value_share);
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
