// SPDX-License-Identifier: Apache-2.0
// One row of samples of fit.h. Included inside a variant's namespace, after search.h.

namespace fitting {

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

// Place of the least of some scores, the first of equals.
inline int first_least(const Floats (&score)[kSlotLevels / kLanes]) {
#if defined(__aarch64__)
  const Floats least = same(vminvq_f32(smaller(smaller(score[0], score[1]),
                                               smaller(score[2], score[3]))));
  uint32x4_t place = {0, 1, 2, 3}, found = vdupq_n_u32(kSlotLevels - 1);
  for (const Floats& own : score) {
    found = vbslq_u32(vceqq_f32(own, least), vminq_u32(found, place), found);
    place = vaddq_u32(place, vdupq_n_u32(kLanes));
  }
  return static_cast<int>(vminvq_u32(found));
#elif defined(__SSE2__)
  // the last place where none is equal: no score is a number
  unsigned places = 1u << (kSlotLevels - 1);
#if defined(__AVX512F__) && SPHKV_VECTOR_BYTES == 64
  const Floats least = same(_mm512_reduce_min_ps(score[0]));
  places |= _mm512_cmp_ps_mask(score[0], least, _CMP_EQ_OQ);
#elif defined(__AVX2__) && SPHKV_VECTOR_BYTES == 32
  __m256 least = smaller(score[0], score[1]);
  least = smaller(least, _mm256_permute2f128_ps(least, least, 1));
  least = smaller(least, _mm256_permute_ps(least, 0x4e));
  least = smaller(least, _mm256_permute_ps(least, 0xb1));
  for (int i = 0; i < 2; ++i) {
    const int equal = _mm256_movemask_ps(_mm256_cmp_ps(score[i], least, _CMP_EQ_OQ));
    places |= static_cast<unsigned>(equal) << (kLanes * i);
  }
#else
  __m128 least = smaller(smaller(score[0], score[1]), smaller(score[2], score[3]));
  least = smaller(least, _mm_shuffle_ps(least, least, 0x4e));
  least = smaller(least, _mm_shuffle_ps(least, least, 0xb1));
  for (int i = 0; i < 4; ++i) {
    const int equal = _mm_movemask_ps(_mm_cmpeq_ps(score[i], least));
    places |= static_cast<unsigned>(equal) << (kLanes * i);
  }
#endif
  return __builtin_ctz(places);
#else
  int found = 0;
  for (int i = 1; i < kSlotLevels; ++i) {
    if (score[i / kLanes][i % kLanes] < score[found / kLanes][found % kLanes]) found = i;
  }
  return found;
#endif
}

// The nearest of the points [first, first + kSlotLevels) to one sample.
inline int nearest_of_set(float u, float v, const Points& points, int first) {
  Floats score[kSlotLevels / kLanes];
  for (int i = 0; i < kSlotLevels / kLanes; ++i) {
    const int at = first + i * kLanes;
    score[i] = load_floats(points.half_square + at) - u * load_floats(points.x + at) -
               v * load_floats(points.y + at);
  }
  return first + first_least(score);
}

// Index of the nearest of `count` points for every sample, the first of equals. Of many points the
// nearest set is found first: a minimum costs half of what it takes to know whose it is.
inline void find_all(const Samples& samples, const Points& points, int count,
                     std::vector<int32_t>& index) {
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

inline void set_points(const std::vector<Point>& from, Points& points) {
  for (size_t i = 0; i < from.size(); ++i) points.set(static_cast<int>(i), from[i].x, from[i].y);
}

inline std::vector<Point> read_points(const float* from, int row, int count) {
  std::vector<Point> out(count);
  std::memcpy(out.data(), from + static_cast<size_t>(row) * count * 2, count * sizeof(Point));
  return out;
}

inline void write_points(const std::vector<Point>& from, int row, float* to) {
  std::memcpy(to + static_cast<size_t>(row) * from.size() * 2, from.data(),
              from.size() * sizeof(Point));
}

// Mass and weighted sums of the samples of every cluster.
inline std::vector<Moments> sum_clusters(const Samples& samples, const std::vector<int32_t>& index,
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
inline void move_to_means(const std::vector<Moments>& clusters, std::vector<Point>& points) {
  for (size_t i = 0; i < points.size(); ++i) {
    const Moments& own = clusters[i];
    if (!(own.mass > 0)) continue;
    const double mass = std::max(own.mass, kLeastMass);
    points[i] = {static_cast<float>(own.u / mass), static_cast<float>(own.v / mass)};
  }
}

// Each point moved both ways along the longer axis of its cluster.
inline std::vector<Point> split_points(const Samples& samples, const std::vector<int32_t>& index,
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

inline void nearest_row(const PlaneSamples& all, int levels, const float* points, int row,
                        int64_t* index) {
  const Samples own(all, row);
  std::vector<int32_t> found;
  Points list;
  set_points(read_points(points, row, levels), list);
  find_all(own, list, levels, found);
  std::copy_n(found.data(), own.count, index + static_cast<size_t>(row) * own.count);
}

inline void grow_row(const PlaneSamples& all, const Growth& growth, int row, const float* from,
                     float* to) {
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
inline void take_off(const Samples& samples, const std::vector<Point>& points,
              const std::vector<int32_t>& index, Samples& rest) {
  for (int t = 0; t < samples.padded; ++t) {
    rest.u[t] = samples.u[t] - points[index[t]].x;
    rest.v[t] = samples.v[t] - points[index[t]].y;
  }
}

inline void alternate_row(const PlaneSamples& all, int levels, int rounds, int row, float* first,
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
inline void explain_rest(const std::vector<Moments>& clusters, int own_step, int other_step,
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

inline void move_towards(const std::vector<Point>& to, float step, std::vector<Point>& points) {
  for (size_t i = 0; i < points.size(); ++i) {
    points[i].x += step * (to[i].x - points[i].x);
    points[i].y += step * (to[i].y - points[i].y);
  }
}

inline void refine_row(const PlaneSamples& all, const SumFit& fit, int row, float* first,
                       float* second) {
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

}  // namespace fitting
