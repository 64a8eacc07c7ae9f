// SPDX-License-Identifier: Apache-2.0
// Phases of a tile base. Included inside a variant's namespace, after softmax.h.

// Cosine and sine of every plane's phase at a position, accurate to float32 at any position.
// Buffers hold a whole number of vectors.
inline void base_phases(const Rotary& rotary, int64_t position, Phases& out) {
  const int planes = rotary.num_planes;
  const int padded = (planes + kLanes - 1) / kLanes * kLanes;
  out.word.resize(padded);
  out.cosine.resize(padded);
  out.sine.resize(padded);
  const auto p = static_cast<uint64_t>(position);
  for (int i = 0; i < planes; ++i) {
    out.word[i] = static_cast<uint32_t>(rotary.turns[i] * p >> 32);
  }
  for (int i = 0; i < padded; i += kLanes) {
    // Quarter turns leave at most an eighth of a turn, where short series suffice.
    Words word;
    std::memcpy(&word, out.word.data() + i, sizeof word);
    const Words quarter = (word + (1u << 29)) >> 30;
    const Words wrapped = word - (quarter << 30);
    Integers rest;
    std::memcpy(&rest, &wrapped, sizeof rest);
    const Floats angle = __builtin_convertvector(rest, Floats) * 1.4629180792671596e-9f;
    const Floats z = angle * angle;
    const Floats s =
        angle + angle * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
    const Floats c = 1.0f - 0.5f * z +
                     z * z * (4.166664568298827e-2f +
                              z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
    const Floats cosine = (quarter & 1) != 0 ? s : c, sine = (quarter & 1) != 0 ? c : s;
    store_floats(out.cosine.data() + i, ((quarter + 1) & 2) != 0 ? -cosine : cosine);
    store_floats(out.sine.data() + i, (quarter & 2) != 0 ? -sine : sine);
  }
}

// Moves phases to a later position: exactly, or by one rotation if that is at most a page away.
// Each rotation costs about one bit in 2^24, so only a bounded number of them follow each other.
inline void move_phases(const Rotary& rotary, int64_t position, Phases& phases) {
  constexpr int kMaxAdvances = 64;
  const int64_t step = position - phases.position;
  if (phases.num_advances < 0 || phases.num_advances >= kMaxAdvances || step < 0 ||
      step > kMaxRows) {
    base_phases(rotary, position, phases);
    phases.num_advances = 0;
  } else {
    const float* cosine = rotary.cos_step.data() + step * rotary.num_planes;
    const float* sine = rotary.sin_step.data() + step * rotary.num_planes;
    float* c = phases.cosine.data();
    float* s = phases.sine.data();
    for (int i = 0; i < rotary.num_planes; ++i) {
      const float turned = c[i] * cosine[i] - s[i] * sine[i];
      s[i] = s[i] * cosine[i] + c[i] * sine[i];
      c[i] = turned;
    }
    ++phases.num_advances;
  }
  phases.position = position;
}

// A vector scaled to bytes, to be turned back by rows; its plane's phases begin at `at`.
struct Turning {
  float x, y;
  size_t at;
};
