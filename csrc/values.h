// SPDX-License-Identifier: Apache-2.0
// Weighted sums of value codes by int8 dot products. Included inside a variant's namespace, after
// lookup.h.

// Weights are one part of 8 bits, or two of 7 where codes are so fine that 8 bits would show.
template <int PARTS>
constexpr float kWeightPeak = PARTS == 1 ? 255.0f : 127.0f * 128.0f;

constexpr int kPartBytes = kGroupTokens;
constexpr int kGroupBytes = kQueryBlock * 2 * kPartBytes;  // weights of a group, a block's rows

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

// Codes of 16 tokens and kValueDims dimensions, on their way to four registers of bytes.
struct Unpacking {
  Codes word[4];  // as stored: one register for 2 and 3 bits, two for 4, four for 8
  Codes bits;     // top bits of 32 tokens of three-bit codes
  Codes top, low;
  Codes codes[4];
};

template <int BITS>
constexpr int kWords = BITS == 3 ? 1 : BITS / 2;

template <int BITS, bool IS_ODD>
SPHKV_INLINE void start_unpacking(const ValueArgs& args, int pair, int first, Unpacking& s) {
  const size_t row_bytes = static_cast<size_t>(args.dim) * 4;
  const uint8_t* at = args.stream + (2 * pair + IS_ODD) * row_bytes * kWords<BITS> + first * 4;
#pragma GCC unroll 4
  for (int i = 0; i < kWords<BITS>; ++i) s.word[i] = load_codes(at + i * row_bytes);
  if constexpr (BITS == 3) s.bits = load_codes(args.top + pair * row_bytes + first * 4);
}

constexpr int kUnpackOps = 4;  // of one lane

// One operation of unpacking lane LANE (four tokens); spread between dot products.
template <int OP, int LANE, int BITS, bool IS_ODD>
SPHKV_INLINE void unpack_op(Unpacking& s) {
  if constexpr (BITS == 3) {
    // bit LANE of this half of the top bits moves to bit 2, above the two low bits
    constexpr int kBit = LANE + 4 * IS_ODD;
    if constexpr (OP == 0 && kBit < 2) s.top = shift_up<(2 - kBit) & 7>(s.bits);
    if constexpr (OP == 0 && kBit >= 2) s.top = shift_right<(kBit - 2) & 7>(s.bits);
    if constexpr (OP == 1) s.low = shift_right<2 * LANE>(s.word[0]);
    if constexpr (OP == 2) s.low = select(4, s.top, s.low);
    if constexpr (OP == 3) s.codes[LANE] = pin(and_mask(s.low, 7));
  } else if constexpr (BITS == 2) {
    if constexpr (OP == 1) s.low = shift_right<2 * LANE>(s.word[0]);
    if constexpr (OP == 3) s.codes[LANE] = LANE == 3 ? s.low : pin(and_mask(s.low, 3));
  } else if constexpr (BITS == 4) {
    if constexpr (OP == 1 && LANE % 2 == 0) s.codes[LANE] = pin(and_mask(s.word[LANE / 2], 15));
    if constexpr (OP == 1 && LANE % 2 == 1) s.codes[LANE] = pin(shift_right<4>(s.word[LANE / 2]));
  } else {
    if constexpr (OP == 1) s.codes[LANE] = pin(flip_sign(s.word[LANE]));
  }
}

template <int FIRST, int LAST, int LANE, int BITS, bool IS_ODD>
SPHKV_INLINE void unpack_ops(Unpacking& s) {
  if constexpr (FIRST < LAST) {
    unpack_op<FIRST, LANE, BITS, IS_ODD>(s);
    unpack_ops<FIRST + 1, LAST, LANE, BITS, IS_ODD>(s);
  }
}

// Adds lane by lane, all rows in turn, and unpacks the next group meanwhile.
template <int DOT, int BITS, int PARTS, int NV, bool IS_NEXT_ODD>
SPHKV_INLINE void weigh_group(const Weights (&weights)[NV][PARTS], const Unpacking& now,
                              Unpacking& next, Sums (&sum)[NV][PARTS]) {
  constexpr int kLaneDots = NV * PARTS;
  if constexpr (DOT < 4 * kLaneDots) {
    constexpr int kLane = DOT / kLaneDots, k = DOT % kLaneDots, v = k / PARTS, part = k % PARTS;
    sum[v][part] = pin(weigh<PARTS, kLane>(sum[v][part], now.codes[kLane], weights[v][part]));
    unpack_ops<k * kUnpackOps / kLaneDots, (k + 1) * kUnpackOps / kLaneDots, kLane, BITS,
               IS_NEXT_ODD>(next);
    weigh_group<DOT + 1, BITS, PARTS, NV, IS_NEXT_ODD>(weights, now, next, sum);
  }
}

template <int PARTS, int NV>
SPHKV_INLINE void load_group_weights(const ValueArgs& args, int group,
                                     Weights (&out)[NV][PARTS]) {
  const uint8_t* at = args.weights + group * kGroupBytes;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
      out[v][part] = load_weights(at + (2 * v + part) * kPartBytes);
    }
  }
}

// Sums of kValueDims dimensions over the page for NV rows. `even` holds the first group's codes,
// and those of dimension `next` on return.
template <int BITS, int PARTS, int NV>
SPHKV_INLINE void value_block(const ValueArgs& args, int first, int next, Unpacking& even) {
  Sums sum[NV][PARTS];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) sum[v][part] = zero_sums();
  }
  Unpacking odd;
  const int last = args.num_pairs - 1;
  for (int pair = 0; pair <= last; ++pair) {
    Weights weights[NV][PARTS];
    load_group_weights<PARTS, NV>(args, 2 * pair, weights);
    start_unpacking<BITS, true>(args, pair, first, odd);
    weigh_group<0, BITS, PARTS, NV, true>(weights, even, odd, sum);
    load_group_weights<PARTS, NV>(args, 2 * pair + 1, weights);
    const bool is_last = pair == last;
    start_unpacking<BITS, false>(args, is_last ? 0 : pair + 1, is_last ? next : first, even);
    weigh_group<0, BITS, PARTS, NV, false>(weights, odd, even, sum);
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    Sums joint = sum[v][0];
    if constexpr (PARTS == 2) joint = join_parts(joint, sum[v][1]);
    add_sums(args.out + static_cast<size_t>(v) * args.dim + first, joint, args.scale[v],
             args.middle[v]);
  }
}

template <int BITS, int PARTS, int NV>
__attribute__((noinline)) void value_rows(const ValueArgs& shared) {
  const ValueArgs args = shared;  // the compiler must not fear that sums overwrite it
  Unpacking even;
  start_unpacking<BITS, false>(args, 0, 0, even);
  unpack_ops<0, kUnpackOps, 0, BITS, false>(even);
  unpack_ops<0, kUnpackOps, 1, BITS, false>(even);
  unpack_ops<0, kUnpackOps, 2, BITS, false>(even);
  unpack_ops<0, kUnpackOps, 3, BITS, false>(even);
  for (int first = 0; first < args.dim; first += kValueDims) {
    // after the last dimensions the first are unpacked once more, for nothing
    const int next = first + kValueDims < args.dim ? first + kValueDims : 0;
    value_block<BITS, PARTS, NV>(args, first, next, even);
  }
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
