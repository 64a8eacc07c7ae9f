// SPDX-License-Identifier: Apache-2.0
// The rotation that values are stored in; docs/math/values.md, section 1.
#pragma once

namespace sphkv {

// In place, its own inverse: Sylvester's Hadamard matrix, times Hartley's for an odd factor.
void unrotate(float* x, int dim);

}  // namespace sphkv
