// SPDX-License-Identifier: Apache-2.0
// Python bindings. Tensors arrive as addresses: the caller keeps them alive and contiguous.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "drop.h"
#include "encode.h"
#include "engine.h"
#include "fit.h"
#include "prompt_rows.h"
#include "recode.h"
#include "team.h"

namespace nb = nanobind;
using namespace sphkv;

namespace {

template <class T>
const T* at_address(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

// An engine holds the tables of one step, so steps take turns.
struct EngineSlot {
  std::unique_ptr<Engine> engine;
  std::mutex mutex;
};

std::unique_ptr<Engine> make_engine(const std::string& name) {
  if (name == "neon") return make_neon_engine();
  if (name == "avx512") return make_avx512_engine();
  if (name == "avx2") return make_avx2_engine();
  if (name == "float32") return make_exact_engine();
  if (name == "rebuild") {
    if (auto engine = make_neon_rebuild_engine()) return engine;
    if (auto engine = make_avx512_rebuild_engine()) return engine;
    if (auto engine = make_avx2_rebuild_engine()) return engine;
    return make_exact_rebuild_engine();
  }
  throw std::invalid_argument("no kernel variant is called " + name);
}

std::vector<std::string> variants() {
  std::vector<std::string> out;
  for (const char* name : {"neon", "avx512", "avx2", "float32", "rebuild"}) {
    if (make_engine(name) != nullptr) out.emplace_back(name);
  }
  return out;
}

EngineSlot* new_slot(const std::string& name) {
  auto slot = std::make_unique<EngineSlot>();
  slot->engine = make_engine(name);
  if (slot->engine == nullptr) {
    throw std::invalid_argument("this processor or build has no kernel variant " + name);
  }
  return slot.release();
}

// Offsets in the order of sphkv.attention.native.backend.layout_fields.
PageKind make_kind(const std::vector<int>& fields, const Codebook* codebook) {
  if (fields.size() != 9) throw std::invalid_argument("a page kind has 9 layout fields");
  PageKind kind;
  PageLayout& layout = kind.layout;
  int* const place[] = {&layout.tokens,       &layout.key_offset,      &layout.radius_offset,
                        &layout.scale_offset, &layout.value_offset,    &layout.position_offset,
                        &layout.value_bits,   &layout.page_bytes};
  for (int i = 0; i < 8; ++i) *place[i] = fields[i];
  layout.mode = static_cast<PositionMode>(fields[8]);
  kind.codebook = codebook;
  return kind;
}

void check_page(const uint8_t* page, const PageKind& kind) {
  const PageHeader& header = header_of(page);
  if (header.version != kPageVersion || header.capacity != kind.layout.tokens ||
      header.mode != static_cast<int>(kind.layout.mode) || header.count > kind.layout.tokens) {
    throw std::invalid_argument("a page header contradicts its layout");
  }
}

// addresses and kinds [pages], first_page [heads + 1], all int64
Plan* make_plan(int num_heads, int head_dim, const std::vector<PageKind>& kinds,
                uintptr_t addresses, uintptr_t page_kinds, uintptr_t first_page) {
  auto plan = std::make_unique<Plan>();
  plan->num_heads = num_heads;
  plan->head_dim = head_dim;
  plan->kinds = kinds;
  const auto* first = at_address<int64_t>(first_page);
  plan->first_page.assign(first, first + num_heads + 1);
  const int64_t num_pages = first[num_heads];
  for (int64_t i = 0; i < num_pages; ++i) {
    plan->page.push_back(at_address<uint8_t>(at_address<int64_t>(addresses)[i]));
    plan->kind.push_back(static_cast<int32_t>(at_address<int64_t>(page_kinds)[i]));
    check_page(plan->page.back(), kinds.at(plan->kind.back()));
  }
  return plan.release();
}

struct Call {
  Tail tail;
  Queries queries;
  Options options;
};

void run(EngineSlot& slot, const Plan& plan, const Call& call, uintptr_t output, uintptr_t lse) {
  if (!slot.engine->fits(plan.head_dim)) {
    throw std::invalid_argument("this kernel variant cannot read head_dim " +
                                std::to_string(plan.head_dim));
  }
  nb::gil_scoped_release unlocked;
  std::lock_guard<std::mutex> turn(slot.mutex);
  attend(*slot.engine, plan, call.tail, call.queries, call.options,
         reinterpret_cast<float*>(output), reinterpret_cast<float*>(lse));
}

void check_sizes(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, size_t num_in,
                 const std::vector<uintptr_t>& out, size_t num_out) {
  if (sizes.size() != 4 || in.size() != num_in || out.size() != num_out) {
    throw std::invalid_argument("an encoder got the wrong number of sizes or tensors");
  }
}

// sizes: rows, tokens, planes, slots; tensors in the order of KeyRows and encode_key_rows
void encode_keys(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, int threads,
                 const std::vector<uintptr_t>& out) {
  check_sizes(sizes, in, 6, out, 3);
  const KeyRows keys{sizes[0], sizes[1], sizes[2], sizes[3], at_address<float>(in[0]),
                     at_address<int64_t>(in[1]), at_address<int64_t>(in[2]),
                     at_address<float>(in[3]), at_address<float>(in[4]), at_address<float>(in[5])};
  nb::gil_scoped_release unlocked;
  encode_key_rows(keys, threads, reinterpret_cast<uint8_t*>(out[0]),
                  reinterpret_cast<float*>(out[1]), reinterpret_cast<float*>(out[2]));
}

// clips: ratios, cells
ClipTable clip_table(const std::vector<int>& clips, uintptr_t weights) {
  if (clips.size() != 2 || clips[0] != kClipRatios || clips[1] != kClipCells) {
    throw std::invalid_argument("a clip table has 16 ratios and 128 cells");
  }
  return {at_address<int32_t>(weights)};
}

// sizes: rows, tokens, dim, bits
void fit_steps(const std::vector<int>& sizes, const std::vector<uintptr_t>& in,
               const std::vector<int>& clips, int num_refinements, int threads, uintptr_t step) {
  check_sizes(sizes, in, 2, {}, 0);
  const ValueRows values{sizes[0], sizes[1], sizes[2], sizes[3], at_address<float>(in[0])};
  const ClipTable table = clip_table(clips, in[1]);
  nb::gil_scoped_release unlocked;
  fit_value_steps(values, table, num_refinements, threads, reinterpret_cast<float*>(step));
}

void encode_values(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, float coarse,
                   int threads, const std::vector<uintptr_t>& out) {
  check_sizes(sizes, in, 5, out, 2);
  const ValueRows values{sizes[0], sizes[1], sizes[2], sizes[3], at_address<float>(in[0])};
  const ScaleRows scales{at_address<float>(in[1]), at_address<float>(in[2]),
                         at_address<float>(in[3]), at_address<uint8_t>(in[4]), coarse};
  nb::gil_scoped_release unlocked;
  encode_value_rows(values, scales, threads, reinterpret_cast<uint8_t*>(out[0]),
                    reinterpret_cast<uint8_t*>(out[1]));
}

// What one of these names, null where it does not run here: avx512, avx2, float32.
template <class Found>
Found find_variant(const std::string& name, Found (*avx512)(), Found (*avx2)(), Found (*plain)()) {
  if (name == "avx512") return avx512();
  if (name == "avx2") return avx2();
  if (name == "float32") return plain();
  throw std::invalid_argument("no recoder is called " + name);
}

RecodePage find_recoder(const std::string& name) {
  return find_variant(name, avx512_recoder, avx2_recoder, plain_recoder);
}

std::vector<std::string> recoders() {
  std::vector<std::string> out;
  for (const char* name : {"avx512", "avx2", "float32"}) {
    if (find_recoder(name) != nullptr) out.emplace_back(name);
  }
  return out;
}

const PromptRows& prompt_rows(const std::string& name) {
  const PromptRows* rows =
      find_variant(name, avx512_prompt_rows, avx2_prompt_rows, plain_prompt_rows);
  if (rows == nullptr) {
    throw std::invalid_argument("this processor or build has no recoder " + name);
  }
  return *rows;
}

// sizes: rows, tokens, points; in: samples, weights or 0
PlaneSamples plane_samples(const std::vector<int>& sizes, const std::vector<uintptr_t>& in) {
  if (sizes.size() < 3 || in.size() < 2 || sizes[2] < 1 || sizes[2] > kMostPoints) {
    throw std::invalid_argument("points are fitted to rows of samples, 1 to 256 to each");
  }
  return {sizes[0], sizes[1], at_address<float>(in[0]), at_address<float>(in[1])};
}

// in: samples, 0, points
void find_points(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, int threads,
                 uintptr_t index, const std::string& variant) {
  const PlaneSamples samples = plane_samples(sizes, in);
  const PromptRows& rows = prompt_rows(variant);
  nb::gil_scoped_release unlocked;
  nearest_points(rows, samples, sizes[2], at_address<float>(in.at(2)), threads,
                 reinterpret_cast<int64_t*>(index));
}

// sizes: rows, tokens, points afterwards, rounds; in: samples, weights, points
void grow(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, float split, int threads,
          uintptr_t found, const std::string& variant) {
  const PlaneSamples samples = plane_samples(sizes, in);
  const Growth growth{sizes[2] / 2, sizes.at(3), split};
  const PromptRows& rows = prompt_rows(variant);
  nb::gil_scoped_release unlocked;
  grow_points(rows, samples, growth, at_address<float>(in.at(2)), threads,
              reinterpret_cast<float*>(found));
}

// sizes: rows, tokens, points of a stage, rounds; stages are changed in place
void alternate(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, int threads,
               const std::vector<uintptr_t>& stages, const std::string& variant) {
  const PlaneSamples samples = plane_samples(sizes, in);
  const int rounds = sizes.at(3);
  const PromptRows& rows = prompt_rows(variant);
  nb::gil_scoped_release unlocked;
  alternate_stages(rows, samples, sizes[2], rounds, threads,
                   reinterpret_cast<float*>(stages.at(0)), reinterpret_cast<float*>(stages.at(1)));
}

// sizes: rows, tokens, sums, points of the first stage, of the second, rounds, sweeps
void refine(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, float relaxation,
            int threads, const std::vector<uintptr_t>& stages, const std::string& variant) {
  const PlaneSamples samples = plane_samples(sizes, in);
  const PromptRows& rows = prompt_rows(variant);
  const SumFit fit{sizes.at(3), sizes.at(4), sizes.at(5), sizes.at(6), relaxation};
  if (fit.first * fit.second != sizes[2]) {
    throw std::invalid_argument("stages have another number of sums than was said");
  }
  nb::gil_scoped_release unlocked;
  refine_stages(rows, samples, fit, threads, reinterpret_cast<float*>(stages.at(0)),
                reinterpret_cast<float*>(stages.at(1)));
}

// sizes: heads, rows, tokens, dim, blocks, units of a block, tokens of a unit; tensors in the order
// of DropRows
void drop(const std::vector<int>& sizes, const std::vector<uintptr_t>& in, float least_mass,
          int threads, uintptr_t loss, const std::string& variant) {
  if (sizes.size() != 7 || in.size() != 6) {
    throw std::invalid_argument("losses of dropping got the wrong number of sizes or tensors");
  }
  const DropRows job{sizes[0], sizes[1], sizes[2], sizes[3], at_address<float>(in[0]),
                     at_address<uint8_t>(in[1]), at_address<float>(in[2]),
                     at_address<float>(in[3]), at_address<float>(in[4]), sizes[4], sizes[5],
                     sizes[6], at_address<int64_t>(in[5]), least_mass};
  const PromptRows& rows = prompt_rows(variant);
  nb::gil_scoped_release unlocked;
  drop_losses(rows, job, threads, reinterpret_cast<float*>(loss));
}

// What both ways to make pages have in common. sizes: head_dim, heads of a layer, rows; in: metric
// roots, heads, clip weights; clips: ratios, cells, refinements; reading: coarse, gain
Recoding page_job(const std::vector<int>& sizes, const std::vector<PageKind>& targets,
                  const std::vector<uintptr_t>& in, const std::vector<int>& clips,
                  const std::vector<float>& reading, uintptr_t pages) {
  if (sizes.size() != 3 || in.size() != 3 || clips.size() != 3 || reading.size() != 2) {
    throw std::invalid_argument("a recoder got the wrong number of sizes or tensors");
  }
  Recoding job;
  job.head_dim = sizes[0];
  job.num_heads = sizes[1];
  job.targets = targets;
  job.metric_root = at_address<float>(in[0]);
  job.rows = sizes[2];
  job.head = at_address<int64_t>(in[1]);
  for (int row = 0; row < job.rows; ++row) {
    const int64_t layer = job.num_heads > 0 ? job.head[row] / job.num_heads : -1;
    const bool is_known = job.head[row] >= 0 && layer < static_cast<int64_t>(targets.size());
    if (!is_known || targets[layer].codebook == nullptr) {
      throw std::invalid_argument("there is no codebook for head " +
                                  std::to_string(job.head[row]) + " of all layers");
    }
  }
  job.rule = {clip_table({clips[0], clips[1]}, in[2]), clips[2], reading[0], reading[1]};
  job.pages = reinterpret_cast<uint8_t*>(pages);
  return job;
}

void run_job(const Recoding& job, int threads, const std::string& variant) {
  const RecodePage recode_page = find_recoder(variant);
  if (recode_page == nullptr) {
    throw std::invalid_argument("this processor or build has no recoder " + variant);
  }
  nb::gil_scoped_release unlocked;
  recode_pages(job, recode_page, threads);
}

// from: addresses, kinds and picks
void recode(const std::vector<int>& sizes, const std::vector<PageKind>& targets,
            const std::vector<uintptr_t>& in, const std::vector<int>& clips,
            const std::vector<float>& reading, const std::vector<PageKind>& sources,
            const std::vector<uintptr_t>& from, int threads, uintptr_t pages,
            const std::string& variant) {
  Recoding job = page_job(sizes, targets, in, clips, reading, pages);
  if (from.size() != 3) throw std::invalid_argument("pages are addresses, kinds and picks");
  job.sources = sources;
  job.address = at_address<int64_t>(from[0]);
  job.kind = at_address<int64_t>(from[1]);
  job.pick = at_address<int64_t>(from[2]);
  run_job(job, threads, variant);
}

void encode(const std::vector<int>& sizes, const std::vector<PageKind>& targets,
            const std::vector<uintptr_t>& in, const std::vector<int>& clips,
            const std::vector<float>& reading, uintptr_t keys, uintptr_t values, int threads,
            uintptr_t pages, const std::string& variant) {
  Recoding job = page_job(sizes, targets, in, clips, reading, pages);
  job.keys = at_address<float>(keys);
  job.values = at_address<float>(values);
  run_job(job, threads, variant);
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);
  m.def("variants", &variants, "Kernel variants this processor can run, fastest first.");
  m.def("team_name", &team_name, "Whose threads a step uses.");
  m.attr("HEADER_BYTES") = static_cast<int>(sizeof(PageHeader));
  m.attr("PAGE_VERSION") = static_cast<int>(kPageVersion);
  m.attr("SOURCES") = SPHKV_SOURCES;

  nb::class_<Rotary>(m, "Rotary")
      .def("__init__",
           [](Rotary* self, int planes, uintptr_t radians, uintptr_t channels) {
             new (self) Rotary(planes, at_address<double>(radians), at_address<int64_t>(channels));
           })
      .def_prop_ro("nbytes", &Rotary::nbytes);
  nb::class_<Codebook>(m, "Codebook")
      .def("__init__",
           [](Codebook* self, const Rotary* rotary, int heads, int slots, uintptr_t points,
              uintptr_t slot_plane, uintptr_t num_pairs, uintptr_t constant) {
             new (self) Codebook(rotary, heads, slots, at_address<float>(points),
                                 at_address<int64_t>(slot_plane), at_address<int64_t>(num_pairs),
                                 at_address<float>(constant));
           },
           nb::keep_alive<1, 2>())
      .def_prop_ro("nbytes", &Codebook::nbytes);
  nb::class_<PageKind>(m, "PageKind");
  m.def("make_kind", &make_kind, nb::arg("fields"), nb::arg("codebook").none(),
        nb::keep_alive<0, 2>());
  nb::class_<Plan>(m, "Plan");
  m.def("make_plan", &make_plan, nb::rv_policy::take_ownership, nb::keep_alive<0, 3>());
  nb::class_<EngineSlot>(m, "Engine").def("fits", [](const EngineSlot& self, int head_dim) {
    return self.engine->fits(head_dim);
  });
  m.def("make_engine", &new_slot, nb::rv_policy::take_ownership);
  nb::class_<Call>(m, "Call")
      .def(nb::init<>())
      .def("set_tail",
           [](Call& self, uintptr_t keys, uintptr_t values, int64_t head_stride, int tokens,
              int64_t first_position) {
             self.tail = {at_address<uint16_t>(keys), at_address<uint16_t>(values), head_stride,
                          tokens, first_position};
           })
      .def("set_queries",
           [](Call& self, uintptr_t data, uintptr_t positions, int queries, int rows) {
             self.queries = {at_address<float>(data), at_address<int64_t>(positions), queries,
                             rows};
           })
      .def("set_options", [](Call& self, float scale, float softcap, int64_t window, int threads) {
        self.options = {scale, softcap, window, threads, false};
      });
  m.def("attend", &run);
  m.def("encode_keys", &encode_keys);
  m.def("fit_value_steps", &fit_steps);
  m.def("encode_values", &encode_values);
  m.def("drop_losses", &drop);
  m.def("find_points", &find_points);
  m.def("grow_points", &grow);
  m.def("alternate_stages", &alternate);
  m.def("refine_stages", &refine);
  m.def("recoders", &recoders, "Variants of what makes pages and reads prompts here, fastest first.");
  m.def("recode_pages", &recode);
  m.def("encode_pages", &encode);
}
