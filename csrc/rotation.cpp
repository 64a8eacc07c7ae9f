// SPDX-License-Identifier: Apache-2.0
#include "rotation.h"

#include <cmath>
#include <vector>

namespace sphkv {

namespace {

// Orthonormal Hartley transform of `odd` neighbours.
void hartley(float* x, int odd) {
  constexpr double kTurn = 6.283185307179586476925;
  thread_local std::vector<double> table;
  thread_local std::vector<float> out;
  if (static_cast<int>(table.size()) != odd) {
    table.resize(odd);
    for (int i = 0; i < odd; ++i) {
      table[i] = (std::cos(kTurn * i / odd) + std::sin(kTurn * i / odd)) / std::sqrt(double(odd));
    }
  }
  out.assign(odd, 0.0f);
  for (int i = 0; i < odd; ++i) {
    double sum = 0.0;
    for (int j = 0; j < odd; ++j) sum += table[i * j % odd] * x[j];
    out[i] = static_cast<float>(sum);
  }
  for (int i = 0; i < odd; ++i) x[i] = out[i];
}

}  // namespace

void unrotate(float* x, int dim) {
  int odd = dim;
  while (odd % 2 == 0) odd /= 2;
  if (odd > 1) {
    for (int at = 0; at < dim; at += odd) hartley(x + at, odd);
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
