#include "hopper/attention.h"

#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hopper/cudnn.h"
#include "hopper/device_guard.h"
#include "hopper/device_memory.h"

namespace coda::hopper {

namespace fe = cudnn_frontend;

namespace {

using llama::AttentionShape;

void check(fe::error_t error, const std::string& what) {
  if (error.is_bad()) throw DeviceError(fmt::format("{}: cuDNN says: {}", what, error.err_msg));
}
void check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw DeviceError(fmt::format("{}: cuDNN says {}", what, fe::detail::get_error_string(status)));
}
/// What action returns; what cudnn-frontend throws becomes a DeviceError.
template <class F>
auto guarded(const char* what, F&& action) {
  try {
    return action();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw DeviceError(fmt::format("{}: cuDNN's frontend says: {}", what, error.what()));
  }
}

constexpr int64_t round_up(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

void check(const AttentionShape& shape) {
  if (shape.heads <= 0 || shape.kv_heads <= 0 || shape.heads % shape.kv_heads != 0)
    throw OperandError("shape", fmt::format("of {} heads and {} key heads", shape.heads, shape.kv_heads),
                       "a positive number of key heads that divides the heads");
  if (shape.head_dim <= 0 || shape.head_dim > 256 || shape.head_dim % 8 != 0)
    throw OperandError("shape", fmt::format("of head_dim {}", shape.head_dim),
                       "a multiple of 8 up to 256, which is what cuDNN's attention takes");
}
void check(const AttentionBatch& batch) {
  if (batch.tokens <= 0 || batch.documents <= 0 || batch.length <= 0)
    throw OperandError("batch",
                       fmt::format("of {} tokens, {} documents of {}", batch.tokens, batch.documents, batch.length),
                       "at least one of each");
  if (!batch.ragged && batch.tokens != batch.documents * batch.length)
    throw OperandError("batch",
                       fmt::format("of {} tokens, {} documents of {}", batch.tokens, batch.documents, batch.length),
                       "as many tokens as its documents have, or to be ragged");
}
template <class T>
void check(const char* name, const Matrix<T>& matrix, int64_t rows, int64_t cols) {
  if (matrix.rows != rows || matrix.cols != cols)
    throw OperandError(name, fmt::format("of shape {}x{}", matrix.rows, matrix.cols), fmt::format("{}x{}", rows, cols));
  if (matrix.stride != cols)
    throw OperandError(name, fmt::format("of stride {}", matrix.stride), fmt::format("that of its {} columns", cols));
  if (matrix.data == nullptr || reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0)
    throw OperandError(name, fmt::format("at address {}", static_cast<const void*>(matrix.data)),
                       "memory at a multiple of 16 bytes");
}

/// Names of a plan's tensors.
enum Id : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLogSumExp,
  kDOut,
  kDQ,
  kDK,
  kDV,
  kLengths,
  kQkvStarts,
  kOutStarts,
  kLogSumExpStarts
};
using Addresses = std::unordered_map<int64_t, void*>;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

/// cuDNN's graph of one launch.
class Builder {
 public:
  Builder(const AttentionShape& shape, const AttentionBatch& batch, AttentionPart part)
      : shape_(shape), batch_(batch), part_(part) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(90);
    if (!batch.ragged) return;
    lengths_ = graph_->tensor(per_document("lengths", kLengths, part.documents, fe::DataType_t::INT32));
    qkv_starts_ = starts("qkv_starts", kQkvStarts);
    out_starts_ = starts("out_starts", kOutStarts);
    log_sum_exp_starts_ = starts("log_sum_exp_starts", kLogSumExpStarts);
  }

  std::shared_ptr<fe::graph::Graph> forward(cudnnHandle_t handle, bool keep) {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(keep);
    mask(options);
    auto [out, log_sum_exp] = graph_->sdpa(q(), k(), v(), options);
    lay_out(out->set_output(true).set_uid(kOut), heads(), shape_.query_width(), out_starts_);
    if (keep) lay_out_log_sum_exp(log_sum_exp->set_output(true).set_uid(kLogSumExp));
    return build(handle);
  }

  std::shared_ptr<fe::graph::Graph> backward(cudnnHandle_t handle) {
    auto options =
        fe::graph::SDPA_backward_attributes().set_name("attention_backward").set_deterministic_algorithm(true);
    mask(options);
    fe::graph::Tensor_attributes log_sum_exp;
    lay_out_log_sum_exp(log_sum_exp.set_name("log_sum_exp").set_uid(kLogSumExp));
    auto [d_q, d_k, d_v] = graph_->sdpa_backward(
        q(), k(), v(), input("out", kOut, heads(), shape_.query_width(), out_starts_),
        input("d_out", kDOut, heads(), shape_.query_width(), out_starts_), graph_->tensor(log_sum_exp), options);
    lay_out(d_q->set_output(true).set_uid(kDQ), heads(), shape_.qkv_width(), qkv_starts_);
    lay_out(d_k->set_output(true).set_uid(kDK), part_.kv_heads, shape_.qkv_width(), qkv_starts_);
    lay_out(d_v->set_output(true).set_uid(kDV), part_.kv_heads, shape_.qkv_width(), qkv_starts_);
    return build(handle);
  }

 private:
  int64_t heads() const { return part_.kv_heads * (shape_.heads / shape_.kv_heads); }

  static fe::graph::Tensor_attributes per_document(const char* name, Id id, int64_t count, fe::DataType_t type) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(id)
        .set_dim({count, 1, 1, 1})
        .set_stride({1, 1, 1, 1})
        .set_data_type(type);
  }
  Tensor starts(const char* name, Id id) {
    return graph_->tensor(per_document(name, id, part_.documents + 1, fe::DataType_t::INT64));
  }

  /// [documents, heads, length, head_dim] in rows of width elements.
  void lay_out(fe::graph::Tensor_attributes& tensor, int64_t heads, int64_t width, const Tensor& starts) const {
    tensor.set_dim({part_.documents, heads, batch_.length, shape_.head_dim})
        .set_stride({batch_.length * width, shape_.head_dim, width, 1});
    if (starts) tensor.set_ragged_offset(starts);
  }
  /// Of equal documents: [documents, heads, length]. Of ragged ones: [M, heads], all of the heads.
  void lay_out_log_sum_exp(fe::graph::Tensor_attributes& tensor) const {
    tensor.set_dim({part_.documents, heads(), batch_.length, 1}).set_data_type(fe::DataType_t::FLOAT);
    if (batch_.ragged)
      tensor.set_stride({batch_.length * shape_.heads, 1, shape_.heads, 1}).set_ragged_offset(log_sum_exp_starts_);
    else
      tensor.set_stride({heads() * batch_.length, batch_.length, 1, 1});
  }
  Tensor input(const char* name, Id id, int64_t heads, int64_t width, const Tensor& starts) {
    fe::graph::Tensor_attributes tensor;
    lay_out(tensor.set_name(name).set_uid(id), heads, width, starts);
    return graph_->tensor(tensor);
  }
  Tensor q() { return input("q", kQ, heads(), shape_.qkv_width(), qkv_starts_); }
  Tensor k() { return input("k", kK, part_.kv_heads, shape_.qkv_width(), qkv_starts_); }
  Tensor v() { return input("v", kV, part_.kv_heads, shape_.qkv_width(), qkv_starts_); }

  template <class Options>
  void mask(Options& options) {
    options.set_attn_scale(static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.head_dim))))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (batch_.ragged) options.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
  }

  std::shared_ptr<fe::graph::Graph> build(cudnnHandle_t handle) {
    check(graph_->build(handle, {fe::HeurMode_t::A}),
          fmt::format("attention of {} heads, {} key heads, head_dim {}, {}{} documents of {}{} tokens", heads(),
                      part_.kv_heads, shape_.head_dim, batch_.ragged ? "up to " : "", part_.documents,
                      batch_.ragged ? "up to " : "", batch_.length)
              .c_str());
    return std::move(graph_);
  }

  AttentionShape shape_;
  AttentionBatch batch_;
  AttentionPart part_;
  std::shared_ptr<fe::graph::Graph> graph_ = std::make_shared<fe::graph::Graph>();
  Tensor lengths_, qkv_starts_, out_starts_, log_sum_exp_starts_;
};

int64_t workspace_of(const fe::graph::Graph& graph) {
  int64_t bytes = 0;
  check(graph.get_workspace_size(bytes), "attention's workspace");
  return bytes;
}

/// The documents of one launch as cuDNN wants them: where each starts in qkv, out and the log-sum-exps, in elements, and how long it is.
class DocumentTable {
 public:
  explicit DocumentTable(int64_t documents) : documents_(documents) {}

  int64_t bytes() const { return lengths() + round_up(documents_ * int64_t{sizeof(int32_t)}, 16); }
  /// starts has documents + 1 entries.
  void fill(std::byte* table, const AttentionShape& shape, std::span<const int64_t> starts) const {
    const int64_t widths[] = {shape.qkv_width(), shape.query_width(), shape.heads};
    for (int64_t row = 0; row < 3; ++row)
      for (int64_t i = 0; i <= documents_; ++i)
        put(table + row * row_bytes(), i, starts[static_cast<size_t>(i)] * widths[row]);
    for (int64_t i = 0; i < documents_; ++i)
      put(table + lengths(), i,
          static_cast<int32_t>(starts[static_cast<size_t>(i) + 1] - starts[static_cast<size_t>(i)]));
  }
  void add_addresses(std::byte* table, Addresses& addresses) const {
    addresses[kQkvStarts] = table;
    addresses[kOutStarts] = table + row_bytes();
    addresses[kLogSumExpStarts] = table + 2 * row_bytes();
    addresses[kLengths] = table + lengths();
  }

 private:
  template <class T>
  static void put(std::byte* to, int64_t i, T value) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
  int64_t row_bytes() const { return round_up((documents_ + 1) * int64_t{sizeof(int64_t)}, 16); }
  int64_t lengths() const { return 3 * row_bytes(); }

  int64_t documents_;
};

class Handle {
 public:
  Handle() { check(fe::detail::create_handle(&handle_), "cudnnCreate"); }
  ~Handle() { fe::detail::destroy_handle(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  operator cudnnHandle_t() const { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

/// cuDNN takes addresses of what it reads as of what it writes.
template <class T>
void* address(const T* data, int64_t offset) {
  return const_cast<T*>(data + offset);
}

}  // namespace

struct Attention::Plans {
  Plans(const AttentionShape& shape_, const AttentionBatch& batch_, bool backward_)
      : shape(shape_),
        batch(batch_),
        forward_part{.documents = batch.documents, .kv_heads = shape.kv_heads},
        part(backward_ ? backward_part(shape, batch) : forward_part),
        forward(Builder(shape, batch, forward_part).forward(handle, backward_)),
        backward(backward_ ? Builder(shape, batch, part).backward(handle) : nullptr) {
    workspace = workspace_of(*forward);
    if (backward) workspace = std::max(workspace, workspace_of(*backward));
    if (batch.ragged) tables = DeviceMemory(forward_table().bytes() + parts() * part_table().bytes());
  }

  /// Of all documents, and behind it those of the backward pass's launches.
  DocumentTable forward_table() const { return DocumentTable(batch.documents); }
  DocumentTable part_table() const { return DocumentTable(part.documents); }
  int64_t parts() const { return batch.documents / part.documents; }
  std::byte* table_of_part(int64_t i) const {
    return tables.data() + forward_table().bytes() + i * part_table().bytes();
  }

  void check_call(const Gpu& gpu) const {
    if (batch.ragged && !documents_are_set)
      throw OperandError("documents", "not set", "set_documents() first, as the batch is ragged");
    if (gpu.workspace_bytes() < workspace)
      throw OperandError("gpu", fmt::format("with a workspace of {} bytes", gpu.workspace_bytes()),
                         fmt::format("{} for attention", workspace));
  }
  void run(const Gpu& gpu, fe::graph::Graph& graph, Addresses& addresses, const char* what) {
    check(fe::detail::set_stream(handle, gpu.stream()), "cudnnSetStream");
    check(graph.execute(handle, addresses, gpu.workspace()), what);
  }

  AttentionShape shape;
  AttentionBatch batch;
  AttentionPart forward_part, part;
  Handle handle;
  std::shared_ptr<fe::graph::Graph> forward, backward;
  int64_t workspace = 0;
  DeviceMemory tables;
  bool documents_are_set = false;
};

Attention::Attention(const Gpu& gpu, const AttentionShape& shape, const AttentionBatch& batch, bool backward) {
  check(shape);
  check(batch);
  load_cudnn();
  const DeviceGuard current(gpu.device());
  // cuDNN refuses plans for a single query and key; documents of one token are ragged ones of up to two.
  AttentionBatch planned = batch;
  planned.length = std::max<int64_t>(batch.length, 2);
  planned.ragged = batch.ragged || batch.length == 1;
  plans_ = guarded("attention's plans", [&] { return std::make_unique<Plans>(shape, planned, backward); });
  if (batch.ragged || !planned.ragged) return;
  std::vector<int64_t> starts(static_cast<size_t>(batch.documents) + 1);
  std::iota(starts.begin(), starts.end(), 0);
  set_documents(gpu, starts);
}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

int64_t Attention::workspace_bytes() const {
  return plans_->workspace;
}

void Attention::set_documents(const Gpu& gpu, std::span<const int64_t> starts) {
  Plans& p = *plans_;
  const AttentionBatch& batch = p.batch;
  if (!batch.ragged) throw OperandError("batch", "of equal documents", "to be ragged for set_documents()");
  const int64_t documents = static_cast<int64_t>(starts.size()) - 1;
  if (documents < 0 || documents > batch.documents)
    throw OperandError("starts", fmt::format("of {} entries", starts.size()),
                       fmt::format("1 more than the documents, up to {}", batch.documents + 1));
  if (starts.front() != 0 || starts.back() != batch.tokens)
    throw OperandError("starts", fmt::format("from {} to {}", starts.front(), starts.back()),
                       fmt::format("to go from 0 to the {} tokens", batch.tokens));
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    if (const int64_t length = starts[i + 1] - starts[i]; length < 0 || length > batch.length)
      throw OperandError("starts", fmt::format("{} and then {} at {}", starts[i], starts[i + 1], i),
                         fmt::format("documents of 0 to {} tokens", batch.length));

  // Documents that are not there are empty ones at the end.
  std::vector<int64_t> all(starts.begin(), starts.end());
  all.resize(static_cast<size_t>(batch.documents) + 1, batch.tokens);
  std::vector<std::byte> host(static_cast<size_t>(p.tables.bytes()));
  p.forward_table().fill(host.data(), p.shape, all);
  for (int64_t i = 0; i < p.parts(); ++i)
    p.part_table().fill(host.data() + (p.table_of_part(i) - p.tables.data()), p.shape,
                        std::span(all).subspan(static_cast<size_t>(i * p.part.documents)));
  const DeviceGuard current(gpu.device());
  // Pageable memory has been read when this returns.
  check(cudaMemcpyAsync(p.tables.data(), host.data(), host.size(), cudaMemcpyHostToDevice, gpu.stream()),
        "copying attention's documents");
  p.documents_are_set = true;
}

void Attention::forward(const Gpu& gpu, Matrix<const bf16> qkv, Matrix<bf16> out, float* log_sum_exp) {
  Plans& p = *plans_;
  check("qkv", qkv, p.batch.tokens, p.shape.qkv_width());
  check("out", out, p.batch.tokens, p.shape.query_width());
  if ((log_sum_exp != nullptr) != (p.backward != nullptr))
    throw OperandError("log_sum_exp", log_sum_exp != nullptr ? "given" : "null",
                       p.backward ? "memory for the backward pass" : "to be null: the plans have no backward pass");
  p.check_call(gpu);
  const DeviceGuard current(gpu.device());
  Addresses addresses{{kQ, address(qkv.data, 0)},
                      {kK, address(qkv.data, p.shape.query_width())},
                      {kV, address(qkv.data, p.shape.query_width() + p.shape.kv_width())},
                      {kOut, out.data}};
  if (log_sum_exp != nullptr) addresses[kLogSumExp] = log_sum_exp;
  if (p.batch.ragged) p.forward_table().add_addresses(p.tables.data(), addresses);
  guarded("attention", [&] { p.run(gpu, *p.forward, addresses, "attention"); });
}

void Attention::backward(const Gpu& gpu, Matrix<const bf16> qkv, Matrix<const bf16> out, Matrix<const bf16> d_out,
                         const float* log_sum_exp, Matrix<bf16> d_qkv) {
  Plans& p = *plans_;
  if (!p.backward) throw OperandError("attention", "made without a backward pass", "one");
  check("qkv", qkv, p.batch.tokens, p.shape.qkv_width());
  check("out", out, p.batch.tokens, p.shape.query_width());
  check("d_out", d_out, p.batch.tokens, p.shape.query_width());
  check("d_qkv", d_qkv, p.batch.tokens, p.shape.qkv_width());
  if (log_sum_exp == nullptr) throw OperandError("log_sum_exp", "null", "what forward() kept");
  p.check_call(gpu);
  const DeviceGuard current(gpu.device());
  const int64_t group = p.shape.heads / p.shape.kv_heads;
  for (int64_t i = 0; i < p.parts(); ++i)
    for (int64_t kv_head = 0; kv_head < p.shape.kv_heads; kv_head += p.part.kv_heads) {
      const int64_t token = p.batch.ragged ? 0 : i * p.part.documents * p.batch.length, head = kv_head * group;
      const int64_t q = token * p.shape.qkv_width() + head * p.shape.head_dim;
      const int64_t k = token * p.shape.qkv_width() + p.shape.query_width() + kv_head * p.shape.head_dim;
      const int64_t v = k + p.shape.kv_width();
      const int64_t o = token * p.shape.query_width() + head * p.shape.head_dim;
      const int64_t sums = token * p.shape.heads + head * (p.batch.ragged ? 1 : p.batch.length);
      Addresses addresses{
          {kQ, address(qkv.data, q)},    {kK, address(qkv.data, k)},      {kV, address(qkv.data, v)},
          {kOut, address(out.data, o)},  {kDOut, address(d_out.data, o)}, {kLogSumExp, address(log_sum_exp, sums)},
          {kDQ, address(d_qkv.data, q)}, {kDK, address(d_qkv.data, k)},   {kDV, address(d_qkv.data, v)}};
      if (p.batch.ragged) p.part_table().add_addresses(p.table_of_part(i), addresses);
      guarded("attention's backward pass", [&] { p.run(gpu, *p.backward, addresses, "attention's backward pass"); });
    }
}

}  // namespace coda::hopper
