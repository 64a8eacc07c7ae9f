// SPDX-License-Identifier: Apache-2.0
#define SPHKV_VECTOR_BYTES 16
#include "fit.h"

#include "team.h"
#include "variant_begin.h"

namespace sphkv {

namespace {

constexpr bool kIsExact = true;
#include "softmax.h"
#include "states.h"
#include "search.h"

using Points = PointList<kMostPoints>;
constexpr double kLeastMass = 1e-20;

// Samples of a row, component by component, in whole groups; those that fill the last weigh nothing.
struct Samples {
  int count, padded;
  std::vector<float> u, v, w;

  Samples(const PlaneSamples& all, int row)
      : count(all.tokens),
        padded((all.tokens + kSearchTokens - 1) / kSearchTokens * kSearchTokens),
        u(padded), v(padded), w(padded) {
    const size_t at = static_cast<size_t>(row) * all.tokens;
    for (int t = 0; t < count; ++t) {
      u[t] = all.x[2 * (at + t)];
      v[t] = all.x[2 * (at + t) + 1];
      w[t] = all.weight ? all.weight[at + t] : 0.0f;
    }
  }
};

struct Moments {
  double mass = 0, u = 0, v = 0;
};

struct Point {
  float x, y;
};

// The nearest of the points [first, first + kSlotLevels) to one sample.
inline int nearest_of_set(float u, float v, const Points& points, int first) {
  Floats best = same(std::numeric_limits<float>::infinity());
  Integers found = {}, now;
  for (int i = 0; i < kLanes; ++i) now[i] = i;
  for (int i = first; i < first + kSlotLevels; i += kLanes, now += kLanes) {
    const Floats score = load_floats(points.half_square + i) - u * load_floats(points.x + i) -
                         v * load_floats(points.y + i);
    const Integers is_nearer = score < best;
    found = is_nearer ? now : found;
    best = smaller(score, best);
  }
  int lane = 0;
  for (int i = 1; i < kLanes; ++i) {
    const bool is_nearer = best[i] < best[lane] || (best[i] == best[lane] && found[i] < found[lane]);
    if (is_nearer) lane = i;
  }
  return first + found[lane];
}

// Index of the nearest of `count` points for every sample, the first of equals. Of many points the
// nearest set is found first: a minimum costs half of what it takes to know whose it is.
void find_all(const Samples& samples, const Points& points, int count, std::vector<int32_t>& index) {
  const bool has_sets = count > kSlotLevels && count % kSlotLevels == 0;
  index.resize(samples.padded);
  PlaneTokens tokens;
  for (int at = 0; at < samples.padded; at += kSearchTokens) {
    std::copy_n(samples.u.data() + at, kSearchTokens, tokens.x);
    std::copy_n(samples.v.data() + at, kSearchTokens, tokens.y);
    int32_t* found = index.data() + at;
    if (!has_sets) {
      find_nearest(tokens, points, count, 1, found);
      continue;
    }
    find_nearest(tokens, points, count / kSlotLevels, kSlotLevels, found);
    for (int t = 0; t < kSearchTokens; ++t) {
      found[t] = nearest_of_set(tokens.x[t], tokens.y[t], points, found[t] * kSlotLevels);
    }
  }
}

void set_points(const std::vector<Point>& from, Points& points) {
  for (size_t i = 0; i < from.size(); ++i) points.set(static_cast<int>(i), from[i].x, from[i].y);
}

std::vector<Point> read_points(const float* from, int row, int count) {
  std::vector<Point> out(count);
  std::memcpy(out.data(), from + static_cast<size_t>(row) * count * 2, count * sizeof(Point));
  return out;
}

void write_points(const std::vector<Point>& from, int row, float* to) {
  std::memcpy(to + static_cast<size_t>(row) * from.size() * 2, from.data(),
              from.size() * sizeof(Point));
}

// Mass and weighted sums of the samples of every cluster.
std::vector<Moments> sum_clusters(const Samples& samples, const std::vector<int32_t>& index,
                                  int count) {
  std::vector<Moments> out(count);
  for (int t = 0; t < samples.count; ++t) {
    Moments& own = out[index[t]];
    const double w = samples.w[t];
    own.mass += w;
    own.u += w * samples.u[t];
    own.v += w * samples.v[t];
  }
  return out;
}

// Points move to the means of their samples; those without stay.
void move_to_means(const std::vector<Moments>& clusters, std::vector<Point>& points) {
  for (size_t i = 0; i < points.size(); ++i) {
    const Moments& own = clusters[i];
    if (!(own.mass > 0)) continue;
    const double mass = std::max(own.mass, kLeastMass);
    points[i] = {static_cast<float>(own.u / mass), static_cast<float>(own.v / mass)};
  }
}

// Each point moved both ways along the longer axis of its cluster.
std::vector<Point> split_points(const Samples& samples, const std::vector<int32_t>& index,
                                const std::vector<Point>& points, float split) {
  const size_t levels = points.size();
  struct Spread {
    double mass = 0, xx = 0, yy = 0, xy = 0;
  };
  std::vector<Spread> spread(levels);
  for (int t = 0; t < samples.count; ++t) {
    Spread& own = spread[index[t]];
    const double w = samples.w[t];
    const double x = samples.u[t] - points[index[t]].x, y = samples.v[t] - points[index[t]].y;
    own.mass += w;
    own.xx += w * x * x;
    own.yy += w * y * y;
    own.xy += w * x * y;
  }
  std::vector<Point> out(2 * levels);
  for (size_t i = 0; i < levels; ++i) {
    const double mass = std::max(spread[i].mass, kLeastMass);
    const double xx = spread[i].xx / mass, yy = spread[i].yy / mass, xy = spread[i].xy / mass;
    const double half = (xx - yy) / 2, angle = 0.5 * std::atan2(2 * xy, xx - yy);
    const double length = split * std::sqrt((xx + yy) / 2 + std::sqrt(half * half + xy * xy));
    const auto x = static_cast<float>(length * std::cos(angle));
    const auto y = static_cast<float>(length * std::sin(angle));
    out[i] = {points[i].x - x, points[i].y - y};
    out[levels + i] = {points[i].x + x, points[i].y + y};
  }
  return out;
}

void grow_row(const PlaneSamples& all, const Growth& growth, int row, const float* from, float* to) {
  const Samples samples(all, row);
  std::vector<Point> points = read_points(from, row, growth.levels);
  std::vector<int32_t> index;
  Points list;
  set_points(points, list);
  find_all(samples, list, growth.levels, index);
  points = split_points(samples, index, points, growth.split);
  for (int round = 0; round < growth.rounds; ++round) {
    set_points(points, list);
    find_all(samples, list, 2 * growth.levels, index);
    move_to_means(sum_clusters(samples, index, 2 * growth.levels), points);
  }
  write_points(points, row, to);
}

// What samples leave over once some points are taken off.
void take_off(const Samples& samples, const std::vector<Point>& points,
              const std::vector<int32_t>& index, Samples& rest) {
  for (int t = 0; t < samples.padded; ++t) {
    rest.u[t] = samples.u[t] - points[index[t]].x;
    rest.v[t] = samples.v[t] - points[index[t]].y;
  }
}

void alternate_row(const PlaneSamples& all, int levels, int rounds, int row, float* first,
                   float* second) {
  const Samples samples(all, row);
  Samples rest = samples;
  std::vector<Point> a = read_points(first, row, levels), b = read_points(second, row, levels);
  std::vector<int32_t> index, other;
  Points list;
  set_points(a, list);
  find_all(samples, list, levels, index);
  take_off(samples, a, index, rest);
  set_points(b, list);
  find_all(rest, list, levels, other);
  for (int turn = 0; turn < 2 * rounds; ++turn) {
    // `other` has what was chosen of `b`; the stages change places every turn
    take_off(samples, b, other, rest);
    set_points(a, list);
    find_all(rest, list, levels, index);
    move_to_means(sum_clusters(rest, index, levels), a);
    std::swap(a, b);
    std::swap(index, other);
  }
  write_points(a, row, first);
  write_points(b, row, second);
}

// Points of one stage given the other's. Cluster i, j of an own and another point lies at
// i * own_step + j * other_step.
void explain_rest(const std::vector<Moments>& clusters, int own_step, int other_step,
                  const std::vector<Point>& other, std::vector<Point>& own) {
  for (size_t i = 0; i < own.size(); ++i) {
    Moments sum;
    for (size_t j = 0; j < other.size(); ++j) {
      const Moments& one = clusters[i * own_step + j * other_step];
      sum.mass += one.mass;
      sum.u += one.u - one.mass * other[j].x;
      sum.v += one.v - one.mass * other[j].y;
    }
    if (!(sum.mass > 0)) continue;
    const double mass = std::max(sum.mass, kLeastMass);
    own[i] = {static_cast<float>(sum.u / mass), static_cast<float>(sum.v / mass)};
  }
}

void move_towards(const std::vector<Point>& to, float step, std::vector<Point>& points) {
  for (size_t i = 0; i < points.size(); ++i) {
    points[i].x += step * (to[i].x - points[i].x);
    points[i].y += step * (to[i].y - points[i].y);
  }
}

void refine_row(const PlaneSamples& all, const SumFit& fit, int row, float* first, float* second) {
  const Samples samples(all, row);
  std::vector<Point> a = read_points(first, row, fit.first), b = read_points(second, row, fit.second);
  std::vector<int32_t> index;
  Points sums;
  for (int round = 0; round < fit.rounds; ++round) {
    for (int i = 0; i < fit.first; ++i) {
      for (int j = 0; j < fit.second; ++j) {
        sums.set(i * fit.second + j, a[i].x + b[j].x, a[i].y + b[j].y);
      }
    }
    find_all(samples, sums, fit.first * fit.second, index);
    const auto clusters = sum_clusters(samples, index, fit.first * fit.second);
    std::vector<Point> one = a, two = b;
    for (int sweep = 0; sweep < fit.sweeps; ++sweep) {
      explain_rest(clusters, fit.second, 1, two, one);
      explain_rest(clusters, 1, fit.second, one, two);
    }
    const float step = round + 1 < fit.rounds ? fit.relaxation : 1.0f;
    move_towards(one, step, a);
    move_towards(two, step, b);
  }
  write_points(a, row, first);
  write_points(b, row, second);
}

}  // namespace

void nearest_points(const PlaneSamples& samples, int levels, const float* points, int num_threads,
                    int64_t* index) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    const Samples own(samples, row);
    std::vector<int32_t> found;
    Points list;
    set_points(read_points(points, row, levels), list);
    find_all(own, list, levels, found);
    std::copy_n(found.data(), own.count, index + static_cast<size_t>(row) * own.count);
  }}});
}

void grow_points(const PlaneSamples& samples, const Growth& growth, const float* points,
                 int num_threads, float* found) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    grow_row(samples, growth, row, points, found);
  }}});
}

void alternate_stages(const PlaneSamples& samples, int levels, int rounds, int num_threads,
                      float* first, float* second) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    alternate_row(samples, levels, rounds, row, first, second);
  }}});
}

void refine_stages(const PlaneSamples& samples, const SumFit& fit, int num_threads, float* first,
                   float* second) {
  run_phases(num_threads, {{samples.rows, [&](int row) {
    refine_row(samples, fit, row, first, second);
  }}});
}

}  // namespace sphkv
