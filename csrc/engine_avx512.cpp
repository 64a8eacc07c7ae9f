// SPDX-License-Identifier: Apache-2.0
#include "variant_begin.h"
namespace sphkv { std::unique_ptr<Engine> make_avx512_engine() { return nullptr; } }
