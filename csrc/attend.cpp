// SPDX-License-Identifier: Apache-2.0
#include "attend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "rotation.h"
#include "team.h"

namespace sphkv {

Engine::~Engine() = default;

namespace {

// Chunks are cut by pages alone, so that the same pages give the same sums on any machine.
constexpr int64_t kChunkPages = 8;
constexpr int64_t kMaxChunksPerHead = 64;
constexpr int64_t kTailChunkTokens = 256;

void cut_chunks(const Plan& plan, const Tail& tail, std::vector<Chunk>& chunks,
                std::vector<int>& first_chunk) {
  chunks.clear();
  first_chunk.assign(1, 0);
  for (int head = 0; head < plan.num_heads; ++head) {
    const int64_t begin = plan.first_page[head], end = plan.first_page[head + 1];
    const int64_t step = std::max(kChunkPages, (end - begin) / kMaxChunksPerHead);
    for (int64_t at = begin; at < end; at += step) {
      chunks.push_back({head, false, at, std::min(end, at + step)});
    }
    for (int64_t at = 0; at < tail.num_tokens; at += kTailChunkTokens) {
      const int64_t stop = std::min<int64_t>(tail.num_tokens, at + kTailChunkTokens);
      chunks.push_back({head, true, at, stop});
    }
    first_chunk.push_back(static_cast<int>(chunks.size()));
  }
}

struct Buffers {
  std::vector<Chunk> chunks;
  std::vector<int> first_chunk;
  std::vector<float> sums;
  std::vector<std::pair<int, int>> tables;  // (head, kind) that occur
};

Partial partial_at(std::vector<float>& sums, size_t chunk, int rows, int dim) {
  float* at = sums.data() + chunk * rows * (2 + 2 * static_cast<size_t>(dim));
  Partial out{};
  out.peak = at;
  out.mass = at + rows;
  out.rotated = at + 2 * rows;
  out.plain = out.rotated + static_cast<size_t>(rows) * dim;
  return out;
}

void list_tables(const Plan& plan, std::vector<std::pair<int, int>>& out) {
  out.clear();
  for (int head = 0; head < plan.num_heads; ++head) {
    int last = -1;
    for (int64_t i = plan.first_page[head]; i < plan.first_page[head + 1]; ++i) {
      const int kind = plan.kind[i];
      if (kind == last) continue;
      last = kind;
      if (plan.kinds[kind].codebook != nullptr) out.emplace_back(head, kind);
    }
  }
}

// Merges the chunks of one row and undoes the rotation of values.
void finish_row(const std::vector<Partial>& parts, int v, int dim, float* output, float* lse) {
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  float peak = kMinusInf;
  for (const Partial& part : parts) peak = std::max(peak, part.peak[v]);
  std::fill_n(output, dim, 0.0f);
  *lse = kMinusInf;
  if (peak == kMinusInf) return;
  thread_local std::vector<float> rotated;
  rotated.assign(dim, 0.0f);
  float mass = 0.0f;
  for (const Partial& part : parts) {
    if (part.peak[v] == kMinusInf) continue;
    const float share = std::exp(part.peak[v] - peak);
    mass += share * part.mass[v];
    const float* r = part.rotated + static_cast<size_t>(v) * dim;
    const float* p = part.plain + static_cast<size_t>(v) * dim;
    for (int i = 0; i < dim; ++i) rotated[i] += share * r[i];
    for (int i = 0; i < dim; ++i) output[i] += share * p[i];
  }
  unrotate(rotated.data(), dim);
  for (int i = 0; i < dim; ++i) output[i] = (output[i] + rotated[i]) / mass;
  *lse = peak + std::log(mass);
}

}  // namespace

void attend(Engine& engine, const Plan& plan, const Tail& tail, const Queries& queries,
            const Options& options, float* output, float* lse) {
  thread_local Buffers buffers;
  Buffers& held = buffers;  // workers must see this thread's buffers, not their own
  const int rows = queries.num_rows, dim = plan.head_dim, threads = options.num_threads;
  cut_chunks(plan, tail, held.chunks, held.first_chunk);
  list_tables(plan, held.tables);
  held.sums.resize(held.chunks.size() * rows * (2 + 2 * static_cast<size_t>(dim)));
  engine.begin({&plan, &tail, &queries, &options});
  const auto prepare = [&](int i) {
    engine.prepare(held.tables[i].first, held.tables[i].second);
  };
  const auto run = [&](int i) {
    Partial part = partial_at(held.sums, i, rows, dim);
    engine.run(held.chunks[i], part);
  };
  const auto finish = [&](int head) {
    std::vector<Partial> parts;
    for (int c = held.first_chunk[head]; c < held.first_chunk[head + 1]; ++c) {
      parts.push_back(partial_at(held.sums, c, rows, dim));
    }
    for (int v = 0; v < rows; ++v) {
      const size_t row = static_cast<size_t>(head) * rows + v;
      finish_row(parts, v, dim, output + row * dim, lse + row);
    }
  };
  run_phases(threads, {{static_cast<int>(held.tables.size()), prepare},
                       {static_cast<int>(held.chunks.size()), run},
                       {plan.num_heads, finish}});
}

}  // namespace sphkv
