// SPDX-License-Identifier: Apache-2.0
// What the kernels' stand-ins take from the system, apart so that it can be compiled once for all of them.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
