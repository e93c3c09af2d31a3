#include "step.h"

#include <algorithm>
#include <fstream>
#include <random>
#include <string>

#include "buffer.h"
#include "llama/attention.h"
#include "random_batch.h"

namespace coda::bench {

namespace {

using llama::Config;

/// A field of /proc/self/status in bytes, 0 where there is none.
int64_t resident(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  return 0;
}

/// The plain products of one step on the same memory again and again.
class Products {
 public:
  Products(OpenBlas& openblas, const Config& c, int64_t m) : openblas_(openblas) {
    // {rows, columns} of every weight, and how many there are of it.
    struct Weight {
      int64_t out, in, count;
    };
    for (const Weight& w :
         {Weight{c.qkv_width(), c.hidden, c.layers}, Weight{c.hidden, c.query_width(), c.layers},
          Weight{2 * c.ffn, c.hidden, c.layers}, Weight{c.hidden, c.ffn, c.layers}, Weight{c.vocab, c.hidden, 1}})
      for (int64_t i = 0; i < w.count; ++i) {
        list_.push_back({Form::TN, m, w.out, w.in, nullptr, nullptr, nullptr});
        list_.push_back({Form::NN, m, w.in, w.out, nullptr, nullptr, nullptr});
        list_.push_back({Form::NT, w.out, w.in, m, nullptr, nullptr, nullptr});
      }
    int64_t a = 0, b = 0, out = 0;
    for (const Product& p : list_) {
      a = std::max(a, p.m * p.k);
      b = std::max(b, p.n * p.k);
      out = std::max(out, p.m * p.n);
      flops_ += 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    }
    a_ = Buffer<float>(1, a);
    b_ = Buffer<float>(1, b);
    out_ = Buffer<float>(1, out);
    std::fill_n(a_.matrix().data, a, 0.5f);
    std::fill_n(b_.matrix().data, b, 0.25f);
    for (Product& p : list_) {
      p.a = a_.matrix().data;
      p.b = b_.matrix().data;
      p.out = out_.matrix().data;
    }
  }
  void run() const {
    for (const Product& p : list_) openblas_(p);
  }
  double flops() const { return flops_; }

 private:
  OpenBlas& openblas_;
  std::vector<Product> list_;
  Buffer<float> a_, b_, out_;
  double flops_ = 0;
};

template <class E>
class Attention {
 public:
  Attention(Cpu& cpu, const Config& c, std::span<const int64_t> starts, int64_t m)
      : cpu_(cpu),
        shape_{c.heads, c.kv_heads, c.head_dim},
        starts_(starts),
        layers_(c.layers),
        qkv_(m, c.qkv_width()),
        out_(m, c.query_width()),
        d_out_(m, c.query_width()),
        d_qkv_(m, c.qkv_width()),
        log_sum_exp_(c.heads, m) {
    std::mt19937_64 random(2);
    std::normal_distribution<float> normal;
    for (E& x : qkv_.span()) x = static_cast<E>(normal(random));
    for (E& x : d_out_.span()) x = static_cast<E>(normal(random));
  }
  void run() {
    for (int64_t i = 0; i < layers_; ++i) {
      attention_forward<E>(cpu_, shape_, starts_, qkv_.matrix(), out_.matrix(), log_sum_exp_.matrix());
      attention_backward<E>(cpu_, shape_, starts_, qkv_.matrix(), out_.matrix(), d_out_.matrix(), log_sum_exp_.matrix(),
                            d_qkv_.matrix());
    }
  }

 private:
  Cpu& cpu_;
  llama::AttentionShape shape_;
  std::span<const int64_t> starts_;
  int64_t layers_;
  Buffer<E> qkv_, out_, d_out_, d_qkv_;
  Buffer<float> log_sum_exp_;
};

template <class E>
StepReport run(Cpu& cpu, OpenBlas& openblas, const Config& config, llama::Dtype dtype, int64_t rows, int64_t seq,
               const Rounds& rounds) {
  const int64_t m = rows * seq;
  const RandomBatch random(config.vocab, rows, seq);
  const llama::Batch batch = random.batch();
  const llama::AdamW options;

  StepReport report{};
  report.tokens = m;
  report.parameters = llama::parameter_count(config);
  llama::Model model(cpu, config, dtype);
  model.initialize(1);
  const auto forward_backward = [&] { model.forward_backward(batch, static_cast<double>(m)); };
  const auto step = [&] {
    forward_backward();
    model.update(options);
  };
  report.bytes_before = resident("VmRSS");
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  step();
  step();
  report.bytes_of_step = std::max<int64_t>(0, resident("VmHWM") - report.bytes_before);

  const Products products(openblas, config, m);
  report.product_flops = products.flops();
  Attention<E> attention(cpu, config, batch.document_starts, m);
  const std::vector<Time> times = measure({{"step", step},
                                           {"forward and backward", forward_backward},
                                           {"attention", [&] { attention.run(); }},
                                           {"products", [&] { products.run(); }}},
                                          rounds);
  report.step = times[0];
  report.forward_backward = times[1];
  report.attention = times[2];
  report.products = times[3];
  return report;
}

}  // namespace

StepReport bench_step(Cpu& cpu, OpenBlas& openblas, const Config& config, llama::Dtype dtype, int64_t rows, int64_t seq,
                      const Rounds& rounds) {
  if (dtype == llama::Dtype::bf16) return run<bf16>(cpu, openblas, config, dtype, rows, seq, rounds);
  return run<float>(cpu, openblas, config, dtype, rows, seq, rounds);
}

}  // namespace coda::bench
