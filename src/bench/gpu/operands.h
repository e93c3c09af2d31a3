// A program's operands on the GPU, and some of their rows on the host.
#pragma once
#include <cmath>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bench/bf16_path.h"
#include "coda/program.h"
#include "device.h"
#include "operand_shape.h"

namespace coda::bench {

/// Values of the vector operand of this name beside an [m, n] product, as a Llama's layer or loss has them. Throws Error for a name
/// it does not know.
std::vector<float> real_values(std::string_view name, int64_t size, int64_t n, std::mt19937_64& random);
std::vector<int32_t> index_values(std::string_view name, int64_t size, int64_t n, std::mt19937_64& random);

/// P with memory for every operand beside an [m, n] product: inputs random, outputs not initialised but for those that are added to,
/// which are small random numbers.
template <class P>
class DeviceOperands {
 public:
  DeviceOperands(int64_t m, int64_t n, RandomOperands& random) {
    make(m, n, random, std::make_integer_sequence<int, detail::field_count<P>>{});
  }

  const P& program() const { return program_; }

  /// Fills outputs with NaN, but for those that are added to.
  void poison() const {
    for (const DeviceMemory* memory : outputs_)
      check_cuda(cudaMemset(memory->as<void>(), 0xff, static_cast<size_t>(memory->bytes())), "cudaMemset");
  }

 private:
  template <int... I>
  void make(int64_t m, int64_t n, RandomOperands& random, std::integer_sequence<int, I...> /*fields*/) {
    memory_.reserve(sizeof...(I));  // outputs_ points into it
    (make_one<I>(m, n, random), ...);
  }
  template <int I>
  void make_one(int64_t m, int64_t n, RandomOperands& random) {
    constexpr Field field = describe<P>()[I];
    if constexpr (!detail::has_no_memory(field)) {
      auto& view = detail::field<detail::field_count<P>, I>(program_);
      const detail::OperandShape shape = detail::needed_shape(field, m, n);
      view = allocate(view, shape);
      if constexpr (field.direction == Direction::in || field.kind == Kind::accumulate)
        fill(view, field.name, n, random);
      else
        outputs_.push_back(&memory_.back());
    }
  }
  template <class T>
  Matrix<T> allocate(const Matrix<T>& /*type*/, const detail::OperandShape& shape) {
    memory_.emplace_back(shape.rows * shape.cols * static_cast<int64_t>(sizeof(T)));
    return {memory_.back().template as<T>(), shape.rows, shape.cols};
  }
  template <class T>
  Vector<T> allocate(const Vector<T>& /*type*/, const detail::OperandShape& shape) {
    memory_.emplace_back(shape.cols * static_cast<int64_t>(sizeof(T)));
    return {memory_.back().template as<T>(), shape.cols};
  }
  template <class T>
  void fill(const Matrix<T>& view, std::string_view /*name*/, int64_t /*n*/, RandomOperands& random) {
    random.fill(const_cast<std::remove_const_t<T>*>(view.data), view.rows * view.cols, 1);
  }
  void fill(const Vector<const float>& view, std::string_view name, int64_t n, RandomOperands& random) {
    upload(real_values(name, view.size, n, random.generator()), const_cast<float*>(view.data));
  }
  void fill(const Vector<const int32_t>& view, std::string_view name, int64_t n, RandomOperands& random) {
    upload(index_values(name, view.size, n, random.generator()), const_cast<int32_t*>(view.data));
  }

  P program_{};
  std::vector<DeviceMemory> memory_;
  std::vector<const DeviceMemory*> outputs_;
};

/// Some rows of a program's product, with its operands as they are on the GPU now, on the host: every tile as floats.
template <class P>
class SampledOperands {
 public:
  using Host = detail::on_side<P, HostSide>;

  SampledOperands(const P& program, const std::vector<int64_t>& rows) {
    take(program, rows, std::make_integer_sequence<int, detail::field_count<P>>{});
  }

  const Host& program() const { return host_; }

  /// The numbers in the Out fields, in their order, as oracle::apply has them.
  Grids outputs() const {
    Grids grids;
    add_outputs(grids, std::make_integer_sequence<int, detail::field_count<P>>{});
    return grids;
  }

 private:
  template <int... I>
  void take(const P& program, const std::vector<int64_t>& rows, std::integer_sequence<int, I...> /*fields*/) {
    (take_one<I>(program, rows), ...);
  }
  template <int I>
  void take_one(const P& program, const std::vector<int64_t>& rows) {
    constexpr Field field = describe<P>()[I];
    if constexpr (!detail::has_no_memory(field)) {
      constexpr int kFields = detail::field_count<P>;
      const auto& from = detail::field<kFields, I>(program);
      auto& to = detail::field<kFields, I>(host_);
      static_assert(field.kind != Kind::col_sum && field.kind != Kind::device_scalar, "it needs more than some rows");
      const auto count = static_cast<int64_t>(rows.size());
      if constexpr (field.kind == Kind::per_row) {
        to = {keep(to.data, download_columns(Matrix(from.data, 1, from.size), rows)), count};
      } else if constexpr (field.kind == Kind::per_col || field.kind == Kind::per_pair) {
        to = {keep(to.data, download_rows(Matrix(from.data, 1, from.size), {0})), from.size};
      } else if constexpr (field.kind == Kind::row_sum || field.kind == Kind::row_max ||
                           field.kind == Kind::row_log_sum_exp) {
        to = {keep(to.data, download_columns(from, rows)), from.rows, count};
      } else {
        to = {keep(to.data, download_rows(from, rows)), count, from.cols};
      }
    }
  }
  /// values in memory that stays, as the type that pointer points to.
  template <class To, class From>
  To* keep(To* /*type*/, const std::vector<From>& values) {
    const auto kept = std::make_shared<std::vector<std::remove_const_t<To>>>(values.begin(), values.end());
    memory_.push_back(kept);
    return kept->data();
  }

  template <int... I>
  void add_outputs(Grids& grids, std::integer_sequence<int, I...> /*fields*/) const {
    (add_output<I>(grids), ...);
  }
  template <int I>
  void add_output(Grids& grids) const {
    constexpr Field field = describe<P>()[I];
    if constexpr (field.direction == Direction::out && !detail::has_no_memory(field)) {
      const auto& view = detail::field<detail::field_count<P>, I>(host_);
      oracle::Grid<double> grid(view.rows, view.cols);
      for (int64_t i = 0; i < view.rows; ++i)
        for (int64_t j = 0; j < view.cols; ++j) grid(i, j) = number(view(i, j));
      grids.push_back(std::move(grid));
    }
  }
  static double number(float x) { return static_cast<double>(x); }
  static double number(const MaxSum& x) { return static_cast<double>(x.max) + std::log(static_cast<double>(x.sum)); }

  Host host_{};
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace coda::bench
