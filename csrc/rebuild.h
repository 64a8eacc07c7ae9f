// SPDX-License-Identifier: Apache-2.0
// The rival of the look-up kernels: it rebuilds the states of a page, 16 at a time, as dense float32
// rows in cache, rotated as the model has them, and multiplies these. No pass of its own over the
// cache, no rebuilt state leaves the loop. Included inside a variant's namespace, after driver.h.

struct RebuildTable {
  int num_queries = 0;
  std::vector<float> planes;  // [queries, planes, 2]
};

struct RebuildScratch {
  std::vector<float> logits;  // [rows, kMaxPageTokens]
  std::vector<float> peak;    // [rows] largest weight times step
  std::vector<float> keys;    // [planes, 2, kGroupTokens]
  std::vector<float> row;     // [dim] one value
  Phases phases;
  int32_t position[kMaxPageTokens];
  float radius[kMaxPageTokens];
  float step[kMaxPageTokens];  // of the value codes

  void reserve(int num_rows) {
    if (logits.size() >= static_cast<size_t>(num_rows) * kMaxPageTokens) return;
    logits.resize(static_cast<size_t>(num_rows) * kMaxPageTokens);
    peak.resize(num_rows);
  }
  void forget_base() {}
};

struct RebuildKernel {
  using Table = RebuildTable;
  using Scratch = RebuildScratch;

  static void build(const PageKind& kind, int /*head*/, const float* planes, int queries,
                    Table& out) {
    out.num_queries = queries;
    out.planes.assign(planes, planes + static_cast<size_t>(queries) * 2 *
                                           kind.codebook->rotary->num_planes);
  }

  static void logits(const uint8_t* page, const uint8_t* /*next*/, const PageKind& kind, int head,
                     const Table& table, Scratch& scratch) {
    const Rotary& rotary = *kind.codebook->rotary;
    const int count = header_of(page).count;
    scratch.keys.resize(static_cast<size_t>(rotary.num_planes) * 2 * kGroupTokens);
    for (int first = 0; first < count; first += kGroupTokens) {
      look_up(page, kind, head, first, scratch.keys);
      if (kind.layout.mode == PositionMode::kTokens) {
        for (int i = 0; i < kGroupTokens && first + i < count; ++i) {
          turn_one(rotary, scratch.position[first + i], i, scratch);
        }
      } else {
        turn_run(rotary, scratch.position[first], scratch);
      }
      for (int v = 0; v < table.num_queries; ++v) {
        const float* query = table.planes.data() + static_cast<size_t>(v) * 2 * rotary.num_planes;
        multiply(query, scratch.keys.data(), 2 * rotary.num_planes,
                 scratch.logits.data() + static_cast<size_t>(v) * kMaxPageTokens + first);
      }
    }
  }

  static void values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                     Scratch& scratch, float* out) {
    const int count = header_of(page).count;
    scratch.row.resize(dim);
    float* row = scratch.row.data();
    for (int t = 0; t < count; ++t) {
      read_value_codes(page, kind.layout, dim, t, 1.0f, row);
      for (int v = 0; v < num_rows; ++v) {
        const float weight = scratch.logits[static_cast<size_t>(v) * kMaxPageTokens + t];
        if (weight == 0.0f) continue;
        float* to = out + static_cast<size_t>(v) * dim;
        for (int i = 0; i < dim; ++i) to[i] += weight * row[i];
      }
    }
  }

 private:
  // Keys of a group before rotation, in planes, all of radius one.
  static void look_up(const uint8_t* page, const PageKind& kind, int head, int first,
                      std::vector<float>& keys) {
    const int half = kind.layout.slot_stride(), shift = first < half ? 0 : 4;
    const uint8_t* codes = page + kind.layout.key_offset + first % half;
    look_up_points(kind.codebook->heads[head], keys, [&](int slot, int32_t* code) {
      const uint8_t* at = codes + static_cast<size_t>(slot) * half;
      for (int i = 0; i < kGroupTokens; ++i) code[i] = at[i] >> shift & 15;
    });
  }

  // Rotates a group of consecutive positions.
  static void turn_run(const Rotary& rotary, int64_t base, Scratch& scratch) {
    move_phases(rotary, base, scratch.phases);
    float* key = scratch.keys.data();
    for (int plane = 0; plane < rotary.num_planes; ++plane, key += 2 * kGroupTokens) {
      const float c = scratch.phases.cosine[plane], s = scratch.phases.sine[plane];
      const float* cos_row = rotary.cos_row.data() + static_cast<size_t>(plane) * kMaxRows;
      const float* sin_row = rotary.sin_row.data() + static_cast<size_t>(plane) * kMaxRows;
      for (int i = 0; i < kGroupTokens; i += kLanes) {
        const Floats cr = load_floats(cos_row + i), sr = load_floats(sin_row + i);
        const Floats cosine = c * cr - s * sr, sine = s * cr + c * sr;
        const Floats x = load_floats(key + i), y = load_floats(key + kGroupTokens + i);
        store_floats(key + i, x * cosine - y * sine);
        store_floats(key + kGroupTokens + i, x * sine + y * cosine);
      }
    }
  }

  static void turn_one(const Rotary& rotary, int64_t position, int i, Scratch& scratch) {
    base_phases(rotary, position, scratch.phases);
    scratch.phases.num_advances = -1;
    float* key = scratch.keys.data() + i;
    for (int plane = 0; plane < rotary.num_planes; ++plane, key += 2 * kGroupTokens) {
      const float c = scratch.phases.cosine[plane], s = scratch.phases.sine[plane];
      const float x = key[0], y = key[kGroupTokens];
      key[0] = x * c - y * s;
      key[kGroupTokens] = x * s + y * c;
    }
  }

  static void multiply(const float* query, const float* keys, int dim, float* out) {
    Floats sum[kGroupTokens / kLanes] = {};
    for (int i = 0; i < dim; ++i) {
      for (int at = 0; at < kGroupTokens / kLanes; ++at) {
        sum[at] += query[i] * load_floats(keys + i * kGroupTokens + at * kLanes);
      }
    }
    for (int at = 0; at < kGroupTokens / kLanes; ++at) store_floats(out + at * kLanes, sum[at]);
  }
};
