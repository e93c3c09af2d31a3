// One call of an engine, with operands made for any program from its own description, held to the oracle element by element.
//
// Everything an engine might do wrong shows: outputs are poisoned, all memory has guards in front, behind and between the rows,
// inputs must come out unchanged, and the tolerance of each element is its own (bounded.h).
#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coda/gpu.h"
#include "oracle/oracle.h"
#include "verify/bounded.h"

namespace coda::detail {

template <class P>
[[gnu::weak]] const HopperKernels& hopper_kernels();

/// The kernels of P for a Hopper GPU; null where they are not linked.
template <class P>
const HopperKernels* linked_hopper_kernels() {
  if constexpr (std::is_same_v<element_of<P>, bf16>) {
    // volatile: g++ 12 folds the comparison of a declared function with null, weak or not.
    const HopperKernels& (*volatile kernels)() = &hopper_kernels<P>;
    if (kernels != nullptr) return &kernels();
  }
  return nullptr;
}

}  // namespace coda::detail

namespace coda::verify {

using Random = std::mt19937_64;

double uniform(Random& random, double low, double high);
double normal(Random& random);

/// A value for the operand of this name beside accumulators of n columns, as a Llama block would have it: scales positive,
/// labels in range, angles reduced. Anything else is normal.
double sample(std::string_view name, Random& random, int64_t n);

/// Memory of one operand, 0xff everywhere: NaN in every type of float that there is.
class Storage {
 public:
  /// The first element lies at a multiple of alignment, 16 or less, and of no more.
  Storage(std::string name, int64_t rows, int64_t cols, int64_t stride, int64_t element_bytes, int64_t alignment);

  const std::string& name() const { return name_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t stride() const { return stride_; }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data() + offset_);
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::span<std::byte> writable_bytes() { return bytes_; }
  void is_output() { output_ = true; }
  void remember() { before_ = bytes_; }
  void reset() { bytes_ = before_; }
  /// Element (i, j) as it was when it was remembered.
  void reset(int64_t i, int64_t j);

  /// Which byte changed although nothing may have written it, in words.
  std::optional<std::string> trespass() const;

 private:
  size_t byte_of(int64_t i, int64_t j) const {
    return offset_ + static_cast<size_t>((i * stride_ + j) * element_bytes_);
  }

  std::string name_;
  int64_t rows_, cols_, stride_, element_bytes_;
  size_t offset_;
  std::vector<std::byte> bytes_, before_;
  bool output_ = false;
};

/// How a factor of a·bᵀ lies in memory.
enum class Order { plain, transposed };

/// One element of an output, beside what it should be.
struct Deviation {
  double share = 0;  // of what it may be off by; above 1 is wrong
  double ulps =
      0;  // |got - want| in units of the last place of the output's type, at want's size or the root mean square
          // of its output, whichever is larger: where terms cancel an element has no size of its own
  std::string_view output;
  int64_t row = 0, col = 0;
  double got = 0, want = 0, allowed = 0;

  friend std::ostream& operator<<(std::ostream& out, const Deviation& d);
};

/// The element that took the largest share of what it may be off by, and the one that is furthest off in ulps.
struct Comparison {
  Deviation by_share, by_ulps;

  bool passed() const { return by_share.share <= 1; }
};

/// One unit in the last place of element's type at x.
double ulp(double x, ElementType element);
/// |got - want| as a share of want's error and half a unit in the last place. NaN is infinitely wrong.
double share(double got, Bounded want, ElementType element);

/// The name, in a CaseOptions, of the matrix that a map reads.
inline const std::string kMapped = "the mapped matrix";

struct CaseOptions {
  int64_t padding = 3;                          // columns between the end of a row and the next, at least
  std::map<std::string, std::string> in_place;  // output -> the input whose memory it is
  bool aligned = false;                         // addresses and rows of factors and tiles: multiples of 16 bytes
};

/// A call as an engine takes it.
struct Call {
  const coda::detail::Factor &a, &b;  // of a map: a
  bool is_map;
  const coda::detail::ProgramInfo& program;
  coda::detail::CpuKernels cpu;
  const coda::detail::HopperKernels* hopper;  // null where there are none
};
/// Where an engine has what lies at this address of the host.
using Placement = std::function<const void*(const void* address)>;

/// A program with operands for m × n accumulators, whatever the program: Case<P> knows its type.
class AnyCase {
 public:
  AnyCase(int64_t m, int64_t n, Random& random, CaseOptions options)
      : m_(m), n_(n), random_(random), options_(std::move(options)) {}
  virtual ~AnyCase() = default;
  AnyCase(const AnyCase&) = delete;
  AnyCase& operator=(const AnyCase&) = delete;

  /// Makes the factors of a product a·bᵀ, each float32 or bfloat16, and all operands.
  void product(ElementType a, ElementType b, int64_t k, Order a_order, Order b_order);
  /// Makes the stored matrix of a map, and all operands.
  void map(ElementType x);

  int64_t m() const { return m_; }
  int64_t n() const { return n_; }
  const oracle::Grid<Bounded>& acc() const { return acc_; }
  /// Of the matrix that a map reads.
  ElementType mapped_element() const { return a_.element; }
  virtual std::span<const Field> fields() const = 0;

  /// What the program makes of these accumulators and of what its operands hold now.
  virtual oracle::Outputs<Bounded> apply(const oracle::Grid<Bounded>& acc) const = 0;
  /// By an engine of this arithmetic.
  oracle::Outputs<Bounded> expected(const Arithmetic& arithmetic = kLanes);
  void run(Cpu& cpu);
  /// body(call), its pointers placed.
  virtual void with_call(const Placement& placed, const std::function<void(const Call&)>& body) const = 0;
  std::deque<Storage>& storages() { return storages_; }
  bool aligned() const { return options_.aligned; }

  /// Everything as it was made, or as it was when remember() was called.
  void reset();
  /// Takes what has been written into the operands for what they hold.
  void remember();
  /// Scalars, plain numbers, and the numbers of function objects: "eps", "f.cap".
  virtual std::vector<std::string> numbers() const = 0;
  /// Sets one of them; what it was before.
  virtual double set_number(std::string_view name, double value) = 0;

  /// What the last run has stored beside expected. The unit of ulps is an output's own type's unless one is given.
  Comparison compare(const oracle::Outputs<Bounded>& expected, std::optional<ElementType> unit = {});
  Comparison compare(const oracle::Output<Bounded>& output, std::optional<ElementType> unit = {});
  /// An input, or memory outside an output, that was written; in words.
  std::optional<std::string> trespass() const;

  /// The memory of an operand; of an output in place, its input's. Factors are "a" and "b".
  Storage& storage_of(std::string_view name);
  /// All that the last run left behind.
  std::vector<std::byte> memory() const;

  static double stored(Storage& memory, ElementType element, int64_t i, int64_t j);
  static void store(Storage& memory, ElementType element, int64_t i, int64_t j, double value);

 protected:
  virtual void make_operands() = 0;

  /// tile: a factor or a tile, which may be asked to be aligned; partial: the slots of a reduction.
  enum class Layout { vector, partial, tile };
  static Layout layout_of(const Field& field) { return field.extent > 0 ? Layout::partial : Layout::tile; }

  // One for each kind of field, as the caller's side has it.
  template <class T>
  void make(Matrix<const T>& view, const Field& field) {
    const auto [rows, cols] = shape_of(field);
    Storage& memory = fill<T>(make_storage<T>(std::string(field.name), rows, cols, layout_of(field)), rows, cols);
    view = {memory.data<T>(), rows, cols, memory.stride()};
  }
  template <class T>
  requires(!std::is_const_v<T>) void make(Matrix<T>& view, const Field& field) {
    const auto [rows, cols] = shape_of(field);
    const std::string name(field.name);
    const bool in_place = options_.in_place.count(name) > 0;
    Storage& memory = in_place ? storage_of(name) : make_storage<T>(name, rows, cols, layout_of(field));
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
    Storage& memory = fill<T>(make_storage<T>(std::string(field.name), 1, size, Layout::vector), 1, size);
    view = {memory.data<T>(), size};
  }
  template <class T>
  void make(const T*& pointer, const Field& field) {
    pointer = fill<T>(make_storage<T>(std::string(field.name), 1, 1, Layout::vector), 1, 1).template data<T>();
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void make(T& number, const Field& field) { number = static_cast<T>(sample(field.name, random_, n_)); }
  void make(Nothing&, const Field&) {}
  /// A function object: its numbers.
  template <class T>
  requires std::is_class_v<T>
  void make(T& function, const Field&) {
    each_number(function,
                [&](float& number, std::string_view name) { number = static_cast<float>(sample(name, random_, n_)); });
  }
  template <class T, class Body>
  static void each_number(T& function, const Body& body) {
    constexpr int count = coda::detail::count_fields<T>();
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (body(coda::detail::field<count, I>(function), coda::detail::name_of_field<T, count, I>()), ...);
    }
    (std::make_integer_sequence<int, count>{});
  }

  coda::detail::Factor a_, b_;
  bool is_map_ = false;

 private:
  std::pair<int64_t, int64_t> shape_of(const Field& field) const;
  template <class T>
  Storage& make_storage(std::string name, int64_t rows, int64_t cols, Layout layout) {
    constexpr int64_t size = sizeof(T);
    int64_t stride = layout == Layout::vector ? cols : cols + options_.padding;
    const bool aligned = options_.aligned && layout == Layout::tile;
    if (aligned) stride = (stride * size + 15) / 16 * 16 / size;
    return storages_.emplace_back(std::move(name), rows, cols, stride, size, aligned ? 16 : size);
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
                                   oracle::Grid<double>& elements);
  coda::detail::Factor make_factor(ElementType element, const std::string& name, int64_t rows, int64_t depth,
                                   Order order, oracle::Grid<double>& elements);

  int64_t m_, n_;
  Random& random_;
  CaseOptions options_;
  std::deque<Storage> storages_;
  oracle::Grid<double> acc_a_, acc_b_;
  oracle::Grid<Bounded> acc_;
};

/// A program P with operands for m × n accumulators.
template <class P>
class Case : public AnyCase {
 public:
  Case(int64_t m, int64_t n, Random& random, CaseOptions options = {}) : AnyCase(m, n, random, std::move(options)) {}

  using AnyCase::map;
  using AnyCase::product;
  template <class A, class B>
  void product(int64_t k, Order a_order, Order b_order) {
    product(coda::detail::factor_element<A>(), coda::detail::factor_element<B>(), k, a_order, b_order);
  }
  template <class X>
  void map() {
    map(coda::detail::factor_element<X>());
  }

  P& program() { return program_; }
  const P& program() const { return program_; }

  std::span<const Field> fields() const override {
    static constexpr auto all = describe<P>();
    return all;
  }
  oracle::Outputs<Bounded> apply(const oracle::Grid<Bounded>& acc) const override {
    return oracle::apply<Bounded>(acc, program_);
  }
  void with_call(const Placement& placed, const std::function<void(const Call&)>& body) const override {
    P program = program_;
    each_field_of(program, [&](auto& field, const Field&) {
      if constexpr (requires { field.data; })
        place(field.data, placed);
      else if constexpr (std::is_pointer_v<std::remove_reference_t<decltype(field)>>)
        place(field, placed);
    });
    coda::detail::Factor a = a_, b = b_;
    place(a.data, placed);
    if (!is_map_) place(b.data, placed);
    coda::detail::with_program(program, [&](const coda::detail::ProgramInfo& info) {
      body({a, b, is_map_, info, coda::detail::cpu_kernels<P>(), coda::detail::linked_hopper_kernels<P>()});
    });
  }
  std::vector<std::string> numbers() const override {
    std::vector<std::string> names;
    P copy = program_;
    numbers_of(copy, [&](auto&, const std::string& name) { names.push_back(name); });
    return names;
  }
  double set_number(std::string_view name, double value) override {
    double before = 0;
    numbers_of(program_, [&](auto& number, const std::string& its_name) {
      using Number = std::remove_reference_t<decltype(number)>;
      if (its_name == name) before = static_cast<double>(std::exchange(number, static_cast<Number>(value)));
    });
    return before;
  }

 protected:
  void make_operands() override {
    each_field([&](auto& field, const Field& described) { make(field, described); });
    remember();
  }

 private:
  template <class T>
  static void place(T*& pointer, const Placement& placed) {
    if (pointer != nullptr) pointer = static_cast<T*>(const_cast<void*>(placed(pointer)));
  }
  template <class Body>
  void each_field(const Body& body) {
    each_field_of(program_, body);
  }
  template <class Body>
  void each_field_of(P& program, const Body& body) const {
    coda::detail::with_fields<coda::detail::field_count<P>>(program, [&](auto&... field) {
      size_t i = 0;
      (body(field, fields()[i++]), ...);
    });
  }
  template <class Body>
  void numbers_of(P& program, const Body& body) const {
    each_field_of(program, [&](auto& field, const Field& described) {
      using Number = std::remove_reference_t<decltype(field)>;
      const std::string name(described.name);
      if constexpr (std::is_arithmetic_v<Number>) {
        body(field, name);
      } else if constexpr (std::is_class_v<Number> && !requires { field.data; }) {  // a function object
        if (described.kind == Kind::number)
          AnyCase::each_number(
              field, [&](float& number, std::string_view inner) { body(number, name + "." + std::string(inner)); });
      }
    });
  }

  P program_{};
};

/// What the columns of a program's accumulators must be a multiple of.
int64_t column_step(std::span<const Field> fields, bool pairs);

}  // namespace coda::verify
