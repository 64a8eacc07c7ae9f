// SPDX-License-Identifier: Apache-2.0
// What the kernels know of a page. sphkv/store/layout.py draws the layout; stream offsets come
// from there at run time, and native tests read pages that it wrote.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sphkv {

constexpr int kGroupTokens = 16;      // states one look-up register serves; a RUNS run
constexpr int kSlotLevels = 16;       // points a four-bit code picks from
constexpr int kMaxPageTokens = 128;
constexpr int kMaxRows = kMaxPageTokens;
constexpr uint8_t kPageVersion = 0xA1;

enum class PositionMode : int { kContiguous = 0, kRuns = 1, kTokens = 2 };

struct PageHeader {
  uint8_t version, tier, mode, reserved;
  uint16_t count, capacity;
  int32_t position_base;
  float radius_lo, radius_step, scale_lo, scale_step;
  uint32_t offsets[5];
  uint8_t flags[16];
};
static_assert(sizeof(PageHeader) == 64, "a page header has 64 bytes");

// Streams of one kind of page; offsets in bytes from the page start.
struct PageLayout {
  int tokens = 0;
  int key_offset = 0;
  int radius_offset = 0;
  int scale_offset = 0;
  int value_offset = 0;
  int position_offset = 0;
  int value_bits = 0;
  int page_bytes = 0;
  PositionMode mode = PositionMode::kContiguous;

  int slot_stride() const { return tokens / 2; }
};

inline const PageHeader& header_of(const uint8_t* page) {
  return *reinterpret_cast<const PageHeader*>(page);
}

// Position of every state below the count; `out` has room for a whole page.
inline void read_positions(const uint8_t* page, const PageLayout& layout, int32_t* out) {
  const PageHeader& header = header_of(page);
  const auto* words = reinterpret_cast<const int32_t*>(page + layout.position_offset);
  const int count = header.count;
  if (layout.mode == PositionMode::kTokens) {
    for (int t = 0; t < count; ++t) out[t] = words[t];
    return;
  }
  for (int first = 0; first < count; first += kGroupTokens) {
    const int32_t base = layout.mode == PositionMode::kRuns ? words[first / kGroupTokens]
                                                            : header.position_base + first;
    // slack of the last group is written too, which is cheaper than to stop
    for (int i = 0; i < kGroupTokens; ++i) out[first + i] = base + i;
  }
}

}  // namespace sphkv
