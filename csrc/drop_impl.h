// SPDX-License-Identifier: Apache-2.0
// One task of drop.h. Included inside a variant's namespace, after fit_impl.h.

namespace dropping {

// Rows whose sums are held in registers together, and vectors of each: as many as there is room for.
constexpr int kRows = SPHKV_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kParts = 4;

// Some rows of a head. Dimensions are filled up to whole vectors; the filling stays zero.
struct RowGroup {
  int count, width;
  size_t tokens;                       // of the block at hand,
  std::vector<const float*> value;     // and where their values are
  std::vector<float> weight;           // [tokens of a block, rows]
  std::vector<float> moved;            // [rows, width] of the block at hand
  std::vector<double> sum, gone;       // [rows, width], [rows] of all blocks so far

  RowGroup(int rows, int row_width, size_t block_tokens)
      : count(rows), width(row_width), tokens(0), value(block_tokens),
        weight(block_tokens * kDropRows),
        moved(static_cast<size_t>(kDropRows) * width), sum(moved.size()), gone(kDropRows) {}
};

// Weighted sums of some vectors of the values of a block, of rows from `row` on.
template <int PARTS>
inline void add_tile(RowGroup& group, int row, int first) {
  Floats sum[kRows][PARTS] = {};
  for (size_t t = 0; t < group.tokens; ++t) {
    const float* from = group.value[t] + first;
    const float* weight = group.weight.data() + t * kDropRows + row;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; ++i) {
      const Floats own = load_floats(from + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][i] += weight[r] * own;
    }
  }
  float* out = group.moved.data() + static_cast<size_t>(row) * group.width + first;
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < PARTS; ++i) store_floats(out + r * group.width + i * kLanes, sum[r][i]);
  }
}

// What moves when a block goes: the weighted sums of its values.
inline void add_values(RowGroup& group) {
  constexpr int kTile = kParts * kLanes;
  for (int row = 0; row < group.count; row += kRows) {
    int first = 0;
    for (; first + kTile <= group.width; first += kTile) add_tile<kParts>(group, row, first);
    for (; first < group.width; first += kLanes) add_tile<1>(group, row, first);
  }
}

// The rows of a head from `first` on, kDropRows at most: their part of the loss of every block.
inline void drop_rows(const DropRows& job, int head, int first, const float* values, int width,
                      double* loss) {
  const int count = std::min(kDropRows, job.rows - first);
  RowGroup group(count, width, static_cast<size_t>(job.block_units) * job.unit_tokens);
  const size_t top = static_cast<size_t>(head) * job.rows + first;
  for (int block = job.blocks - 1; block >= 0; --block) {
    group.tokens = 0;
    const int64_t* units =
        job.units + (static_cast<size_t>(head) * job.blocks + block) * job.block_units;
    for (int i = 0; i < job.block_units; ++i) {
      if (units[i] < 0) continue;
      const int start = static_cast<int>(units[i]) * job.unit_tokens;
      const int tokens = std::max(0, std::min(job.unit_tokens, job.tokens - start));
      const size_t placed = group.tokens;
      group.tokens += tokens;
      for (int t = 0; t < tokens; ++t) {
        group.value[placed + t] = values + static_cast<size_t>(start + t) * width;
      }
      for (int r = 0; r < count; ++r) {
        const float* weight = job.weight + (top + r) * job.tokens + start;
        const uint8_t* is_valid = job.is_valid + static_cast<size_t>(first + r) * job.tokens + start;
        for (int t = 0; t < tokens; ++t) {
          const float own = is_valid[t] ? weight[t] : 0.0f;
          group.weight[(placed + t) * kDropRows + r] = own;
          group.gone[r] += own;
        }
      }
    }
    add_values(group);
    double total = 0;
    for (int r = 0; r < count; ++r) {
      const double gone = group.gone[r];
      double* sum = group.sum.data() + static_cast<size_t>(r) * width;
      const float* moved = group.moved.data() + static_cast<size_t>(r) * width;
      const float* output = job.output + (top + r) * job.dim;
      double square = 0;
      for (int i = 0; i < job.dim; ++i) {
        sum[i] += moved[i];
        const double move = sum[i] - gone * output[i];
        square += move * move;
      }
      // a head that keeps next to nothing shows what is left at full weight
      const double left = std::max(1 - gone, static_cast<double>(job.least_mass));
      total += job.share[top + r] * square / (left * left);
    }
    loss[block] = total;
  }
}

}  // namespace dropping

// What prompt_rows.h asks of a variant.
constexpr PromptRows kPromptRows = {
    &fitting::nearest_row, &fitting::grow_row, &fitting::alternate_row,
    &fitting::refine_row,  &dropping::drop_rows, kLanes,
};
