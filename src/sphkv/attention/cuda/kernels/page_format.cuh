// SPDX-License-Identifier: Apache-2.0
// Byte offsets of a page. store/layout.py draws it; tests/store/test_page_format.py compares every
// number here with it.
#pragma once

// Fields of the header.
constexpr int HEADER_BYTES = 64;
constexpr int COUNT_OFFSET = 4;          // u16
constexpr int POSITION_BASE_OFFSET = 8;  // i32
constexpr int RADIUS_LOW_OFFSET = 12;    // f32, as those that follow
constexpr int RADIUS_STEP_OFFSET = 16;
constexpr int SCALE_LOW_OFFSET = 20;
constexpr int SCALE_STEP_OFFSET = 24;
constexpr int FLAGS_OFFSET = 48;

// Streams of a page of TOKENS coded states. POSITIONS is the mode in the header: one base, one
// position per 16 states, one per state.
template <int TOKENS, int HEAD_DIM, int SLOTS, int VALUE_BITS, int POSITIONS>
struct PageStreams {
  static constexpr int KEYS = HEADER_BYTES;
  static constexpr int RADII = KEYS + SLOTS * TOKENS / 2;
  static constexpr int SCALES = RADII + TOKENS;
  static constexpr int VALUES = SCALES + (VALUE_BITS < 16 ? TOKENS : 0);
  static constexpr int PLACES = VALUES + TOKENS * HEAD_DIM * VALUE_BITS / 8;
  static constexpr int NUM_PLACES = POSITIONS == 0 ? 0 : POSITIONS == 1 ? TOKENS / 16 : TOKENS;
  static constexpr int END = PLACES + 4 * NUM_PLACES;
  static constexpr int BYTES = (END + 63) / 64 * 64;
};
