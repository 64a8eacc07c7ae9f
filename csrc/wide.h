// SPDX-License-Identifier: Apache-2.0
// The fast kernel on 512-bit vectors: 64 tokens of a slot, half a page, are one register of
// nibbles. Included inside the AVX-512 namespace, after lookup.h and values.h. Serves whole pages
// of consecutive positions; other pages take the kernel of lookup.h.
//
// The dot product wants one factor without sign, so points are stored with 128 added. What that
// adds to a sum depends on the query alone: it is found once per step by the same additions, and
// taken off. Sums may wrap on the way, their difference does not.
//
// Unpacking works inside 128-bit lanes: register i holds tokens 16 * L + 4 * i + j in word j of
// lane L. Query rows are laid out alike, so that a register of them is one load.

constexpr int kWideTokens = 64;
constexpr int kWideBytes = 64;
// Each half of a page is a tile, and both are added at once for two queries: every register of
// query rows serves twice, and those of two queries fit the first-level cache.
constexpr int kWideRows = kWideTokens;
constexpr int kWideQueries = 2;
constexpr int kWideRowBudget = 1 << 30;
constexpr uint8_t kBias = 128;

using Wide = __m512i;

inline Wide load_wide(const void* p) { return _mm512_loadu_si512(p); }

struct WideTable : QueryTable {
  bool is_wide = false;
  std::vector<uint8_t> query_rows;  // blocks of queries, units, [4, queries of the block, 64] bytes
  std::vector<int32_t> bias;        // blocks of queries, [4, queries of the block, 16]

  size_t wide_bytes() const { return units.size() * 4 * kWideBytes; }  // of one query
  const int32_t* bias_of(int first_query) const {
    return bias.data() + static_cast<size_t>(first_query) * kWideTokens;
  }
  const uint8_t* wide_rows(int first_query) const {
    // a load that crosses cache lines takes twice the time
    const auto start = reinterpret_cast<uintptr_t>(query_rows.data());
    const uint8_t* aligned = query_rows.data() + (kWideBytes - start % kWideBytes) % kWideBytes;
    return aligned + first_query * wide_bytes();
  }
};

// Doubles sums as often as a unit asks.
template <int NV>
inline void shift_sums(int times, Wide (&sum)[NV][4]) {
  if (times == 0) return;
  const __m128i count = _mm_cvtsi32_si128(times);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[v][i] = _mm512_sll_epi32(sum[v][i], count);
  }
}

template <int NV>
inline void clear_sums(Wide (&sum)[NV][4]) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[v][i] = _mm512_setzero_si512();
  }
}

// Adds products with the rows of NV queries, which lie `stride` bytes apart.
template <int NV>
SPHKV_INLINE void add_wide(const uint8_t* rows, int stride, const Wide (&low)[4],
                           const Wide (&high)[4], Wide (&low_sum)[NV][4],
                           Wide (&high_sum)[NV][4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      const Wide query = load_wide(rows + i * stride + v * kWideBytes);
      low_sum[v][i] = _mm512_dpbusd_epi32(low_sum[v][i], low[i], query);
      high_sum[v][i] = _mm512_dpbusd_epi32(high_sum[v][i], high[i], query);
    }
  }
}

// Points of both entries of a unit for 64 tokens: (x0, y0, x1, y1) in every word.
template <bool IS_HIGH>
SPHKV_INLINE void look_up_wide(const uint8_t* codes, const UnitOffsets& unit,
                               const uint8_t* turned, Wide (&out)[4]) {
  const Wide nibble = _mm512_set1_epi8(15);
  Wide code[2];
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
    code[k] = load_wide(codes + unit.codes[k]);
    if (IS_HIGH) code[k] = _mm512_srli_epi16(code[k], 4);
    code[k] = _mm512_and_si512(code[k], nibble);
  }
  Wide coordinate[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const Wide table = _mm512_broadcast_i32x4(load_bytes(turned + unit.points + k * kSlotLevels));
    coordinate[k] = _mm512_shuffle_epi8(table, code[k / 2]);
  }
  const Wide a = _mm512_unpacklo_epi8(coordinate[0], coordinate[1]);
  const Wide b = _mm512_unpacklo_epi8(coordinate[2], coordinate[3]);
  const Wide c = _mm512_unpackhi_epi8(coordinate[0], coordinate[1]);
  const Wide d = _mm512_unpackhi_epi8(coordinate[2], coordinate[3]);
  out[0] = _mm512_unpacklo_epi16(a, b);
  out[1] = _mm512_unpackhi_epi16(a, b);
  out[2] = _mm512_unpacklo_epi16(c, d);
  out[3] = _mm512_unpackhi_epi16(c, d);
}

// Registers of 4 * 4 words to tokens in order.
SPHKV_INLINE void store_wide(const Wide (&sum)[4], const int32_t* bias, int bias_stride,
                             float scale, float* logits) {
  __m512 part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Wide whole = _mm512_sub_epi32(sum[i], load_wide(bias + i * bias_stride));
    part[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(scale));
  }
  const __m512 a = _mm512_shuffle_f32x4(part[0], part[1], 0x88);  // lanes 0, 2 of each
  const __m512 b = _mm512_shuffle_f32x4(part[2], part[3], 0x88);
  const __m512 c = _mm512_shuffle_f32x4(part[0], part[1], 0xdd);  // lanes 1, 3
  const __m512 d = _mm512_shuffle_f32x4(part[2], part[3], 0xdd);
  const __m512 tokens[4] = {
      _mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(c, d, 0x88),
      _mm512_shuffle_f32x4(a, b, 0xdd), _mm512_shuffle_f32x4(c, d, 0xdd)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm512_storeu_ps(logits + 16 * i, tokens[i]);
}

struct WideArgs {
  const WideTable* table;
  const uint8_t* codes;      // of slot 0
  const uint8_t* turned[2];  // codebook at the base of either half
  int first_query;           // of its block
  int query;                 // within the block
  float* logits;             // of that query
};

template <int NV>
__attribute__((noinline)) void wide_logits(const WideArgs& args) {
  const WideTable& table = *args.table;
  const int size = table.block_size(args.first_query);
  const int stride = size * kWideBytes;
  const uint8_t* rows = table.wide_rows(args.first_query) + args.query * kWideBytes;
  Wide low_sum[NV][4], high_sum[NV][4];
  clear_sums<NV>(low_sum);
  clear_sums<NV>(high_sum);
  const UnitOffsets* unit = table.offsets.data();
  for (const UnitRun& run : table.runs) {
    shift_sums<NV>(run.shift, low_sum);
    shift_sums<NV>(run.shift, high_sum);
    for (const UnitOffsets* const end = unit + run.count; unit != end; ++unit) {
      Wide low[4], high[4];
      look_up_wide<false>(args.codes, *unit, args.turned[0], low);
      look_up_wide<true>(args.codes, *unit, args.turned[1], high);
      add_wide<NV>(rows, stride, low, high, low_sum, high_sum);
      rows += 4 * stride;
    }
  }
  const int first = args.first_query + args.query;
  const float* scale = table.scale.data() + first;
  const int32_t* bias = table.bias_of(args.first_query) + 16 * args.query;
#pragma GCC unroll 2
  for (int v = 0; v < NV; ++v) {
    float* logits = args.logits + v * kMaxPageTokens;
    store_wide(low_sum[v], bias + 16 * v, 16 * size, scale[v], logits);
    store_wide(high_sum[v], bias + 16 * v, 16 * size, scale[v], logits + kWideTokens);
  }
}

// Lays the rows of a table out for 512-bit loads and finds what the bias of points adds.
class WideFiller {
 public:
  explicit WideFiller(WideTable& table) : table_(table) {}

  void fill() {
    table_.query_rows.resize(table_.num_queries * table_.wide_bytes() + kWideBytes);
    table_.bias.resize(static_cast<size_t>(table_.num_queries) * kWideTokens);
    for (int first = 0; first < table_.num_queries; first += kQueryBlock) {
      fill_block(first);
      find_bias(first);
    }
  }

 private:
  WideTable& table_;

  void fill_block(int first) {
    const int size = table_.block_size(first);
    auto* out = const_cast<uint8_t*>(table_.wide_rows(first));
    const int8_t* in = table_.block(first);
    for (const Unit& unit : table_.units) {
      for (int i = 0; i < 4; ++i) {
        for (int v = 0; v < size; ++v, out += kWideBytes) {
          for (int lane = 0; lane < 4; ++lane) {
            const int quad = 4 * lane + i;
            const int8_t* from = in + (quad * size + v) * (unit.is_shared ? 4 : 16);
            if (unit.is_shared) {
              for (int j = 0; j < 4; ++j) std::memcpy(out + 16 * lane + 4 * j, from, 4);
            } else {
              std::memcpy(out + 16 * lane, from, 16);
            }
          }
        }
      }
      in += table_.unit_bytes(unit.is_shared) * size;
    }
  }

  void find_bias(int first) {
    const Wide all = _mm512_set1_epi8(static_cast<char>(kBias));
    const int size = table_.block_size(first);
    const uint8_t* rows = table_.wide_rows(first);
    int32_t* out = table_.bias.data() + static_cast<size_t>(first) * kWideTokens;
    for (int v = 0; v < size; ++v) {
      Wide sum[1][4];
      clear_sums<1>(sum);
      const uint8_t* at = rows + v * kWideBytes;
      for (const UnitRun& run : table_.runs) {
        shift_sums<1>(run.shift, sum);
        for (int u = 0; u < run.count; ++u) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i, at += size * kWideBytes) {
            sum[0][i] = _mm512_dpbusd_epi32(sum[0][i], all, load_wide(at));
          }
        }
      }
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + 16 * (i * size + v), sum[0][i]);
    }
  }
};

// Turns 16 points (x then y) and stores a byte of each coordinate. The sum starts at a number so
// large that a float's low bits are the rounded integer, and that has the bias in it.
inline void turn_wide(const float* points, float cosine, float sine, uint8_t* out) {
  const __m512 start = _mm512_set1_ps(12582912.0f + kBias);  // 1.5 * 2^23
  const __m512 x = _mm512_loadu_ps(points), y = _mm512_loadu_ps(points + kSlotLevels);
  const __m512 c = _mm512_set1_ps(cosine), s = _mm512_set1_ps(sine);
  const __m512 turned_x = _mm512_fnmadd_ps(y, s, _mm512_fmadd_ps(x, c, start));
  const __m512 turned_y = _mm512_fmadd_ps(y, c, _mm512_fmadd_ps(x, s, start));
  auto* bytes = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(bytes, _mm512_cvtepi32_epi8(_mm512_castps_si512(turned_x)));
  _mm_storeu_si128(bytes + 1, _mm512_cvtepi32_epi8(_mm512_castps_si512(turned_y)));
}

// turn_codebook of lookup.h, with the bias.
inline void turn_biased(const Codebook& codebook, int head, const WideTable& table, int64_t base,
                        Phases& phases, uint8_t* out) {
  move_phases(*codebook.rotary, base, phases);
  const float* cosine = phases.cosine.data();
  const float* sine = phases.sine.data();
  const int32_t* plane = table.turn_plane.data();
  const float* points = table.turn_points.data();
  int e = 0;
  for (; e < 2 * table.num_upper; ++e, points += 2 * kSlotLevels, out += 2 * kSlotLevels) {
    turn_wide(points, cosine[plane[e]], sine[plane[e]], out);
  }
  const float* scaled = codebook.heads[head].scaled.data();
  for (; e < 2 * static_cast<int>(table.tables.size()); ++e, out += 2 * kSlotLevels) {
    const int entry = table.tables[e / 2].entry[e % 2];
    if (entry < 0) {
      std::memset(out, kBias, 2 * kSlotLevels);
    } else {
      // in units of 1/256: what is stored is the low byte
      turn_wide(scaled + static_cast<size_t>(entry) * 2 * kSlotLevels, cosine[plane[e]],
                sine[plane[e]], out);
    }
  }
}

struct WideKernel {
  using Table = WideTable;
  using Scratch = LookupScratch;

  static void build(const PageKind& kind, int head, const float* planes, int queries,
                    Table& out) {
    out.is_wide = kind.layout.tokens == 2 * kWideTokens &&
                  kind.layout.mode == PositionMode::kContiguous;
    LookupKernel::build(kind, head, planes, queries, out,
                        out.is_wide ? kWideRowBudget : kRowBytesBudget,
                        out.is_wide ? kWideRows : kMaxRows);
    if (!out.is_wide) return;
    // upper bytes are all that is wanted of these
    for (Point& x : out.turn_points) x *= 1.0f / 256;
    WideFiller(out).fill();
  }

  static void logits(const uint8_t* page, const uint8_t* next, const PageKind& kind, int head,
                     const Table& table, Scratch& scratch) {
    if (!table.is_wide) {
      LookupKernel::logits(page, next, kind, head, table, scratch);
      return;
    }
    const PageLayout& layout = kind.layout;
    if (next != nullptr) prefetch<2>(next, layout.page_bytes);
    prefetch<3>(page + layout.value_offset, layout.page_bytes - layout.value_offset);
    const size_t turned_bytes = table.tables.size() * kTableBytes;
    scratch.turned.resize(2 * turned_bytes);
    WideArgs args{&table, page + layout.key_offset, {}, 0, 0, nullptr};
    for (int half = 0; half < 2; ++half) {
      uint8_t* turned = scratch.turned.data() + half * turned_bytes;
      turn_biased(*kind.codebook, head, table, scratch.position[0] + half * kWideTokens,
                  scratch.phases, turned);
      args.turned[half] = turned;
    }
    for (int v = 0; v < table.num_queries; v += kQueryBlock) {
      args.first_query = v;
      const int size = table.block_size(v);
      for (args.query = 0; args.query < size; args.query += kWideQueries) {
        args.logits =
            scratch.logits.data() + static_cast<size_t>(v + args.query) * kMaxPageTokens;
        args.query + 1 < size ? wide_logits<2>(args) : wide_logits<1>(args);
      }
    }
  }

  static void values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                     Scratch& scratch, float* out) {
    LookupKernel::values(page, kind, num_rows, dim, scratch, out);
  }
};
