// SPDX-License-Identifier: Apache-2.0
// Compares every kernel variant this processor can run with the float32 one, on random pages, and
// what variants do to prompts with plain loops. Needs no Python, so that it runs under an emulator: x86 variants are checked on other machines.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "attend.h"
#include "engine.h"
#include "prompt_rows.h"

using namespace sphkv;

namespace {

std::mt19937 generator(7);

float normal() { return std::normal_distribution<float>()(generator); }
int below(int n) { return static_cast<int>(generator() % n); }

struct Case {
  int head_dim, num_heads, group, num_queries, slots, value_bits, page_tokens;
  PositionMode mode;
};

struct Sample {
  std::unique_ptr<Rotary> rotary;
  std::unique_ptr<Codebook> codebook;
  std::vector<std::vector<uint8_t>> bytes;
  Plan plan;
  std::vector<uint16_t> tail_keys, tail_values;
  std::vector<float> query;
  std::vector<int64_t> position;
};

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

void make_codebook(const Case& c, Sample& out) {
  const int planes = c.head_dim / 2, pairs = 2;
  std::vector<double> radians(planes);
  std::vector<int64_t> channels(2 * planes), slot_plane, num_pairs(c.num_heads, pairs);
  for (int i = 0; i < planes; ++i) {
    radians[i] = std::pow(1e5, -i / static_cast<double>(planes));
    channels[2 * i] = i;
    channels[2 * i + 1] = i + planes;
  }
  std::vector<float> points, constant(static_cast<size_t>(c.num_heads) * planes * 2, 0.0f);
  for (int h = 0; h < c.num_heads; ++h) {
    constant[static_cast<size_t>(h) * planes * 2] = 0.3f;
    for (int s = 0; s < c.slots; ++s) {
      const bool is_pair = s >= c.slots - pairs;
      const int plane = 1 + s / 2 % (planes - 1);
      slot_plane.push_back(plane);
      slot_plane.push_back(is_pair ? plane % (planes - 1) + 1 : plane);
      const float size = s % 2 ? 0.02f : 0.15f;
      for (int i = 0; i < 64; ++i) points.push_back(i < 32 || is_pair ? size * normal() : 0.0f);
    }
  }
  out.rotary = std::make_unique<Rotary>(planes, radians.data(), channels.data());
  out.codebook =
      std::make_unique<Codebook>(out.rotary.get(), c.num_heads, c.slots, points.data(),
                                 slot_plane.data(), num_pairs.data(), constant.data());
}

void make_page(const Case& c, const PageLayout& layout, int first, int count, Sample& out) {
  std::vector<uint8_t> page(layout.page_bytes);
  for (auto& byte : page) byte = static_cast<uint8_t>(below(256));
  PageHeader header{};
  header.version = kPageVersion;
  header.count = static_cast<uint16_t>(count);
  header.capacity = static_cast<uint16_t>(c.page_tokens);
  header.position_base = first;
  header.radius_lo = 3.0f;
  header.radius_step = 0.02f;
  header.scale_lo = 0.1f;
  header.scale_step = 0.001f;
  std::memcpy(page.data(), &header, sizeof header);
  int32_t position = first;
  for (int t = 0; t < c.page_tokens; ++t) {
    const bool is_run_start = c.mode == PositionMode::kRuns && t % kGroupTokens == 0;
    position += is_run_start ? below(40) : c.mode == PositionMode::kTokens ? 1 + below(9) : 1;
    const int at = c.mode == PositionMode::kRuns ? t / kGroupTokens : t;
    if (c.mode == PositionMode::kTokens || is_run_start) {
      std::memcpy(page.data() + layout.position_offset + 4 * at, &position, 4);
    }
  }
  if (c.value_bits == 16) {
    for (int i = 0; i < c.page_tokens * c.head_dim; ++i) {
      const uint16_t value = to_bfloat16(normal());
      std::memcpy(page.data() + layout.value_offset + 2 * i, &value, 2);
    }
  }
  out.bytes.push_back(std::move(page));
}

Sample make_sample(const Case& c) {
  Sample out;
  make_codebook(c, out);
  const PageLayout layout =
      coded_layout(c.page_tokens, c.head_dim, c.slots, c.value_bits, c.mode);
  const int pages = 5;
  for (int i = 0; i < pages * c.num_heads; ++i) {
    const int count = i % pages == pages - 1 ? c.page_tokens - 19 : c.page_tokens;
    make_page(c, layout, i % pages * 300, count, out);
  }
  out.plan.num_heads = c.num_heads;
  out.plan.head_dim = c.head_dim;
  out.plan.kinds.push_back({layout, out.codebook.get()});
  for (int h = 0; h <= c.num_heads; ++h) out.plan.first_page.push_back(h * pages);
  for (const auto& page : out.bytes) {
    out.plan.page.push_back(page.data());
    out.plan.kind.push_back(0);
  }
  for (int i = 0; i < c.num_heads * 21 * c.head_dim; ++i) {
    out.tail_keys.push_back(to_bfloat16(normal()));
    out.tail_values.push_back(to_bfloat16(normal()));
  }
  const int rows = c.num_heads * c.group * c.num_queries;
  for (int i = 0; i < rows * c.head_dim; ++i) out.query.push_back(normal());
  for (int i = 0; i < c.num_queries; ++i) out.position.push_back(1400 + i);
  return out;
}

std::vector<float> run(Engine& engine, const Case& c, const Sample& sample, int threads) {
  const Tail tail{sample.tail_keys.data(), sample.tail_values.data(), 21 * c.head_dim, 21, 1395};
  const Queries queries{sample.query.data(), sample.position.data(), c.num_queries,
                        c.group * c.num_queries};
  Options options;
  options.scale = 0.06f;
  options.num_threads = threads;
  options.window = 1300;
  const int rows = c.num_heads * c.group * c.num_queries;
  std::vector<float> output(static_cast<size_t>(rows) * c.head_dim), lse(rows);
  attend(engine, sample.plan, tail, queries, options, output.data(), lse.data());
  return output;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

// Samples whose nearest point is not the first of the nearest ones, by plain sums in double.
int wrong_points(const PromptRows& rows, int levels, bool is_equal) {
  constexpr int kPlanes = 3, kTokens = 333;
  std::vector<float> x(2 * kPlanes * kTokens), points(2 * kPlanes * levels);
  for (float& each : x) each = normal();
  for (float& each : points) each = normal();
  // every point twice, one after the other or far apart
  for (int i = 0; is_equal && i < kPlanes * levels * 2; ++i) {
    points[i] = points[i / (2 * levels) * 2 * levels + i % levels];
  }
  std::vector<int64_t> index(kPlanes * kTokens, -1);
  nearest_points(rows, {kPlanes, kTokens, x.data(), nullptr}, levels, points.data(), 2, index.data());
  int wrong = 0;
  for (int at = 0; at < kPlanes * kTokens; ++at) {
    const float* own = points.data() + at / kTokens * 2 * levels;
    const auto distance = [&](int64_t i) {
      return std::hypot(double{own[2 * i]} - x[2 * at], double{own[2 * i + 1]} - x[2 * at + 1]);
    };
    const int64_t found = index[at];
    bool is_right = found >= 0 && found < levels && !(is_equal && found >= levels / 2);
    for (int i = 0; is_right && i < levels; ++i) is_right = distance(found) < distance(i) + 1e-5;
    wrong += !is_right;
  }
  return wrong;
}

// Losses of dropping two blocks of unequal size, against plain sums in double.
double drop_error(const PromptRows& rows, int num_rows, int dim) {
  constexpr int kHeads = 2, kTokens = 70, kUnit = 16;
  std::vector<float> weight(kHeads * num_rows * kTokens, 1.0f / kTokens), share(kHeads * num_rows);
  std::vector<float> values(kHeads * kTokens * dim), output(kHeads * num_rows * dim);
  for (auto* each : {&share, &values, &output}) {
    for (float& element : *each) element = normal();
  }
  std::vector<uint8_t> is_valid(num_rows * kTokens, 1);
  is_valid[3] = 0;
  const std::vector<int64_t> units = {0, 4, 2, -1, 1, 3, 4, -1};
  const DropRows job{kHeads, num_rows, kTokens, dim, weight.data(), is_valid.data(), share.data(),
                     values.data(), output.data(), 2, 2, kUnit, units.data(), 1e-3f};
  std::vector<float> found(kHeads * 2), wanted;
  drop_losses(rows, job, 2, found.data());
  for (int head = 0; head < kHeads; ++head) {
    for (int last = 1; last >= 0; --last) {
      double loss = 0;
      for (int row = 0; row < num_rows; ++row) {
        double gone = 0, square = 0;
        std::vector<double> moved(dim);
        for (int at = 4 * head + 2 * last; at < 4 * head + 4; ++at) {
          const int64_t first = units[at] * kUnit;
          for (int64_t t = first; units[at] >= 0 && t < first + kUnit && t < kTokens; ++t) {
            if (!is_valid[row * kTokens + t]) continue;
            gone += weight[0];
            const float* value = values.data() + (head * kTokens + t) * dim;
            for (int i = 0; i < dim; ++i) moved[i] += double{weight[0]} * value[i];
          }
        }
        const size_t at = head * num_rows + row;
        for (int i = 0; i < dim; ++i) {
          const double move = moved[i] - gone * output[at * dim + i];
          square += move * move;
        }
        loss += share[at] * square / ((1 - gone) * (1 - gone));
      }
      wanted.push_back(static_cast<float>(loss));
    }
  }
  return relative_error(found, wanted);
}

// Failures of what variants do to prompts.
int check_prompt_rows() {
  int failures = 0;
  for (auto find : {avx512_prompt_rows, avx2_prompt_rows, plain_prompt_rows}) {
    const PromptRows* rows = find();
    if (rows == nullptr) continue;
    for (int levels : {2, 4, 16, 64, 256}) {
      for (bool is_equal : {false, true}) {
        const int wrong = wrong_points(*rows, levels, is_equal);
        if (wrong == 0) continue;
        ++failures;
        std::printf("%d lanes: %d samples are nearer to others of %d points (equal ones: %d)\n",
                    rows->lanes, wrong, levels, is_equal);
      }
    }
    for (int dim : {4, 64, 80, 96, 130}) {
      const double error = drop_error(*rows, dim / 4, dim);
      if (error < 1e-4) continue;
      ++failures;
      std::printf("%d lanes: losses of dropping err by %.2e\n", rows->lanes, error);
    }
  }
  return failures;
}

}  // namespace

int main() {
  constexpr double kBound = 0.01;
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto make : {make_neon_engine, make_avx512_engine, make_avx2_engine}) {
    if (auto engine = make()) engines.push_back(std::move(engine));
  }
  const auto exact = make_exact_engine();
  int failures = check_prompt_rows(), comparisons = 0;
  for (int dim : {64, 80, 96, 128, 256}) {
    for (int bits : {2, 3, 4, 8, 16}) {
      for (int mode = 0; mode < 3; ++mode) {
        for (int group : {1, 3, 4, 8}) {
          const Case c{dim, 2, group, 1 + below(2), dim / 4 + 2 * below(dim / 4), bits,
                       below(2) ? 128 : 96, static_cast<PositionMode>(mode)};
          const Sample sample = make_sample(c);
          const auto expected = run(*exact, c, sample, 1);
          for (const auto& engine : engines) {
            const double error = relative_error(run(*engine, c, sample, 2), expected);
            ++comparisons;
            if (error < kBound) continue;
            ++failures;
            std::printf("%s: dim %d, bits %d, mode %d, group %d: error %.2e\n", engine->name(),
                        dim, bits, mode, group, error);
          }
        }
      }
    }
  }
  std::printf("%d comparisons, %d failures; variants:", comparisons, failures);
  for (const auto& engine : engines) std::printf(" %s", engine->name());
  std::printf("\n");
  return failures != 0 || engines.empty();
}
