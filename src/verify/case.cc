#include "verify/case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace coda::verify {

// Operands are most of the time of a case, and the standard library's distributions most of the time of operands.
double uniform(Random& random, double low, double high) {
  return low + (high - low) * static_cast<double>(random() >> 11U) * 0x1p-53;
}
/// Nearly: the sum of four uniform numbers, of mean 0 and variance 1.
double normal(Random& random) {
  const uint64_t bits = random();
  double sum = 0;
  for (unsigned shift : {0U, 16U, 32U, 48U}) sum += static_cast<double>((bits >> shift) & 0xffffU);
  return (sum * 0x1p-16 - 2) * 1.7320508075688772;  // √3
}

double sample(std::string_view name, Random& random, int64_t n) {
  if (name == "inv_rms" || name == "inv_std") return uniform(random, 0.25, 1.5);
  if (name == "label")
    return uniform(random, 0, 1) < 0.1 ? -100 : std::floor(uniform(random, 0, 0.999) * static_cast<double>(n));
  if (name == "position") return std::floor(uniform(random, 0, 131072));
  if (name == "turns_high") return uniform(random, 0, 1) < 0.25 ? 0 : 0.159 * std::exp(uniform(random, -9, 0));
  if (name == "turns_low") return uniform(random, -1, 1) * 0x1p-28;
  if (name == "log_sum_exp") return uniform(random, 2, 5);
  if (name == "maxima") return uniform(random, 0, 3);
  if (name == "eps") return 1e-3;
  if (name == "scale") return uniform(random, 0.1, 0.5);
  if (name == "cap") return uniform(random, 5, 30);
  if (name == "offset" || name == "shift") return std::floor(uniform(random, -3, 4));
  if (name == "d_log_sum_exp" || name == "d_label_logit" || name == "d_logit_sum")
    return uniform(random, 0, 1) < 0.2 ? 0 : uniform(random, -1, 1);
  if (name == "limit") return uniform(random, 0.3, 1.5);
  if (name == "alpha") return uniform(random, 1, 2);
  if (name == "normed_columns") return 16 * std::floor(uniform(random, 0, 1) * static_cast<double>(n) / 16);
  return normal(random);
}

// ---- memory

Storage::Storage(std::string name, int64_t rows, int64_t cols, int64_t stride, int64_t element_bytes, int64_t alignment)
    : name_(std::move(name)),
      rows_(rows),
      cols_(cols),
      stride_(stride),
      element_bytes_(element_bytes),
      offset_(static_cast<size_t>(64 + alignment)) {
  bytes_.resize(offset_ + static_cast<size_t>(rows * stride * element_bytes) + 64, std::byte{0xff});
}

void Storage::reset(int64_t i, int64_t j) {
  const auto at = static_cast<std::ptrdiff_t>(byte_of(i, j));
  std::copy_n(before_.begin() + at, element_bytes_, bytes_.begin() + at);
}

std::optional<std::string> Storage::trespass() const {
  // Of an output, what lies in front of a row and behind the row before it.
  size_t begin = 0;
  for (int64_t i = 0; i <= rows_; ++i) {
    const bool last = i == rows_ || !output_;
    const size_t end = last ? bytes_.size() : byte_of(i, 0);
    if (std::memcmp(&bytes_[begin], &before_[begin], end - begin) != 0) {
      while (bytes_[begin] == before_[begin]) ++begin;
      const auto at = static_cast<int64_t>(begin) - static_cast<int64_t>(offset_);
      const int64_t row_bytes = std::max<int64_t>(1, stride_ * element_bytes_);
      return fmt::format("{}: {} was written, at row {}, column {}", name_,
                         output_ ? "memory outside the output" : "an input", at / row_bytes,
                         at % row_bytes / element_bytes_);
    }
    if (last) break;
    begin = byte_of(i, cols_);
  }
  return std::nullopt;
}

// ---- deviations

std::ostream& operator<<(std::ostream& out, const Deviation& d) {
  return out << fmt::format("{} at row {}, column {} is {:.9g}, not {:.9g} ± {:.3g}", d.output, d.row, d.col, d.got,
                            d.want, d.allowed);
}

double ulp(double x, ElementType element) {
  const int bits = element == ElementType::bfloat16 ? 7 : 23;
  return std::ldexp(1.0, std::max(std::ilogb(x), -126) - bits);
}

namespace {

double allowed(Bounded want, ElementType element) {
  const double magnitude = std::fabs(want.value) + want.error;
  const double rounding =
      element == ElementType::bfloat16 ? Bounded::half_unit_bf16(magnitude) : kFloatRounding * magnitude;
  return want.error + rounding + std::numeric_limits<float>::min();
}

/// Of the values that are finite.
double root_mean_square(const oracle::Grid<Bounded>& x) {
  double sum = 0;
  int64_t count = 0;
  for (const Bounded& v : x.values)
    if (std::isfinite(v.value)) {
      sum += v.value * v.value;
      ++count;
    }
  return count > 0 ? std::sqrt(sum / static_cast<double>(count)) : 0;
}

}  // namespace

double share(double got, Bounded want, ElementType element) {
  if (got == want.value) return 0;  // infinities too
  const double off = std::fabs(got - want.value) / allowed(want, element);
  return off >= 0 ? off : std::numeric_limits<double>::infinity();
}

// ---- the case

void AnyCase::product(ElementType a, ElementType b, int64_t k, Order a_order, Order b_order) {
  a_ = make_factor(a, "a", m_, k, a_order, acc_a_);
  b_ = make_factor(b, "b", n_, k, b_order, acc_b_);
  is_map_ = false;
  acc_ = oracle::Grid<Bounded>(m_, n_);
  for (int64_t i = 0; i < m_; ++i)
    for (int64_t j = 0; j < n_; ++j) {
      double sum = 0, magnitude = 0;
      const double *row_a = acc_a_.values.data() + i * k, *row_b = acc_b_.values.data() + j * k;
      for (int64_t d = 0; d < k; ++d) {
        const double term = row_a[d] * row_b[d];
        sum += term;
        magnitude += std::fabs(term);
      }
      // The partial sums of a row are themselves of size √K or less beside magnitude: √K roundings of all of it are generous.
      acc_(i, j) = {sum, (1 + std::sqrt(static_cast<double>(k))) * kFloatRounding * magnitude};
    }
  make_operands();
}

void AnyCase::map(ElementType x) {
  a_ = make_factor(x, kMapped, m_, n_, Order::plain, acc_a_);
  is_map_ = true;
  acc_ = oracle::Grid<Bounded>(m_, n_);
  for (size_t i = 0; i < acc_.values.size(); ++i) acc_.values[i] = Bounded(acc_a_.values[i]);
  make_operands();
}

template <class T>
coda::detail::Factor AnyCase::make_factor(const std::string& name, int64_t rows, int64_t depth, Order order,
                                          oracle::Grid<double>& elements) {
  const bool transposed = order == Order::transposed;
  const int64_t stored_rows = transposed ? depth : rows, stored_cols = transposed ? rows : depth;
  // Accumulators of about the size of a block's, whatever the depth.
  const double scale = name == "a" ? 1.5 / std::sqrt(static_cast<double>(std::max<int64_t>(depth, 1))) : 1;
  Storage& memory =
      fill<T>(make_storage<T>(name, stored_rows, stored_cols, Layout::tile), stored_rows, stored_cols, scale);
  const Matrix<const T> view(memory.data<T>(), stored_rows, stored_cols, memory.stride());
  elements = transposed ? oracle::elements(transpose(view)) : oracle::elements(view);
  return transposed ? coda::detail::factor(transpose(view)) : coda::detail::factor(view);
}

coda::detail::Factor AnyCase::make_factor(ElementType element, const std::string& name, int64_t rows, int64_t depth,
                                          Order order, oracle::Grid<double>& elements) {
  return element == ElementType::bfloat16 ? make_factor<bf16>(name, rows, depth, order, elements)
                                          : make_factor<float>(name, rows, depth, order, elements);
}

std::pair<int64_t, int64_t> AnyCase::shape_of(const Field& field) const {
  switch (field.kind) {
    case Kind::half_tile:
      return {m_, n_ / 2};
    case Kind::double_tile:
      return {m_, 2 * n_};
    case Kind::row_sum:
    case Kind::row_max:
    case Kind::row_log_sum_exp:
      return {(n_ + field.extent - 1) / field.extent, m_};
    case Kind::col_sum:
      return {(m_ + field.extent - 1) / field.extent, n_};
    default:
      return {m_, n_};
  }
}

oracle::Outputs<Bounded> AnyCase::expected(const Arithmetic& arithmetic) {
  reset();  // what is accumulated into, or overwritten in place, is an input too
  const Assume assume(arithmetic);
  if (!arithmetic.truncates || is_map_) return apply(acc_);
  oracle::Grid<Bounded> acc = acc_;
  const int64_t k = acc_a_.cols;
  for (int64_t i = 0; i < m_; ++i)
    for (int64_t j = 0; j < n_; ++j)
      acc(i, j).error = truncated_sum_error(acc_a_.values.data() + i * k, acc_b_.values.data() + j * k, k);
  return apply(acc);
}

void AnyCase::run(Cpu& cpu) {
  reset();
  with_call([](const void* address) { return address; },
            [&](const Call& call) {
              if (call.is_map)
                coda::detail::run_map(cpu, call.a, call.program, call.cpu);
              else
                coda::detail::run_product(cpu, call.a, call.b, call.program, call.cpu);
            });
}

void AnyCase::reset() {
  for (Storage& s : storages_) s.reset();
}
void AnyCase::remember() {
  for (Storage& s : storages_) s.remember();
}

Comparison AnyCase::compare(const oracle::Outputs<Bounded>& expected, std::optional<ElementType> unit) {
  Comparison all;
  for (const auto& output : expected.list) {
    const Comparison one = compare(output, unit);
    if (one.by_share.share > all.by_share.share) all.by_share = one.by_share;
    if (one.by_ulps.ulps > all.by_ulps.ulps) all.by_ulps = one.by_ulps;
  }
  return all;
}

Comparison AnyCase::compare(const oracle::Output<Bounded>& output, std::optional<ElementType> unit_of) {
  Comparison worst;
  Storage& memory = storage_of(output.name);
  const ElementType element =
      output.field.element == ElementType::max_sum ? ElementType::float32 : output.field.element;
  const ElementType ulp_type = unit_of.value_or(element);
  const double smallest_unit = ulp(root_mean_square(output.value), ulp_type);
  for (int64_t i = 0; i < output.value.rows; ++i)
    for (int64_t j = 0; j < output.value.cols; ++j) {
      const Bounded want = output.value(i, j);
      Deviation d;
      if (output.field.element == ElementType::max_sum) {
        const MaxSum slot = memory.data<MaxSum>()[i * memory.stride() + j];
        d.got = double(slot.max) + std::log(double(slot.sum));
        d.share = std::max(share(d.got, want, element), share(slot.max, output.maximum(i, j), element));
      } else {
        d.got = stored(memory, element, i, j);
        d.share = share(d.got, want, element);
      }
      if (d.share == 0) continue;
      const double off = std::fabs(d.got - want.value);
      // No unit is smaller than that of the typical size.
      if (d.share <= worst.by_share.share && off <= worst.by_ulps.ulps * smallest_unit) continue;
      const double unit = std::max(smallest_unit, ulp(want.value, ulp_type));
      d.ulps = std::isfinite(off) ? off / unit : std::numeric_limits<double>::infinity();
      d.output = output.name;
      d.row = i;
      d.col = j;
      d.want = want.value;
      d.allowed = allowed(want, element);
      if (d.share > worst.by_share.share) worst.by_share = d;
      if (d.ulps > worst.by_ulps.ulps) worst.by_ulps = d;
    }
  return worst;
}

std::optional<std::string> AnyCase::trespass() const {
  for (const Storage& s : storages_)
    if (auto what = s.trespass()) return what;
  return std::nullopt;
}

Storage& AnyCase::storage_of(std::string_view name) {
  const auto alias = options_.in_place.find(std::string(name));
  const std::string_view wanted = alias == options_.in_place.end() ? name : std::string_view(alias->second);
  for (Storage& s : storages_)
    if (s.name() == wanted) return s;
  throw Error("no operand " + std::string(wanted));
}

std::vector<std::byte> AnyCase::memory() const {
  std::vector<std::byte> all;
  for (const Storage& s : storages_) all.insert(all.end(), s.bytes().begin(), s.bytes().end());
  return all;
}

double AnyCase::stored(Storage& memory, ElementType element, int64_t i, int64_t j) {
  const int64_t at = i * memory.stride() + j;
  if (element == ElementType::bfloat16) return double(memory.data<bf16>()[at]);
  if (element == ElementType::int32) return memory.data<int32_t>()[at];
  return double(memory.data<float>()[at]);
}
void AnyCase::store(Storage& memory, ElementType element, int64_t i, int64_t j, double value) {
  const int64_t at = i * memory.stride() + j;
  if (element == ElementType::bfloat16)
    memory.data<bf16>()[at] = bf16(static_cast<float>(value));
  else if (element == ElementType::int32)
    memory.data<int32_t>()[at] = static_cast<int32_t>(value);
  else
    memory.data<float>()[at] = static_cast<float>(value);
}

int64_t column_step(std::span<const Field> fields, bool pairs) {
  if (pairs) return 16;
  const bool doubled = std::ranges::any_of(fields, [](const Field& f) { return f.kind == Kind::double_tile; });
  return doubled ? 8 : 1;
}

}  // namespace coda::verify
