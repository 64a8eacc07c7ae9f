// SPDX-License-Identifier: Apache-2.0
// Runs pages through a kernel K (look-ups in int8, or float32). Included inside a variant's
// namespace. K supplies Table, Scratch, build, logits and values.
// A row is one query of one query head; all rows of a KV head share every look-up.

inline int padded_count(int count) {
  return (count + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
}

// A page whose share of the weight so far is less than this adds nothing to a float32 sum.
constexpr float kNegligible = 1.0f / (1 << 24);

template <class K>
struct PageWorker {
  const Step& step;
  typename K::Scratch& scratch;
  int head;
  Partial& state;
  int32_t first = 0, last = 0;  // least and greatest position of the page

  int num_rows() const { return step.queries->num_rows; }
  int64_t query_position(int v) const {
    return step.queries->position[v % step.queries->num_queries];
  }
  float* logit(int v) { return scratch.logits.data() + static_cast<size_t>(v) * kMaxPageTokens; }
  const float* query() const {
    return step.queries->data + static_cast<size_t>(head) * num_rows() * step.plan->head_dim;
  }

  // Whether a row needs no mask: every state of the page is live and visible to it.
  bool is_plain(int v, int count) const {
    const Options& options = *step.options;
    const int64_t p = query_position(v);
    return options.softcap == 0.0f && count % kGroupTokens == 0 && last <= p &&
           (options.window == 0 || first > p - options.window);
  }

  // Logits times radius become weights times value step; the largest weight, 0 if none counts.
  float weigh_row(int v, int count) {
    float* row = logit(v);
    const int padded = padded_count(count);
    float peak = apply_radius(row, scratch.radius, padded);
    if (!is_plain(v, count)) {
      mask_row(row, count, scratch.position, query_position(v), *step.options);
      for (int t = count; t < padded; ++t) row[t] = kMinusInf;
      peak = largest_of(row, padded);
    }
    if (peak == kMinusInf) return 0.0f;
    raise_peak(state, v, step.plan->head_dim, peak);
    float most;
    const float mass = exponentiate(row, scratch.step, padded, state.peak[v], &most);
    state.mass[v] += mass;
    return mass > kNegligible * state.mass[v] ? most : 0.0f;
  }

  void find_range(int count, bool is_contiguous) {
    first = scratch.position[0];
    last = scratch.position[count - 1];
    if (is_contiguous) return;
    for (int t = 0; t < count; ++t) {
      first = std::min(first, scratch.position[t]);
      last = std::max(last, scratch.position[t]);
    }
  }

  // Weighs every row; false if none counts. Rows that do not are zero after it.
  bool weigh_rows(int count) {
    bool is_any = false;
    for (int v = 0; v < num_rows(); ++v) {
      scratch.peak[v] = weigh_row(v, count);
      if (scratch.peak[v] == 0.0f) std::fill_n(logit(v), padded_count(count), 0.0f);
      is_any |= scratch.peak[v] > 0.0f;
    }
    return is_any;
  }

  void attend_dense(const uint16_t* keys, const uint16_t* values, int count, bool is_contiguous) {
    if (count == 0) return;
    const int dim = step.plan->head_dim;
    find_range(count, is_contiguous);
    dense_logits(keys, count, dim, query(), num_rows(), step.options->scale,
                 scratch.logits.data());
    std::fill_n(scratch.radius, padded_count(count), 1.0f);
    std::fill_n(scratch.step, padded_count(count), 1.0f);
    if (weigh_rows(count)) {
      dense_values(values, count, dim, scratch.logits.data(), num_rows(), state.plain);
    }
  }

  void attend_coded(const uint8_t* page, const uint8_t* next, const PageKind& kind,
                    const typename K::Table& table) {
    const PageHeader& header = header_of(page);
    const PageLayout& layout = kind.layout;
    const int count = header.count, dim = step.plan->head_dim, padded = padded_count(count);
    if (count == 0) return;
    K::logits(page, next, kind, head, table, scratch);
    find_range(count, layout.mode == PositionMode::kContiguous);
    read_affine(page + layout.radius_offset, count, padded, header.radius_lo, header.radius_step,
                scratch.radius);
    if (kind.has_value_codes()) {
      read_affine(page + layout.scale_offset, count, padded, header.scale_lo, header.scale_step,
                  scratch.step);
    } else {
      std::fill_n(scratch.step, padded, 1.0f);
    }
    if (!weigh_rows(count)) return;
    if (kind.has_value_codes()) {
      K::values(page, kind, num_rows(), dim, scratch, state.rotated);
    } else {
      const auto* values = reinterpret_cast<const uint16_t*>(page + layout.value_offset);
      dense_values(values, count, dim, scratch.logits.data(), num_rows(), state.plain);
    }
  }
};

inline void reset(Partial& state, int num_rows, int dim) {
  std::fill_n(state.peak, num_rows, kMinusInf);
  std::fill_n(state.mass, num_rows, 0.0f);
  std::fill_n(state.rotated, static_cast<size_t>(num_rows) * dim, 0.0f);
  std::fill_n(state.plain, static_cast<size_t>(num_rows) * dim, 0.0f);
}

// Kept out of line: an inlined thread-local is looked up again at every use.
template <class T>
__attribute__((noinline)) T& thread_scratch() {
  thread_local T scratch;
  return scratch;
}

// Attends to pages [begin, end) of a head, or to its tail.
template <class K>
void run_chunk(const Step& step, const Chunk& chunk, const std::vector<typename K::Table>& tables,
               Partial& state) {
  auto& scratch = thread_scratch<typename K::Scratch>();
  const Plan& plan = *step.plan;
  const int num_rows = step.queries->num_rows;
  scratch.reserve(num_rows);
  reset(state, num_rows, plan.head_dim);
  PageWorker<K> worker{step, scratch, chunk.head, state, 0, 0};
  if (chunk.is_tail) {
    const Tail& tail = *step.tail;
    for (int64_t at = chunk.begin; at < chunk.end; at += kMaxPageTokens) {
      const int count = static_cast<int>(std::min<int64_t>(kMaxPageTokens, chunk.end - at));
      for (int t = 0; t < count; ++t) {
        scratch.position[t] = static_cast<int32_t>(tail.first_position + at + t);
      }
      const int64_t offset = chunk.head * tail.head_stride + at * plan.head_dim;
      worker.attend_dense(tail.keys + offset, tail.values + offset, count, true);
    }
    return;
  }
  scratch.forget_base();
  int last_kind = -1;
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    const uint8_t* page = plan.page[i];
    const int kind_id = plan.kind[i];
    const PageKind& kind = plan.kinds[kind_id];
    if (kind_id != last_kind) scratch.forget_base();
    last_kind = kind_id;
    read_positions(page, kind.layout, scratch.position);
    if (kind.codebook != nullptr) {
      const uint8_t* next = i + 1 < chunk.end ? plan.page[i + 1] : nullptr;
      worker.attend_coded(page, next, kind, tables[chunk.head * plan.kinds.size() + kind_id]);
    } else {
      worker.attend_dense(reinterpret_cast<const uint16_t*>(page + kind.layout.key_offset),
                          reinterpret_cast<const uint16_t*>(page + kind.layout.value_offset),
                          header_of(page).count,
                          kind.layout.mode == PositionMode::kContiguous);
    }
  }
}
