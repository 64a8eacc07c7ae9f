// SPDX-License-Identifier: Apache-2.0
// One page of a Recoding. Included inside a variant's namespace, after phases.h, dense.h, search.h.

struct RecodeScratch {
  std::vector<float> keys;     // [planes, 2, kMaxPageTokens] unit keys before rotary embedding
  std::vector<float> group;    // [planes, 2, kGroupTokens] coded directions of a few states
  std::vector<float> values;   // [kMaxPageTokens, dim] rotated
  std::vector<int32_t> stage;  // [planes, 3] entries that code a plane, -1 for none
  Phases phases;
  int32_t position[kMaxPageTokens];
  float norm[kMaxPageTokens];  // of keys
  float cosine[kMaxPageTokens], square[kMaxPageTokens];  // of the new codes
};

// States of the new page that follow one another there and come from pages of one kind.
struct Segment {
  const PageKind* kind;
  int first, count;  // up to kGroupTokens
  const uint8_t* page[kGroupTokens];
  int token[kGroupTokens];
};

class PageRecoder {
 public:
  PageRecoder(const Recoding& job, int row, RecodeScratch& scratch)
      : job_(job), scratch_(scratch), head_(static_cast<int>(job.head[row])),
        layer_(head_ / job.num_heads), target_(job.targets[layer_]),
        planes_(target_.codebook->rotary->num_planes), dim_(job.head_dim),
        first_(static_cast<size_t>(row) * target_.layout.tokens),
        page_(job.pages + static_cast<size_t>(row) * target_.layout.page_bytes),
        count_(header_of(page_).count) {
    scratch.keys.assign(static_cast<size_t>(planes_) * 2 * kMaxPageTokens, 0.0f);
    scratch.group.resize(static_cast<size_t>(planes_) * 2 * kGroupTokens);
    scratch.values.resize(static_cast<size_t>(kMaxPageTokens) * dim_);
    read_positions(page_, target_.layout, scratch.position);
  }

  void run() {
    if (job_.pick == nullptr) {
      read_states();
    } else {
      read_pages();
    }
    if (!is_finite_) {
      // whoever asked for the page looks here
      header().radius_lo = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    encode_keys();
    encode_values();
  }

 private:
  const Recoding& job_;
  RecodeScratch& scratch_;
  const int head_, layer_;
  const PageKind& target_;
  const int planes_, dim_;
  const size_t first_;  // of the states or picks of this page
  uint8_t* page_;
  const int count_;
  bool is_finite_ = true;  // whether norms of keys and rotated values are numbers

  PageHeader& header() { return *reinterpret_cast<PageHeader*>(page_); }
  int local_head() const { return head_ % job_.num_heads; }

  int64_t pick(int t) const { return job_.pick[first_ + t]; }

  const PageKind* kind_at(int t) const {
    const int64_t kind = job_.kind[pick(t) / kMaxPageTokens];
    return &job_.sources[kind * job_.targets.size() + layer_];
  }

  Segment next_segment(int first) const {
    Segment out{kind_at(first), first, 0, {}, {}};
    const int most = std::min(kGroupTokens, count_ - first);
    while (out.count < most && kind_at(first + out.count) == out.kind) {
      const int64_t at = pick(first + out.count);
      out.page[out.count] = reinterpret_cast<const uint8_t*>(job_.address[at / kMaxPageTokens]);
      out.token[out.count++] = static_cast<int>(at % kMaxPageTokens);
    }
    return out;
  }

  void read_states() {
    for (int t = 0; t < count_; ++t) {
      const float* key = job_.keys + (first_ + t) * dim_;
      read_dense_key(t, [key](int d) { return key[d]; });
      float* value = scratch_.values.data() + static_cast<size_t>(t) * dim_;
      std::copy_n(job_.values + (first_ + t) * dim_, dim_, value);
      rotate_value(value);
    }
  }

  void read_pages() {
    Segment segment;
    for (int first = 0; first < count_; first += segment.count) {
      segment = next_segment(first);
      if (segment.kind->codebook != nullptr) {
        read_keys(segment);
      } else {
        for (int i = 0; i < segment.count; ++i) read_dense_key(segment, i);
      }
      for (int i = 0; i < segment.count; ++i) read_value(segment, i);
    }
  }

  // Unit keys of a segment of coded states.
  void read_keys(const Segment& segment) {
    const PageLayout& layout = segment.kind->layout;
    const int half = layout.slot_stride(), last = segment.count - 1;
    const uint8_t* at[kGroupTokens] = {};
    int shift[kGroupTokens];
    for (int i = 0; i < kGroupTokens; ++i) {
      const int from = std::min(i, last);  // slack repeats the last state
      const bool is_low = segment.token[from] < half;
      at[i] = segment.page[from] + layout.key_offset + segment.token[from] - (is_low ? 0 : half);
      shift[i] = is_low ? 0 : 4;
    }
    const bool is_run = last == kGroupTokens - 1 && at[last] == at[0] + last &&
                        shift[last] == shift[0] && segment.page[last] == segment.page[0];
    const HeadCodebook& points = segment.kind->codebook->heads[local_head()];
    look_up_points(points, scratch_.group, [&](int slot, int32_t* code) {
      const size_t place = static_cast<size_t>(slot) * half;
      if (is_run) {
        const uint8_t* from = at[0] + place;
        for (int i = 0; i < kGroupTokens; ++i) code[i] = from[i] >> shift[0] & 15;
      } else {
        for (int i = 0; i < kGroupTokens; ++i) code[i] = at[i][place] >> shift[i] & 15;
      }
    });
    float square[kGroupTokens] = {}, scale[kGroupTokens];
    for (int i = 0; i < 2 * planes_; ++i) {
      const float* part = scratch_.group.data() + i * kGroupTokens;
      for (int t = 0; t < kGroupTokens; ++t) square[t] += part[t] * part[t];
    }
    for (int i = 0; i < segment.count; ++i) {
      const PageHeader& source = header_of(segment.page[i]);
      const uint8_t code = segment.page[i][layout.radius_offset + segment.token[i]];
      const float radius = Affine{source.radius_lo, source.radius_step}.at(code);
      const float norm = std::fabs(radius) * std::sqrt(square[i]);
      scratch_.norm[segment.first + i] = norm;
      scale[i] = radius / std::max(norm, std::numeric_limits<float>::min());
    }
    for (int i = 0; i < 2 * planes_; ++i) {
      const float* part = scratch_.group.data() + i * kGroupTokens;
      float* out = scratch_.keys.data() + static_cast<size_t>(i) * kMaxPageTokens + segment.first;
      for (int t = 0; t < segment.count; ++t) out[t] = part[t] * scale[t];
    }
  }

  void read_dense_key(const Segment& segment, int i) {
    const auto* key = reinterpret_cast<const uint16_t*>(segment.page[i] +
                                                        segment.kind->layout.key_offset) +
                      static_cast<size_t>(segment.token[i]) * dim_;
    read_dense_key(segment.first + i, [key](int d) { return from_bfloat16(key[d]); });
  }

  // A dense key is after rotary embedding: it is turned back. element(d) gives its elements.
  template <class Element>
  void read_dense_key(int t, const Element& element) {
    const Rotary& rotary = *target_.codebook->rotary;
    float square = 0.0f;
    for (int d = 0; d < dim_; ++d) square += element(d) * element(d);
    const float norm = std::sqrt(square);
    const float scale = 1.0f / std::max(norm, std::numeric_limits<float>::min());
    scratch_.norm[t] = norm;
    is_finite_ = is_finite_ && std::isfinite(norm);
    base_phases(rotary, scratch_.position[t], scratch_.phases);
    for (int plane = 0; plane < planes_; ++plane) {
      const float c = scratch_.phases.cosine[plane], s = scratch_.phases.sine[plane];
      const float x = scale * element(rotary.channel[2 * plane]);
      const float y = scale * element(rotary.channel[2 * plane + 1]);
      float* out = scratch_.keys.data() + static_cast<size_t>(plane) * 2 * kMaxPageTokens + t;
      out[0] = x * c + y * s;
      out[kMaxPageTokens] = y * c - x * s;
    }
  }

  void read_value(const Segment& segment, int i) {
    const PageLayout& layout = segment.kind->layout;
    const uint8_t* page = segment.page[i];
    const int token = segment.token[i];
    float* out = scratch_.values.data() + static_cast<size_t>(segment.first + i) * dim_;
    if (segment.kind->has_value_codes()) {
      const PageHeader& source = header_of(page);
      const Affine affine{source.scale_lo, source.scale_step};
      const float scale = affine.at(page[layout.scale_offset + token]);
      read_value_codes(page, layout, dim_, token, scale, out);
      return;
    }
    const auto* value = reinterpret_cast<const uint16_t*>(page + layout.value_offset) +
                        static_cast<size_t>(token) * dim_;
    for (int d = 0; d < dim_; ++d) out[d] = from_bfloat16(value[d]);
    rotate_value(out);
  }

  // The rotation is its own inverse. Sums of finite elements may still be too large.
  void rotate_value(float* x) {
    unrotate(x, dim_);
    float none = 0.0f;
    for (int d = 0; d < dim_; ++d) none += x[d] - x[d];
    is_finite_ = is_finite_ && none == 0.0f;
  }

  void encode_keys() {
    const HeadCodebook& points = target_.codebook->heads[local_head()];
    list_stages(points);
    std::fill_n(scratch_.cosine, kMaxPageTokens, 0.0f);
    std::fill_n(scratch_.square, kMaxPageTokens, 0.0f);
    const float* root = job_.metric_root + static_cast<size_t>(head_) * planes_ * 4;
    for (int plane = 0; plane < planes_; ++plane) {
      PlaneSearch search(root + 4 * plane);
      for (int i = 0; i < 3 && scratch_.stage[3 * plane + i] >= 0; ++i) {
        const int e = scratch_.stage[3 * plane + i];
        const Entry& entry = points.entries[e];
        const float* x = points.scaled.data() + static_cast<size_t>(e) * 2 * kSlotLevels;
        // the second plane of a pair steps its code by four
        const bool is_second = entry.is_paired && !entry.is_pair_first;
        search.add(entry.slot, is_second ? 2 : 0, entry.is_paired ? kPairLevels : kSlotLevels, x,
                   x + kSlotLevels, is_second ? kPairLevels : 1, entry.unit());
      }
      if (search.num_stages() > 0) encode_plane(plane, search);
    }
    add_constants(points);
    float radius[kMaxPageTokens] = {};
    for (int t = 0; t < count_; ++t) {
      // as sphkv/codec/keys.py: the norm is kept where the code points away
      const float length = std::sqrt(scratch_.square[t]), cosine = scratch_.cosine[t];
      const float gain = cosine > 0.2f * length ? 1.0f / cosine : 1.0f / std::max(length, 1e-6f);
      radius[t] = scratch_.norm[t] * gain;
    }
    const Affine affine = quantise(radius, count_, page_ + target_.layout.radius_offset);
    header().radius_lo = affine.low;
    header().radius_step = affine.width;
  }

  // Entries of every plane, in the order of their slots.
  void list_stages(const HeadCodebook& points) {
    scratch_.stage.assign(static_cast<size_t>(planes_) * 3, -1);
    for (size_t e = 0; e < points.entries.size(); ++e) {
      if (points.entries[e].slot < 0) continue;
      int32_t* own = scratch_.stage.data() + 3 * points.entries[e].plane;
      while (*own >= 0) ++own;
      *own = static_cast<int32_t>(e);
    }
  }

  void encode_plane(int plane, const PlaneSearch& search) {
    const int half = target_.layout.slot_stride();
    const float* x = scratch_.keys.data() + static_cast<size_t>(plane) * 2 * kMaxPageTokens;
    for (int first = 0; first < count_; first += kSearchTokens) {
      PlaneTokens unit, coded;
      std::memcpy(unit.x, x + first, sizeof unit.x);
      std::memcpy(unit.y, x + kMaxPageTokens + first, sizeof unit.y);
      int32_t index[3][kSearchTokens];
      search.find(unit, index, coded);
      for (int i = 0; i < search.num_stages(); ++i) {
        // codes of slack are zero
        for (int t = count_ - first; t < kSearchTokens; ++t) index[i][t] = 0;
        const size_t slot = static_cast<size_t>(search.stage(i).slot) * half;
        // the tokens of a group lie in one half of a page
        for (int at = 0; at < kSearchTokens && first + at < count_; at += kGroupTokens) {
          const bool is_low = first + at < half;
          const int shift = search.stage(i).shift + (is_low ? 0 : 4);
          const int place = first + at - (is_low ? 0 : half);
          uint8_t* out = page_ + target_.layout.key_offset + slot + place;
          for (int t = 0; t < kGroupTokens; ++t) {
            out[t] = static_cast<uint8_t>(out[t] | index[i][at + t] << shift);
          }
        }
      }
      for (int t = 0; t < kSearchTokens; ++t) {
        scratch_.cosine[first + t] += unit.x[t] * coded.x[t] + unit.y[t] * coded.y[t];
        scratch_.square[first + t] += coded.x[t] * coded.x[t] + coded.y[t] * coded.y[t];
      }
    }
  }

  void add_constants(const HeadCodebook& points) {
    for (size_t e = 0; e < points.entries.size(); ++e) {
      const Entry& entry = points.entries[e];
      if (entry.slot >= 0) continue;
      const float* scaled = points.scaled.data() + e * 2 * kSlotLevels;
      const float px = scaled[0] * entry.unit(), py = scaled[kSlotLevels] * entry.unit();
      const float* x = scratch_.keys.data() + static_cast<size_t>(entry.plane) * 2 * kMaxPageTokens;
      for (int t = 0; t < count_; ++t) {
        scratch_.cosine[t] += x[t] * px + x[kMaxPageTokens + t] * py;
        scratch_.square[t] += px * px + py * py;
      }
    }
  }

  void encode_values() {
    const PageLayout& layout = target_.layout;
    const int bits = layout.value_bits;
    float step[kMaxPageTokens] = {}, inverse[kMaxPageTokens];
    for (int t = 0; t < count_; ++t) {
      float* value = scratch_.values.data() + static_cast<size_t>(t) * dim_;
      const float peak = largest_size(value, dim_);
      inverse[t] = inverse_or_zero(peak);
      for (int d = 0; d < dim_; ++d) value[d] *= inverse[t];
      step[t] = peak * fit_step(value, dim_, bits, job_.rule.clips, job_.rule.num_refinements);
    }
    uint8_t* scale_code = page_ + layout.scale_offset;
    const Affine affine = quantise(step, count_, scale_code);
    header().scale_lo = affine.low * job_.rule.gain;
    header().scale_step = affine.width * job_.rule.gain;
    const auto half = static_cast<float>(1 << (bits - 1));
    for (int t = 0; t < count_; ++t) {
      const float* value = scratch_.values.data() + static_cast<size_t>(t) * dim_;
      const int code = best_scale(value, dim_, half, affine, inverse[t], job_.rule.coarse,
                                  scale_code[t]);
      scale_code[t] = static_cast<uint8_t>(code);
      write_value(value, t, inverse_or_zero(affine.at(code) * inverse[t]));
    }
  }

  // Codes of a value, in streams as sphkv/codec/packing.py lays them out.
  void write_value(const float* value, int token, float inverse_step) {
    const int bits = target_.layout.value_bits, dim = dim_;
    const auto half = static_cast<float>(1 << (bits - 1));
    const WordPlace low(dim, bits == 3 ? 2 : bits, token), high(dim, 1, token);
    const int shift = low.shift, top_shift = high.shift;
    auto* words = reinterpret_cast<uint32_t*>(page_ + target_.layout.value_offset);
    uint32_t* __restrict word = words + low.first;
    const auto code_of = [=](float x) {
      return static_cast<int32_t>(snap(x * inverse_step, half) + (half - 0.5f));
    };
    if (bits != 3) {
      for (int d = 0; d < dim; ++d) word[d] |= static_cast<uint32_t>(code_of(value[d])) << shift;
      return;
    }
    uint32_t* __restrict top =
        words + static_cast<size_t>(target_.layout.tokens) * dim / 16 + high.first;
    for (int d = 0; d < dim; ++d) {
      const auto code = static_cast<uint32_t>(code_of(value[d]));
      word[d] |= (code & 3) << shift;
      top[d] |= code >> 2 << top_shift;
    }
  }

  static float largest_size(const float* x, int dim) {
    float ways[kWays] = {};
    int i = 0;
    for (; i + kWays <= dim; i += kWays) {
      for (int j = 0; j < kWays; ++j) ways[j] = std::max(ways[j], std::fabs(x[i + j]));
    }
    for (; i < dim; ++i) ways[0] = std::max(ways[0], std::fabs(x[i]));
    for (int j = 1; j < kWays; ++j) ways[0] = std::max(ways[0], ways[j]);
    return ways[0];
  }

  // Codes of scalars between the least and the largest; as sphkv/codec/affine.py.
  static Affine quantise(const float* x, int count, uint8_t* code) {
    float least = x[0], most = x[0];
    for (int t = 1; t < count; ++t) {
      least = std::min(least, x[t]);
      most = std::max(most, x[t]);
    }
    const double low = least, high = most;
    const Affine out{static_cast<float>(low), static_cast<float>((high - low) / kMaxCode)};
    const double inverse = out.width > 0.0f ? 1.0 / out.width : 0.0;
    for (int t = 0; t < count; ++t) {
      const double level = std::nearbyint((x[t] - low) * inverse);
      code[t] = static_cast<uint8_t>(std::min(std::max(level, 0.0), double{kMaxCode}));
    }
    return out;
  }
};

inline void recode_page(const Recoding& job, int row) {
  thread_local RecodeScratch scratch;
  PageRecoder(job, row, scratch).run();
}
