// SPDX-License-Identifier: Apache-2.0
// The portable kernel: the same look-ups in float32. It serves processors without a fast variant
// and callers that ask for float32 precision. Included inside a variant's namespace.

struct ExactTable {
  int num_queries = 0;
  std::vector<float> rows;  // [queries, entries, 2, kGroupTokens] query turned back by the row

  void build(const Codebook& codebook, int head, const float* planes, int queries) {
    const Rotary& rotary = *codebook.rotary;
    const auto& entries = codebook.heads[head].entries;
    num_queries = queries;
    rows.resize(static_cast<size_t>(queries) * entries.size() * 2 * kGroupTokens);
    float* out = rows.data();
    for (int v = 0; v < queries; ++v) {
      for (const Entry& entry : entries) {
        const float* q = planes + (static_cast<size_t>(v) * rotary.num_planes + entry.plane) * 2;
        const float* cosine = rotary.cos_row.data() + static_cast<size_t>(entry.plane) * kMaxRows;
        const float* sine = rotary.sin_row.data() + static_cast<size_t>(entry.plane) * kMaxRows;
        for (int r = 0; r < kGroupTokens; ++r) {
          out[r] = q[0] * cosine[r] + q[1] * sine[r];
          out[kGroupTokens + r] = q[1] * cosine[r] - q[0] * sine[r];
        }
        out += 2 * kGroupTokens;
      }
    }
  }
};

struct ExactScratch {
  std::vector<float> logits;        // [rows, kMaxPageTokens]
  std::vector<float> peak;          // [rows] largest weight times step
  std::vector<float> turned;        // [entries, 2, 16] codebook at the tile base
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
  }
  void forget_base() { has_base = false; }
};

struct ExactKernel {
  using Table = ExactTable;
  using Scratch = ExactScratch;

  static void build(const PageKind& kind, int head, const float* planes, int queries,
                    Table& out) {
    out.build(*kind.codebook, head, planes, queries);
  }

  static void logits(const uint8_t* page, const uint8_t* /*next*/, const PageKind& kind, int head,
                     const Table& table, Scratch& scratch) {
    const PageLayout& layout = kind.layout;
    const HeadCodebook& points = kind.codebook->heads[head];
    const int count = header_of(page).count, half = layout.tokens / 2;
    const int num_entries = static_cast<int>(points.entries.size());
    for (int t = 0; t < count; ++t) {
      const int64_t p = scratch.position[t];
      if (!scratch.has_base || p < scratch.base || p >= scratch.base + kGroupTokens) {
        turn(*kind.codebook, head, p, scratch);
      }
      const int row = static_cast<int>(p - scratch.base);
      const uint8_t* codes = page + layout.key_offset + t % half;
      const int shift = t < half ? 0 : 4;
      for (int v = 0; v < table.num_queries; ++v) {
        const float* q = table.rows.data() +
                         static_cast<size_t>(v) * num_entries * 2 * kGroupTokens + row;
        const float* turned = scratch.turned.data();
        float sum = 0.0f;
        for (int e = 0; e < num_entries; ++e, q += 2 * kGroupTokens, turned += 2 * kSlotLevels) {
          const int slot = points.entries[e].slot;
          const int code = slot < 0 ? 0 : codes[slot * half] >> shift & 15;
          sum += q[0] * turned[code] + q[kGroupTokens] * turned[kSlotLevels + code];
        }
        scratch.logits[static_cast<size_t>(v) * kMaxPageTokens + t] = sum;
      }
    }
  }

  static void values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                     Scratch& scratch, float* out) {
    const int count = header_of(page).count, bits = kind.layout.value_bits;
    const float middle = ((1 << bits) - 1) * 0.5f;
    const uint8_t* stream = page + kind.layout.value_offset;
    for (int t = 0; t < count; ++t) {
      for (int v = 0; v < num_rows; ++v) {
        const float weight = scratch.logits[static_cast<size_t>(v) * kMaxPageTokens + t];
        if (scratch.peak[v] == 0.0f || weight == 0.0f) continue;
        float* row = out + static_cast<size_t>(v) * dim;
        for (int i = 0; i < dim; ++i) {
          row[i] += weight * (code_at(stream, kind.layout.tokens, dim, bits, t, i) - middle);
        }
      }
    }
  }

 private:
  static void turn(const Codebook& codebook, int head, int64_t base, Scratch& scratch) {
    const Rotary& rotary = *codebook.rotary;
    const HeadCodebook& points = codebook.heads[head];
    scratch.turned.resize(points.scaled.size());
    base_phases(rotary, base, scratch.phases);
    for (size_t e = 0; e < points.entries.size(); ++e) {
      const Entry& entry = points.entries[e];
      const float c = scratch.phases.cosine[entry.plane] * entry.unit();
      const float s = scratch.phases.sine[entry.plane] * entry.unit();
      const float* x = points.scaled.data() + e * 2 * kSlotLevels;
      const float* y = x + kSlotLevels;
      float* out = scratch.turned.data() + e * 2 * kSlotLevels;
      for (int i = 0; i < kSlotLevels; ++i) {
        out[i] = x[i] * c - y[i] * s;
        out[kSlotLevels + i] = x[i] * s + y[i] * c;
      }
    }
    scratch.base = base;
    scratch.has_base = true;
  }

  // One code of a stream of `width` bits: blocks of 32 / width tokens, four bytes per dimension.
  static int field(const uint8_t* stream, int dim, int width, int token, int i) {
    const int block_tokens = 32 / width;
    const int block = token / block_tokens, inside = token % block_tokens;
    const uint8_t byte = stream[(static_cast<size_t>(block) * dim + i) * 4 + inside % 4];
    return byte >> (inside / 4 * width) & ((1 << width) - 1);
  }

  static float code_at(const uint8_t* stream, int tokens, int dim, int bits, int token, int i) {
    if (bits != 3) return static_cast<float>(field(stream, dim, bits, token, i));
    const uint8_t* top = stream + static_cast<size_t>(tokens) * dim / 4;
    return static_cast<float>(field(stream, dim, 2, token, i) |
                              field(top, dim, 1, token, i) << 2);
  }
};
