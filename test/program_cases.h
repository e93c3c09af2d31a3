// One call of the engine, with operands made for any program from its own description, held to the oracle element by element.
//
// Everything an engine might do wrong shows: outputs are poisoned, all memory has guards in front, behind and between the rows,
// inputs must come out unchanged, and the tolerance of each element is its own (bounded.h).
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "bounded.h"
#include "coda/gemm.h"
#include "cpu/isa.h"
#include "oracle/oracle.h"

namespace coda::test {

using Random = std::mt19937_64;

inline double uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}
inline double normal(Random& random) {
  return std::normal_distribution<double>()(random);
}

/// Memory of one operand, 0xff everywhere: NaN in every type of float that there is.
class Storage {
 public:
  Storage(std::string name, int64_t rows, int64_t cols, int64_t stride, int64_t element_bytes)
      : name_(std::move(name)), rows_(rows), cols_(cols), stride_(stride), element_bytes_(element_bytes) {
    // The first element is aligned to its own size and no further.
    offset_ = static_cast<size_t>(64 + element_bytes);
    bytes_.resize(offset_ + static_cast<size_t>(rows * stride * element_bytes) + 64, std::byte{0xff});
  }

  const std::string& name() const { return name_; }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data() + offset_);
  }
  int64_t stride() const { return stride_; }
  void is_output() { output_ = true; }
  void remember() { before_ = bytes_; }
  void reset() { bytes_ = before_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  /// Says which byte changed although nothing may have written it.
  void expect_untouched() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (bytes_[i] == before_[i] || (output_ && inside(i))) continue;
      const auto at = static_cast<int64_t>(i) - static_cast<int64_t>(offset_);
      const int64_t row_bytes = std::max<int64_t>(1, stride_ * element_bytes_);
      ADD_FAILURE() << name_ << (output_ ? ": memory outside the output" : ": an input") << " was written, at row "
                    << at / row_bytes << ", column " << at % row_bytes / element_bytes_;
      return;
    }
  }

 private:
  bool inside(size_t i) const {
    if (i < offset_) return false;
    const auto at = static_cast<int64_t>(i - offset_);
    const int64_t row_bytes = stride_ * element_bytes_;
    return row_bytes > 0 && at / row_bytes < rows_ && at % row_bytes < cols_ * element_bytes_;
  }

  std::string name_;
  int64_t rows_, cols_, stride_, element_bytes_;
  size_t offset_;
  std::vector<std::byte> bytes_, before_;
  bool output_ = false;
};

/// How a factor of a·bᵀ lies in memory.
enum class Order { plain, transposed };

/// A value for the operand of this name, as a Llama block would have it: scales positive, labels in range, angles reduced.
inline double sample(std::string_view name, Random& random, int64_t n) {
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

/// The element that is furthest from the oracle's, in units of what it may be off by.
struct Worst {
  double score = 0;  // above 1 is wrong
  std::string output;
  int64_t row = 0, col = 0;
  double got = 0, want = 0, allowed = 0;

  void take(const Worst& other) {
    if (other.score > score) *this = other;
  }
  friend std::ostream& operator<<(std::ostream& out, const Worst& w) {
    out.precision(9);
    return out << w.output << " at row " << w.row << ", column " << w.col << " is " << w.got << ", not " << w.want
               << " ± " << w.allowed;
  }
};

inline double allowed(Bounded want, ElementType element) {
  const double magnitude = std::fabs(want.value) + want.error;
  const double rounding =
      element == ElementType::bfloat16 ? Bounded::half_unit_bf16(magnitude) : kFloatRounding * magnitude;
  return want.error + rounding + std::numeric_limits<float>::min();
}
inline double score(double got, Bounded want, ElementType element) {
  if (got == want.value) return 0;  // infinities too
  const double off = std::fabs(got - want.value) / allowed(want, element);
  return off >= 0 ? off : std::numeric_limits<double>::infinity();  // NaN is as wrong as can be
}

/// The name, in a CaseOptions, of the matrix that a map reads.
inline const std::string kMapped = "the mapped matrix";

struct CaseOptions {
  int64_t padding = 3;                          // columns between the end of a row and the next
  std::map<std::string, std::string> in_place;  // output -> the input whose memory it is
};

/// A program P with operands for m × n accumulators.
template <class P>
class Case {
 public:
  Case(int64_t m, int64_t n, Random& random, CaseOptions options = {})
      : m_(m), n_(n), random_(random), options_(std::move(options)) {}

  /// Makes the factors of a product.
  template <class A, class B>
  void product(int64_t k, Order a_order, Order b_order) {
    a_ = make_factor<A>("a", m_, k, a_order, acc_a_);
    b_ = make_factor<B>("b", n_, k, b_order, acc_b_);
    is_map_ = false;
    acc_ = oracle::Grid<Bounded>(m_, n_);
    for (int64_t i = 0; i < m_; ++i)
      for (int64_t j = 0; j < n_; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t d = 0; d < k; ++d) {
          const double term = acc_a_(i, d) * acc_b_(j, d);
          sum += term;
          magnitude += std::fabs(term);
        }
        // The partial sums of a row are themselves of size √K or less beside magnitude: √K roundings of all of it are generous.
        acc_(i, j) = {sum, (1 + std::sqrt(static_cast<double>(k))) * kFloatRounding * magnitude};
      }
    make_operands();
  }
  /// Makes the stored matrix of a map.
  template <class X>
  void map() {
    a_ = make_factor<X>(kMapped, m_, n_, Order::plain, acc_a_);
    is_map_ = true;
    acc_ = oracle::Grid<Bounded>(m_, n_);
    for (size_t i = 0; i < acc_.values.size(); ++i) acc_.values[i] = Bounded(acc_a_.values[i]);
    make_operands();
  }

  P& program() { return program_; }
  const oracle::Grid<Bounded>& acc() const { return acc_; }
  int64_t m() const { return m_; }
  int64_t n() const { return n_; }

  oracle::Outputs<Bounded> expected() {
    reset();  // what is accumulated into, or overwritten in place, is an input too
    return oracle::apply<Bounded>(acc_, program_);
  }

  void run(Cpu& cpu) {
    reset();
    coda::detail::with_program(program_, [&](const coda::detail::ProgramInfo& info) {
      if (is_map_)
        coda::detail::run_map(cpu, a_, info);
      else
        coda::detail::run_product(cpu, a_, b_, info);
    });
  }

  void reset() {
    for (Storage& s : storages_) s.reset();
  }
  /// Takes what a test has written into the operands for what they hold.
  void remember() {
    for (Storage& s : storages_) s.remember();
  }

  Worst compare(const oracle::Outputs<Bounded>& expected) {
    Worst worst;
    for (const auto& output : expected.list) worst.take(compare(output));
    return worst;
  }
  Worst compare(const oracle::Output<Bounded>& output) {
    Worst worst;
    Storage& memory = storage_of(std::string(output.name));
    for (int64_t i = 0; i < output.value.rows; ++i)
      for (int64_t j = 0; j < output.value.cols; ++j) {
        const Bounded want = output.value(i, j);
        double got = 0, off = 0;
        if (output.field.element == ElementType::max_sum) {
          const MaxSum slot = memory.data<MaxSum>()[i * memory.stride() + j];
          got = double(slot.max) + std::log(double(slot.sum));
          off = std::max(score(got, want, ElementType::float32),
                         score(slot.max, output.maximum(i, j), ElementType::float32));
        } else {
          got = stored(memory, output.field.element, i, j);
          off = score(got, want, output.field.element);
        }
        worst.take({off, std::string(output.name), i, j, got, want.value, allowed(want, output.field.element)});
      }
    return worst;
  }
  void expect_untouched() const {
    for (const Storage& s : storages_) s.expect_untouched();
  }

  Storage& storage_of(const std::string& name) {
    const auto alias = options_.in_place.find(name);
    const std::string& wanted = alias == options_.in_place.end() ? name : alias->second;
    for (Storage& s : storages_)
      if (s.name() == wanted) return s;
    throw Error("no operand " + wanted);
  }
  /// All that the last run left behind.
  std::vector<std::byte> memory() const {
    std::vector<std::byte> all;
    for (const Storage& s : storages_) all.insert(all.end(), s.bytes().begin(), s.bytes().end());
    return all;
  }

  static double stored(Storage& memory, ElementType element, int64_t i, int64_t j) {
    const int64_t at = i * memory.stride() + j;
    return element == ElementType::bfloat16 ? double(memory.data<bf16>()[at]) : double(memory.data<float>()[at]);
  }
  static void store(Storage& memory, ElementType element, int64_t i, int64_t j, double value) {
    const int64_t at = i * memory.stride() + j;
    if (element == ElementType::bfloat16)
      memory.data<bf16>()[at] = bf16(static_cast<float>(value));
    else
      memory.data<float>()[at] = static_cast<float>(value);
  }

 private:
  template <class T>
  Storage& make_storage(std::string name, int64_t rows, int64_t cols, bool vector = false) {
    const int64_t stride = vector ? cols : cols + options_.padding;
    return storages_.emplace_back(std::move(name), rows, cols, stride, sizeof(T));
  }
  template <class T>
  Storage& fill(Storage& memory, int64_t rows, int64_t cols, double scale = 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        memory.data<T>()[i * memory.stride() + j] =
            static_cast<T>(static_cast<float>(scale * sample(memory.name(), random_, n_)));
    return memory;
  }

  template <class T>
  coda::detail::Factor make_factor(const std::string& name, int64_t rows, int64_t depth, Order order,
                                   oracle::Grid<double>& elements) {
    const bool transposed = order == Order::transposed;
    const int64_t stored_rows = transposed ? depth : rows, stored_cols = transposed ? rows : depth;
    // Accumulators of about the size of a block's, whatever the depth.
    const double scale = name == "a" ? 1.5 / std::sqrt(static_cast<double>(std::max<int64_t>(depth, 1))) : 1;
    Storage& memory = fill<T>(make_storage<T>(name, stored_rows, stored_cols), stored_rows, stored_cols, scale);
    const Matrix<const T> view(memory.data<T>(), stored_rows, stored_cols, memory.stride());
    elements = transposed ? oracle::elements(transpose(view)) : oracle::elements(view);
    return transposed ? coda::detail::factor(transpose(view)) : coda::detail::factor(view);
  }

  void make_operands() {
    constexpr auto fields = describe<P>();
    coda::detail::with_fields<coda::detail::field_count<P>>(program_, [&](auto&... field) {
      size_t i = 0;
      (make(field, fields[i++]), ...);
    });
    remember();
  }
  std::pair<int64_t, int64_t> shape_of(const Field& field) const {
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
  template <class T>
  void make(Matrix<const T>& view, const Field& field) {
    const auto [rows, cols] = shape_of(field);
    Storage& memory = fill<T>(make_storage<T>(std::string(field.name), rows, cols), rows, cols);
    view = {memory.data<T>(), rows, cols, memory.stride()};
  }
  template <class T>
  requires(!std::is_const_v<T>) void make(Matrix<T>& view, const Field& field) {
    const auto [rows, cols] = shape_of(field);
    const std::string name(field.name);
    const bool in_place = options_.in_place.count(name) > 0;
    Storage& memory = in_place ? storage_of(name) : make_storage<T>(name, rows, cols);
    if (field.kind == Kind::accumulate) {
      if constexpr (!std::is_same_v<T, MaxSum>) fill<T>(memory, rows, cols);
    }
    memory.is_output();
    view = {memory.data<T>(), rows, cols, memory.stride()};
  }
  template <class T>
  void make(Vector<const T>& view, const Field& field) {
    int64_t size = field.kind == Kind::per_row ? m_ : n_;
    if (field.kind == Kind::per_pair) size = n_ / 2 % 24 == 0 ? 24 : n_ / 2;  // a period where there can be one
    Storage& memory = fill<T>(make_storage<T>(std::string(field.name), 1, size, true), 1, size);
    view = {memory.data<T>(), size};
  }
  template <class T>
  void make(const T*& pointer, const Field& field) {
    pointer = fill<T>(make_storage<T>(std::string(field.name), 1, 1, true), 1, 1).template data<T>();
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void make(T& number, const Field& field) { number = static_cast<T>(sample(field.name, random_, n_)); }
  void make(Nothing&, const Field&) {}
  /// A function object: its numbers.
  template <class T>
  requires std::is_class_v<T>
  void make(T& function, const Field&) {
    constexpr int count = coda::detail::count_fields<T>();
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((coda::detail::field<count, I>(function) = static_cast<float>(
            sample(coda::detail::name_of<coda::detail::field_pointer<T, count, I>()>(), random_, n_))),
       ...);
    }
    (std::make_integer_sequence<int, count>{});
  }

  int64_t m_, n_;
  Random& random_;
  CaseOptions options_;
  std::deque<Storage> storages_;
  P program_{};
  coda::detail::Factor a_, b_;
  oracle::Grid<double> acc_a_, acc_b_;
  oracle::Grid<Bounded> acc_;
  bool is_map_ = false;
};

/// How the outputs of c's program change when the accumulators where moves(row, col) grow.
template <class P, class Moves>
oracle::Outputs<Dual<double, 1>> derivative(Case<P>& c, const Moves& moves) {
  oracle::Grid<Dual<double, 1>> acc(c.m(), c.n());
  for (int64_t i = 0; i < c.m(); ++i)
    for (int64_t j = 0; j < c.n(); ++j) {
      acc(i, j) = c.acc()(i, j).value;
      if (moves(i, j)) acc(i, j).slope[0] = 1;
    }
  return oracle::apply<Dual<double, 1>>(acc, c.program());
}

/// A pool of this many threads, made once.
inline Cpu& pool(int threads) {
  static std::map<int, std::unique_ptr<Cpu>> pools;
  auto& cpu = pools[threads];
  if (!cpu) cpu = std::make_unique<Cpu>(threads);
  return *cpu;
}

/// For as long as it lives, the engine runs on this instruction set.
class Chosen {
 public:
  explicit Chosen(cpu::Isa isa) : before_(cpu::chosen_isa()) { cpu::choose_isa(isa); }
  ~Chosen() { cpu::choose_isa(before_); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;

 private:
  cpu::Isa before_;
};
inline std::vector<cpu::Isa> instruction_sets() {
  std::vector<cpu::Isa> sets;
  for (cpu::Isa isa : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512})
    if (cpu::runs_here(isa)) sets.push_back(isa);
  return sets;
}

/// What the columns of P's accumulators must be a multiple of.
template <class P>
constexpr int64_t column_step() {
  if (takes_pairs<P>) return 16;
  for (const Field& field : describe<P>())
    if (field.kind == Kind::double_tile) return 8;
  return 1;
}

/// The outputs as the oracle has them. A test of a program that rounds inside replaces, after a run, what depends on how a
/// value was rounded.
struct AsTheOracle {
  template <class P>
  void operator()(Case<P>&, oracle::Outputs<Bounded>&) const {}
};

/// Runs c on every instruction set, on one thread and on several, and compares.
template <class P, class Expected = AsTheOracle>
void expect_matches(Case<P>& c, int threads, const std::string& what, const Expected& after_a_run = {}) {
  auto expected = c.expected();
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    const std::string where = what + " on " + std::string(cpu::name(isa));
    c.run(pool(1));
    after_a_run(c, expected);
    const Worst worst = c.compare(expected);
    EXPECT_LE(worst.score, 1) << where << ": " << worst;
    c.expect_untouched();
    const std::vector<std::byte> alone = c.memory();
    c.run(pool(threads));
    EXPECT_TRUE(alone == c.memory()) << where << ": " << threads << " threads give other bits than one";
  }
}
inline constexpr std::array kThreads = {2, 3, 5};

struct Size {
  int64_t m, n, k;
};
/// Empty, single, around the widths of vectors, slots (128), row blocks (96) and depth blocks (256).
inline constexpr std::array kSizes = {Size{0, 40, 8},    Size{6, 0, 8},      Size{6, 48, 0},     Size{1, 1, 1},
                                      Size{3, 17, 5},    Size{7, 120, 33},   Size{64, 128, 256}, Size{65, 136, 257},
                                      Size{97, 272, 31}, Size{130, 400, 64}, Size{33, 16, 255},  Size{5, 8, 300},
                                      Size{1, 300, 9},   Size{193, 1, 70},   Size{64, 144, 513}};

inline std::string text(const Size& size) {
  return std::to_string(size.m) + "x" + std::to_string(size.n) + "x" + std::to_string(size.k);
}

/// A seed of P's own, so that the programs of a suite meet a size in different forms.
template <class P>
constexpr uint64_t seed_of() {
  uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (char c : std::string_view(__PRETTY_FUNCTION__)) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash;
}

/// Whether a program meets every operand form at every size, or one form at each size in turn: how factors are read does not
/// depend on the program.
enum class Forms { in_turn, all };

/// P over all sizes, with float and bf16 factors mixed.
template <class P, class Expected = AsTheOracle>
void check_products(uint64_t seed, const CaseOptions& options = {}, const Expected& after_a_run = {},
                    Forms forms = Forms::in_turn) {
  constexpr std::array kForms = {std::tuple{Order::plain, Order::plain, "TN "},
                                 std::tuple{Order::plain, Order::transposed, "NN "},
                                 std::tuple{Order::transposed, Order::transposed, "NT "}};
  Random random(seed);
  size_t turn = seed;
  for (Size size : kSizes) {
    const int64_t step = column_step<P>();
    size.n = (size.n + step - 1) / step * step;
    for (size_t i = 0; i < (forms == Forms::all ? kForms.size() : 1); ++i, ++turn) {
      const auto& [a_order, b_order, form] = kForms[turn % kForms.size()];
      Case<P> c(size.m, size.n, random, options);
      switch (turn % 4) {  // there are 3 forms: every form meets every mixture
        case 0:
          c.template product<float, float>(size.k, a_order, b_order);
          break;
        case 1:
          c.template product<bf16, bf16>(size.k, a_order, b_order);
          break;
        case 2:
          c.template product<float, bf16>(size.k, a_order, b_order);
          break;
        default:
          c.template product<bf16, float>(size.k, a_order, b_order);
          break;
      }
      expect_matches(c, kThreads[turn / 3 % kThreads.size()], form + text(size), after_a_run);
      if (testing::Test::HasFailure()) return;  // one is enough to read
    }
  }
}

/// Which types the stored matrix of a map takes in turns; one that is overwritten has the output's.
struct AnyElement {
  static constexpr bool takes_float = true, takes_bf16 = true;
};
template <class E>
struct InPlaceOf {
  static constexpr bool takes_float = std::is_same_v<E, float>, takes_bf16 = !takes_float;
};

/// P over stored matrices.
template <class P, class Expected = AsTheOracle, class Element = AnyElement>
void check_maps(uint64_t seed, const CaseOptions& options = {}, const Expected& after_a_run = {}, Element = {}) {
  Random random(seed);
  size_t turn = seed;
  for (Size size : kSizes) {
    const int64_t step = column_step<P>();
    size.n = (size.n + step - 1) / step * step;
    Case<P> c(size.m, size.n, random, options);
    if (Element::takes_float && (size.k % 2 == 0 || !Element::takes_bf16))
      c.template map<float>();
    else
      c.template map<bf16>();
    expect_matches(c, kThreads[turn++ % kThreads.size()], "map " + text(size), after_a_run);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace coda::test
