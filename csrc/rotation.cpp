// SPDX-License-Identifier: Apache-2.0
#include "rotation.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace sphkv {

namespace {

// Orthonormal Hartley transform of `odd` neighbours, again and again.
class Hartley {
 public:
  void apply(float* x, int dim, int odd) {
    if (odd != odd_) fill(odd);
    for (int at = 0; at < dim; at += odd) {
      double* const sum = sum_.data();
      std::fill_n(sum, odd, 0.0);
      for (int j = 0; j < odd; ++j) {
        // symmetric: the row is the column
        const double* const row = table_.data() + static_cast<size_t>(j) * odd;
        const double own = x[at + j];
        for (int i = 0; i < odd; ++i) sum[i] += row[i] * own;
      }
      for (int i = 0; i < odd; ++i) x[at + i] = static_cast<float>(sum[i]);
    }
  }

 private:
  int odd_ = 0;
  std::vector<double> table_, sum_;  // [odd, odd], [odd]

  void fill(int odd) {
    constexpr double kTurn = 6.283185307179586476925;
    table_.resize(static_cast<size_t>(odd) * odd);
    sum_.resize(odd);
    for (int i = 0; i < odd; ++i) {
      for (int j = 0; j < odd; ++j) {
        const double angle = kTurn * (i * j % odd) / odd;
        table_[static_cast<size_t>(i) * odd + j] =
            (std::cos(angle) + std::sin(angle)) / std::sqrt(double(odd));
      }
    }
    odd_ = odd;
  }
};

}  // namespace

void unrotate(float* x, int dim) {
  int odd = dim;
  while (odd % 2 == 0) odd /= 2;
  if (odd > 1) {
    thread_local Hartley hartley;
    hartley.apply(x, dim, odd);
  }
  for (int step = odd; step < dim; step *= 2) {
    for (int at = 0; at < dim; at += 2 * step) {
      for (int i = at; i < at + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
  const float norm = 1.0f / std::sqrt(static_cast<float>(dim / odd));
  for (int i = 0; i < dim; ++i) x[i] *= norm;
}

}  // namespace sphkv
