// SPDX-License-Identifier: Apache-2.0
// Coded states back to coordinates, 16 keys or one value at a time. Included inside a variant's
// namespace, after softmax.h.

// Adds to 16 pairs of floats the entries of two tables of 16 that codes pick, times a unit.
inline void add_picked(const float* x, const float* y, const int32_t* codes, float unit,
                       float* out_x, float* out_y) {
#if defined(__AVX512F__)
  const __m512i index = _mm512_loadu_si512(codes);
  const __m512 scale = _mm512_set1_ps(unit);
  const __m512 px = _mm512_permutexvar_ps(index, _mm512_loadu_ps(x));
  const __m512 py = _mm512_permutexvar_ps(index, _mm512_loadu_ps(y));
  _mm512_storeu_ps(out_x, _mm512_fmadd_ps(px, scale, _mm512_loadu_ps(out_x)));
  _mm512_storeu_ps(out_y, _mm512_fmadd_ps(py, scale, _mm512_loadu_ps(out_y)));
#elif defined(__AVX2__)
  const __m256 scale = _mm256_set1_ps(unit);
  const auto add = [scale](const float* table, __m256i index, __m256 is_high, float* out) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    const __m256 picked = _mm256_blendv_ps(low, high, is_high);
    _mm256_storeu_ps(out, _mm256_fmadd_ps(picked, scale, _mm256_loadu_ps(out)));
  };
  for (int at = 0; at < kGroupTokens; at += 8) {
    const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at));
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    add(x, index, is_high, out_x + at);
    add(y, index, is_high, out_y + at);
  }
#else
  for (int i = 0; i < kGroupTokens; ++i) out_x[i] += unit * x[codes[i]];
  for (int i = 0; i < kGroupTokens; ++i) out_y[i] += unit * y[codes[i]];
#endif
}

// Directions of 16 states before rotation, [planes, 2, kGroupTokens]: fetch(slot, code) gives the
// codes of a slot.
template <class Fetch>
void look_up_points(const HeadCodebook& points, std::vector<float>& keys, const Fetch& fetch) {
  std::fill(keys.begin(), keys.end(), 0.0f);
  int32_t code[kGroupTokens];
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
      add_picked(x, x + kSlotLevels, code, entry.unit(), out, out + kGroupTokens);
    }
    x += 2 * kSlotLevels;
  }
}

// Where a token is in a stream of blocks of 32 / width tokens, four bytes per dimension: words of
// the block, and the shift in each of them.
struct WordPlace {
  size_t first;
  int shift;

  WordPlace(int dim, int width, int token) {
    // 32 / width tokens are 1 << log; a division would take longer than the rest
    const int log = width == 1 ? 5 : width == 2 ? 4 : width == 4 ? 3 : 2;
    first = static_cast<size_t>(token >> log) * dim;
    shift = 8 * (token & 3) + ((token & ((1 << log) - 1)) >> 2) * width;
  }
};

// Value codes of a token, times a scale after the midpoint is taken off.
inline void read_value_codes(const uint8_t* page, const PageLayout& layout, int dim, int token,
                             float scale, float* out) {
  const int bits = layout.value_bits, width = bits == 3 ? 2 : bits;
  const float middle = ((1 << bits) - 1) * 0.5f;
  const uint32_t mask = (1u << width) - 1;
  const WordPlace low(dim, width, token);
  const auto* words = reinterpret_cast<const uint32_t*>(page + layout.value_offset);
  const uint32_t* word = words + low.first;
  if (bits != 3) {
    for (int i = 0; i < dim; ++i) {
      const auto code = static_cast<int32_t>(word[i] >> low.shift & mask);
      out[i] = scale * (static_cast<float>(code) - middle);
    }
    return;
  }
  const WordPlace high(dim, 1, token);
  const uint32_t* top = words + static_cast<size_t>(layout.tokens) * dim / 16 + high.first;
  for (int i = 0; i < dim; ++i) {
    const uint32_t code = (word[i] >> low.shift & 3) | (top[i] >> high.shift & 1) << 2;
    out[i] = scale * (static_cast<float>(static_cast<int32_t>(code)) - middle);
  }
}
