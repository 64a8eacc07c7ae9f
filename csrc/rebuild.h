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

// Adds to 16 floats the entries of a table of 16 that the codes of a group pick, times a unit.
inline void add_picked(const float* table, const uint8_t* codes, float unit, float* out) {
#if defined(__AVX512F__)
  const __m512i index =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512 picked = _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
  _mm512_storeu_ps(out, _mm512_fmadd_ps(picked, _mm512_set1_ps(unit), _mm512_loadu_ps(out)));
#elif defined(__AVX2__)
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  for (int at = 0; at < kGroupTokens; at += 8) {
    const __m256i index =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + at)));
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    const __m256 picked = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                           _mm256_permutevar8x32_ps(high, index), is_high);
    _mm256_storeu_ps(out + at, _mm256_fmadd_ps(picked, _mm256_set1_ps(unit),
                                               _mm256_loadu_ps(out + at)));
  }
#else
  for (int i = 0; i < kGroupTokens; ++i) out[i] += unit * table[codes[i]];
#endif
}

// Directions of 16 states before rotation, [planes, 2, kGroupTokens]: fetch(slot, code) gives the
// codes of a slot.
template <class Fetch>
void look_up_points(const HeadCodebook& points, std::vector<float>& keys, const Fetch& fetch) {
  std::fill(keys.begin(), keys.end(), 0.0f);
  uint8_t code[kGroupTokens];
  const float* x = points.scaled.data();
  for (const Entry& entry : points.entries) {
    float* out = keys.data() + static_cast<size_t>(entry.plane) * 2 * kGroupTokens;
    if (entry.slot < 0) {
      for (int i = 0; i < kGroupTokens; ++i) {
        out[i] += x[0] * entry.unit();
        out[kGroupTokens + i] += x[kSlotLevels] * entry.unit();
      }
    } else {
      fetch(entry.slot, code);
      add_picked(x, code, entry.unit(), out);
      add_picked(x + kSlotLevels, code, entry.unit(), out + kGroupTokens);
    }
    x += 2 * kSlotLevels;
  }
}

// Words and shift of a token in a stream of blocks of 32 / width tokens, four bytes per dimension.
inline const uint32_t* words_of(const uint8_t* stream, int dim, int width, int token, int& shift) {
  const int block_tokens = 32 / width, inside = token % block_tokens;
  shift = 8 * (inside % 4) + inside / 4 * width;
  return reinterpret_cast<const uint32_t*>(stream) +
         static_cast<size_t>(token / block_tokens) * dim;
}

// Value codes of a token less their midpoint.
inline void read_centred_value(const uint8_t* page, const PageLayout& layout, int dim, int token,
                               float* out) {
  const int bits = layout.value_bits, width = bits == 3 ? 2 : bits;
  const float middle = ((1 << bits) - 1) * 0.5f;
  const uint8_t* stream = page + layout.value_offset;
  const uint32_t mask = (1u << width) - 1;
  int shift = 0;
  const uint32_t* word = words_of(stream, dim, width, token, shift);
  for (int i = 0; i < dim; ++i) {
    out[i] = static_cast<float>(static_cast<int32_t>(word[i] >> shift & mask)) - middle;
  }
  if (bits != 3) return;
  word = words_of(stream + static_cast<size_t>(layout.tokens) * dim / 4, dim, 1, token, shift);
  for (int i = 0; i < dim; ++i) {
    out[i] += 4.0f * static_cast<float>(static_cast<int32_t>(word[i] >> shift & 1));
  }
}

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
      read_centred_value(page, kind.layout, dim, t, row);
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
    look_up_points(kind.codebook->heads[head], keys, [&](int slot, uint8_t* code) {
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
