// SPDX-License-Identifier: Apache-2.0
// What every variant includes before it opens its namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "codebook.h"
#include "engine.h"
#include "page.h"
#include "plan.h"
#include "prompt_rows.h"
#include "recode.h"
#include "rotation.h"
