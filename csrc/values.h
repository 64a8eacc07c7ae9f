// SPDX-License-Identifier: Apache-2.0
// Weighted sums of value codes by int8 dot products. Included inside a variant's namespace, after
// lookup.h.

// Weights are one part of 8 bits, or two of 7 where codes are so fine that 8 bits would show.
template <int PARTS>
constexpr float kWeightPeak = PARTS == 1 ? 255.0f : 127.0f * 128.0f;

constexpr int kPartBytes = kGroupTokens;
constexpr int kGroupBytes = kQueryBlock * 2 * kPartBytes;  // weights of a group, all rows of a block

inline uint8_t* row_weights(LookupScratch& scratch, int v) {
  return scratch.weights.data() +
         static_cast<size_t>(v / kQueryBlock) * kQueryBlock * 2 * kMaxPageTokens +
         v % kQueryBlock * 2 * kPartBytes;
}

// Rounds weights (times value step) with one scale per row and page; returns their sum.
template <int PARTS>
__attribute__((noinline)) float quantise_row(const float* weight, int padded, float inverse,
                                             uint8_t* out) {
  Floats sum{};
  for (int t = 0; t < padded; t += kGroupTokens, out += kGroupBytes) {
    int32_t whole[kGroupTokens];
    for (int i = 0; i < kGroupTokens; i += kLanes) {
      const Floats shifted = load_floats(weight + t + i) * inverse + 12582912.0f;
      sum += shifted - 12582912.0f;
      std::memcpy(whole + i, &shifted, sizeof shifted);
    }
    if (PARTS == 1) {
      for (int i = 0; i < kGroupTokens; ++i) out[i] = static_cast<uint8_t>(whole[i]);
    } else {
      for (int i = 0; i < kGroupTokens; ++i) {
        out[i] = static_cast<uint8_t>((whole[i] & 0x3fff) >> 7);
        out[kPartBytes + i] = static_cast<uint8_t>(whole[i] & 127);
      }
    }
  }
  return total(sum);
}

template <int PARTS>
void quantise_weights(int count, int num_rows, LookupScratch& scratch) {
  const int padded = padded_count(count);
  for (int v = 0; v < num_rows; ++v) {
    uint8_t* out = row_weights(scratch, v);
    const float peak = scratch.peak[v];
    const bool has_weight = peak >= std::numeric_limits<float>::min();
    scratch.weight_scale[v] = has_weight ? peak / kWeightPeak<PARTS> : 0.0f;
    scratch.weight_sum[v] = 0.0f;
    if (has_weight) {
      scratch.weight_sum[v] = quantise_row<PARTS>(
          scratch.logits.data() + static_cast<size_t>(v) * kMaxPageTokens, padded,
          kWeightPeak<PARTS> / peak, out);
    }
    // value codes are read 32 tokens at a time
    const int first = has_weight ? padded / kGroupTokens : 0;
    for (int group = first; group * kGroupTokens < count + kGroupTokens; ++group) {
      if (group < kMaxPageTokens / kGroupTokens) {
        std::memset(out + group * kGroupBytes, 0, 2 * kPartBytes);
      }
    }
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
template <int PARTS, int LANE, int NV, int ND>
inline void weigh_lane(Codes codes, const Weights (&weights)[NV][PARTS], int n,
                       Sums (&sum)[NV][ND][PARTS]) {
  for (int v = 0; v < NV; ++v) {
    for (int part = 0; part < PARTS; ++part) {
      sum[v][n][part] = weigh<PARTS, LANE>(sum[v][n][part], codes, weights[v][part]);
    }
  }
}

template <int BITS, int PARTS, int NV, int ND, bool IS_ODD>
inline void value_group(const ValueArgs& args, int pair, int first, const Codes (&bits)[ND],
                        Sums (&sum)[NV][ND][PARTS]) {
  const int group = 2 * pair + IS_ODD;
  Weights weights[NV][PARTS];
  for (int v = 0; v < NV; ++v) {
    for (int part = 0; part < PARTS; ++part) {
      weights[v][part] =
          load_weights(args.weights + group * kGroupBytes + (2 * v + part) * kPartBytes);
    }
  }
  for (int n = 0; n < ND; ++n) {
    Codes codes[4];
    unpack_codes<BITS, IS_ODD>(args.stream, bits[n], group, args.dim, first + n * kValueDims,
                               codes);
    weigh_lane<PARTS, 0>(codes[0], weights, n, sum);
    weigh_lane<PARTS, 1>(codes[1], weights, n, sum);
    weigh_lane<PARTS, 2>(codes[2], weights, n, sum);
    weigh_lane<PARTS, 3>(codes[3], weights, n, sum);
  }
}

// Sums of ND * kValueDims dimensions over the page for NV rows.
template <int BITS, int PARTS, int NV, int ND>
inline void value_block(const ValueArgs& args, int first) {
  Sums sum[NV][ND][PARTS];
  for (auto& row : sum) {
    for (auto& column : row) {
      for (auto& part : column) part = zero_sums();
    }
  }
  for (int pair = 0; pair < args.num_pairs; ++pair) {
    Codes bits[ND] = {};
    if constexpr (BITS == 3) {
      const uint8_t* top = args.top + (static_cast<size_t>(pair) * args.dim + first) * 4;
      for (int n = 0; n < ND; ++n) bits[n] = load_codes(top + n * kValueDims * 4);
    }
    value_group<BITS, PARTS, NV, ND, false>(args, pair, first, bits, sum);
    value_group<BITS, PARTS, NV, ND, true>(args, pair, first, bits, sum);
  }
  for (int v = 0; v < NV; ++v) {
    for (int n = 0; n < ND; ++n) {
      Sums joint = sum[v][n][0];
      if constexpr (PARTS == 2) joint = join_parts(joint, sum[v][n][1]);
      add_sums(args.out + static_cast<size_t>(v) * args.dim + first + n * kValueDims, joint,
               args.scale[v], args.middle[v]);
    }
  }
}

template <int BITS, int PARTS, int NV>
void value_rows(const ValueArgs& args) {
  // as many columns as leave registers for weights and codes
  constexpr int kColumns = NV * PARTS <= 4 ? 2 : 1;
  int first = 0;
  for (; first + kColumns * kValueDims <= args.dim; first += kColumns * kValueDims) {
    value_block<BITS, PARTS, NV, kColumns>(args, first);
  }
  for (; first < args.dim; first += kValueDims) value_block<BITS, PARTS, NV, 1>(args, first);
}

template <int BITS, int PARTS>
void all_value_rows(ValueArgs args, int count, int num_rows, LookupScratch& scratch) {
  // 8-bit codes are read as code - 128, so zero lies half a level below them
  constexpr float kMiddle = BITS == 8 ? -0.5f : ((1 << BITS) - 1) * 0.5f;
  quantise_weights<PARTS>(count, num_rows, scratch);
  float* out = args.out;
  for (int v = 0; v < num_rows; v += kQueryBlock) {
    float middle[kQueryBlock];
    const int take = std::min(kQueryBlock, num_rows - v);
    for (int i = 0; i < take; ++i) middle[i] = kMiddle * scratch.weight_sum[v + i];
    args.middle = middle;
    args.weights = row_weights(scratch, v);
    args.scale = scratch.weight_scale.data() + v;
    args.out = out + static_cast<size_t>(v) * args.dim;
    switch (take) {
      case 1: value_rows<BITS, PARTS, 1>(args); break;
      case 2: value_rows<BITS, PARTS, 2>(args); break;
      case 3: value_rows<BITS, PARTS, 3>(args); break;
      default: value_rows<BITS, PARTS, 4>(args); break;
    }
  }
}

inline void LookupKernel::values(const uint8_t* page, const PageKind& kind, int num_rows, int dim,
                                 Scratch& scratch, float* out) {
  const int count = header_of(page).count;
  ValueArgs args{};
  args.stream = page + kind.layout.value_offset;
  args.top = args.stream + static_cast<size_t>(kind.layout.tokens) * dim / 4;
  args.num_pairs = (count + 2 * kGroupTokens - 1) / (2 * kGroupTokens);
  args.dim = dim;
  args.out = out;
  switch (kind.layout.value_bits) {
    case 2: all_value_rows<2, 1>(args, count, num_rows, scratch); break;
    case 3: all_value_rows<3, 1>(args, count, num_rows, scratch); break;
    case 4: all_value_rows<4, 1>(args, count, num_rows, scratch); break;
    default: all_value_rows<8, 2>(args, count, num_rows, scratch); break;
  }
}
