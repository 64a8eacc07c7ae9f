// SPDX-License-Identifier: Apache-2.0
// What every variant includes before it opens its namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "codebook.h"
#include "engine.h"
#include "page.h"
#include "plan.h"
#include "query_table.h"
