// SPDX-License-Identifier: Apache-2.0
// Weighted sums of value codes by int8 dot products. Included inside a variant's namespace, after
// lookup.h.

// Softmax weight times value step as two 7-bit parts with one scale per row and page.
inline void quantise_weights(int count, int num_rows, LookupScratch& scratch) {
  // value codes are read 32 tokens at a time
  const int padded = padded_count(count);
  const int cleared = (count + 2 * kGroupTokens - 1) / (2 * kGroupTokens) * 2 * kGroupTokens;
  for (int v = 0; v < num_rows; ++v) {
    uint8_t* high = scratch.weights.data() + static_cast<size_t>(v) * 2 * kMaxPageTokens;
    uint8_t* low = high + kMaxPageTokens;
    scratch.weight_scale[v] = 0.0f;
    scratch.weight_sum[v] = 0.0f;
    const float* weight = scratch.logits.data() + static_cast<size_t>(v) * kMaxPageTokens;
    const float peak = scratch.peak[v];
    if (peak < std::numeric_limits<float>::min()) {
      std::memset(high, 0, cleared);
      std::memset(low, 0, cleared);
      continue;
    }
    const float inverse = kWeightPeak / peak;
    int32_t sum = 0;
    for (int t = 0; t < padded; ++t) {
      const int32_t whole = static_cast<int32_t>(weight[t] * inverse + 0.5f);
      high[t] = static_cast<uint8_t>(whole >> 7);
      low[t] = static_cast<uint8_t>(whole & 127);
      sum += whole;
    }
    std::memset(high + padded, 0, cleared - padded);
    std::memset(low + padded, 0, cleared - padded);
    scratch.weight_scale[v] = peak / kWeightPeak;
    scratch.weight_sum[v] = static_cast<float>(sum);
  }
}

// Codes of 16 tokens and kValueDims dimensions as four registers of bytes. `bits` holds the top
// bits of 32 tokens of three-bit codes; IS_ODD: of these, the second 16 are wanted.
template <int BITS, bool IS_ODD>
inline void unpack_codes(const uint8_t* stream, Codes bits, int group, int dim, int first,
                         Codes out[4]) {
  const size_t row_bytes = static_cast<size_t>(dim) * 4;
  const uint8_t* at = stream + group * row_bytes * BITS / (BITS == 3 ? 3 : 2) + first * 4;
  if constexpr (BITS == 2) {
    const Codes word = load_codes(at);
    out[0] = and_mask(word, 3);
    out[1] = and_mask(shift_right<2>(word), 3);
    out[2] = and_mask(shift_right<4>(word), 3);
    out[3] = shift_right<6>(word);
  } else if constexpr (BITS == 3) {
    const Codes word = load_codes(at);
    // bit m of this half moves to bit 2, above the two low bits
    Codes top[4];
    if constexpr (IS_ODD) {
      top[0] = shift_right<2>(bits);
      top[1] = shift_right<3>(bits);
      top[2] = shift_right<4>(bits);
      top[3] = shift_right<5>(bits);
    } else {
      top[0] = shift_up<2>(bits);
      top[1] = shift_up<1>(bits);
      top[2] = bits;
      top[3] = shift_right<1>(bits);
    }
    out[0] = and_mask(select(4, top[0], word), 7);
    out[1] = and_mask(select(4, top[1], shift_right<2>(word)), 7);
    out[2] = and_mask(select(4, top[2], shift_right<4>(word)), 7);
    out[3] = and_mask(select(4, top[3], shift_right<6>(word)), 7);
  } else if constexpr (BITS == 4) {
    const Codes a = load_codes(at), b = load_codes(at + row_bytes);
    out[0] = and_mask(a, 15);
    out[1] = shift_right<4>(a);
    out[2] = and_mask(b, 15);
    out[3] = shift_right<4>(b);
  } else {
    for (int m = 0; m < 4; ++m) out[m] = flip_sign(load_codes(at + m * row_bytes));
  }
}

struct ValueArgs {
  const uint8_t* stream;
  const uint8_t* top;      // 1-bit stream of three-bit codes
  int num_pairs;           // of groups
  int dim;
  const uint8_t* weights;  // of the first row
  const float* scale;
  const float* middle;     // [NV] what the midpoint takes off
  float* out;
};

// One lane for all rows in turn, so that no sum waits for itself.
template <int LANE, int NV, int ND>
inline void weigh_lane(Codes codes, const Weights (&upper)[NV], const Weights (&lower)[NV], int n,
                       Sums (&high)[NV][ND], Sums (&low)[NV][ND]) {
  for (int v = 0; v < NV; ++v) {
    high[v][n] = weigh<LANE>(high[v][n], codes, upper[v]);
    low[v][n] = weigh<LANE>(low[v][n], codes, lower[v]);
  }
}

template <int BITS, int NV, int ND, bool IS_ODD>
inline void value_group(const ValueArgs& args, int pair, int first, const Codes bits[ND],
                        Sums (&high)[NV][ND], Sums (&low)[NV][ND]) {
  const int group = 2 * pair + IS_ODD;
  for (int n = 0; n < ND; ++n) {
    Codes codes[4];
    unpack_codes<BITS, IS_ODD>(args.stream, bits[n], group, args.dim, first + n * kValueDims,
                               codes);
    Weights upper[NV], lower[NV];
    for (int v = 0; v < NV; ++v) {
      const uint8_t* at = args.weights + v * 2 * kMaxPageTokens + group * kGroupTokens;
      upper[v] = load_weights(at);
      lower[v] = load_weights(at + kMaxPageTokens);
    }
    weigh_lane<0>(codes[0], upper, lower, n, high, low);
    weigh_lane<1>(codes[1], upper, lower, n, high, low);
    weigh_lane<2>(codes[2], upper, lower, n, high, low);
    weigh_lane<3>(codes[3], upper, lower, n, high, low);
  }
}

template <int BITS, int NV, int ND>
inline void value_block(const ValueArgs& args, int first) {
  Sums high[NV][ND], low[NV][ND];
  for (int v = 0; v < NV; ++v) {
    for (int n = 0; n < ND; ++n) high[v][n] = low[v][n] = zero_sums();
  }
  for (int pair = 0; pair < args.num_pairs; ++pair) {
    Codes bits[ND] = {};
    if constexpr (BITS == 3) {
      const uint8_t* top = args.top + (static_cast<size_t>(pair) * args.dim + first) * 4;
      for (int n = 0; n < ND; ++n) bits[n] = load_codes(top + n * kValueDims * 4);
    }
    value_group<BITS, NV, ND, false>(args, pair, first, bits, high, low);
    value_group<BITS, NV, ND, true>(args, pair, first, bits, high, low);
  }
  for (int v = 0; v < NV; ++v) {
    for (int n = 0; n < ND; ++n) {
      add_sums(args.out + static_cast<size_t>(v) * args.dim + first + n * kValueDims, high[v][n],
               low[v][n], args.scale[v], args.middle[v]);
    }
  }
}

template <int BITS, int NV>
void value_rows(const ValueArgs& args) {
  int first = 0;
  if constexpr (NV <= 2) {  // more rows would not leave registers for a second column
    for (; first + 2 * kValueDims <= args.dim; first += 2 * kValueDims) {
      value_block<BITS, NV, 2>(args, first);
    }
  }
  for (; first < args.dim; first += kValueDims) value_block<BITS, NV, 1>(args, first);
}

template <int BITS>
void all_value_rows(ValueArgs args, int num_rows, const float* weight_sum) {
  // 8-bit codes are read as code - 128, so zero lies half a level below them
  constexpr float kMiddle = BITS == 8 ? -0.5f : ((1 << BITS) - 1) * 0.5f;
  for (int v = 0; v < num_rows;) {
    float middle[kQueryBlock];
    const int left = num_rows - v;
    const int take = left == kQueryBlock + 1 ? kQueryBlock - 1 : std::min(left, kQueryBlock);
    for (int i = 0; i < take; ++i) middle[i] = kMiddle * weight_sum[v + i];
    args.middle = middle;
    switch (take) {
      case 1: value_rows<BITS, 1>(args); break;
      case 2: value_rows<BITS, 2>(args); break;
      case 3: value_rows<BITS, 3>(args); break;
      default: value_rows<BITS, 4>(args); break;
    }
    v += take;
    args.weights += static_cast<size_t>(take) * 2 * kMaxPageTokens;
    args.scale += take;
    args.out += static_cast<size_t>(take) * args.dim;
  }
}

inline void LookupKernel::values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                                 Scratch& scratch, float* out) {
  const int count = header_of(page).count;
  quantise_weights(count, num_rows, scratch);
  ValueArgs args{};
  args.stream = page + kind.layout.value_offset;
  args.top = args.stream + static_cast<size_t>(kind.layout.tokens) * dim / 4;
  args.num_pairs = (count + 2 * kGroupTokens - 1) / (2 * kGroupTokens);
  args.dim = dim;
  args.weights = scratch.weights.data();
  args.scale = scratch.weight_scale.data();
  args.out = out;
  const float* sums = scratch.weight_sum.data();
  switch (kind.layout.value_bits) {
    case 2: all_value_rows<2>(args, num_rows, sums); break;
    case 3: all_value_rows<3>(args, num_rows, sums); break;
    case 4: all_value_rows<4>(args, num_rows, sums); break;
    default: all_value_rows<8>(args, num_rows, sums); break;
  }
}
