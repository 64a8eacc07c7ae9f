// SPDX-License-Identifier: Apache-2.0
// The Engine of a kernel K; included inside a variant's namespace, after driver.h.

// Planes of all query rows of one KV head, softmax scale applied: [rows, planes, 2].
inline void plane_queries(const Rotary& rotary, const float* query, int num_rows, float scale,
                          std::vector<float>& out) {
  const int dim = 2 * rotary.num_planes;
  out.resize(static_cast<size_t>(num_rows) * dim);
  for (int v = 0; v < num_rows; ++v) {
    for (int i = 0; i < dim; ++i) out[v * dim + i] = scale * query[v * dim + rotary.channel[i]];
  }
}

template <class K>
class KernelEngine final : public Engine {
 public:
  KernelEngine(const char* name, int dim_multiple) : name_(name), dim_multiple_(dim_multiple) {}

  const char* name() const override { return name_; }
  bool fits(int head_dim) const override { return head_dim % dim_multiple_ == 0; }

  void begin(const Step& step) override {
    step_ = step;
    const size_t wanted = static_cast<size_t>(step.plan->num_heads) * step.plan->kinds.size();
    if (tables_.size() < wanted) tables_.resize(wanted);
  }

  void prepare(int head, int kind) override {
    const Plan& plan = *step_.plan;
    const Codebook& codebook = *plan.kinds[kind].codebook;
    const int rows = step_.queries->num_rows;
    thread_local std::vector<float> planes;
    plane_queries(*codebook.rotary,
                  step_.queries->data + static_cast<size_t>(head) * rows * plan.head_dim, rows,
                  step_.options->scale, planes);
    K::build(plan.kinds[kind], head, planes.data(), rows, tables_[head * plan.kinds.size() + kind]);
  }

  void run(const Chunk& chunk, Partial& out) override { run_chunk<K>(step_, chunk, tables_, out); }

 private:
  const char* name_;
  int dim_multiple_;
  Step step_{};
  std::vector<typename K::Table> tables_;
};
