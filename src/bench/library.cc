#include "library.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/microkernel.h"
#include "cpu/pack.h"

namespace coda::bench {

namespace {

// cblas.h
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

}  // namespace

const char* name(Form form) {
  switch (form) {
    case Form::TN:
      return "TN";
    case Form::NN:
      return "NN";
    case Form::NT:
      return "NT";
  }
  return "";
}

OpenBlas::OpenBlas(int threads)
    : library_("OpenBLAS", {"libopenblas.so.0"},
               "coda bench measures against it, so apt-get install libopenblas0-pthread"),
      sgemm_(library_.symbol<Sgemm>("cblas_sgemm")),
      core_(library_.symbol<char*()>("openblas_get_corename")()) {
  library_.symbol<void(int)>("openblas_set_num_threads")(threads);
}

void OpenBlas::operator()(const Product& p) {
  const auto m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const bool turned_a = p.form == Form::NT, turned_b = p.form != Form::TN;
  sgemm_(kRowMajor, turned_a ? kTransposed : kPlain, turned_b ? kPlain : kTransposed, m, n, k, 1, p.a, turned_a ? m : k,
         p.b, turned_b ? n : k, 0, p.out, n);
}

void Libxsmm::operator()(const Product& p) {
  constexpr int64_t kRows = 96, kCols = 128, kDepth = 256;
  const bool turned_a = p.form == Form::NT, turned_b = p.form != Form::TN;
  const detail::Factor a{p.a, ElementType::float32, p.m, p.k, turned_a ? p.m : p.k, turned_a};
  const detail::Factor b{p.b, ElementType::float32, p.n, p.k, turned_b ? p.n : p.k, turned_b};
  const int64_t panels = (p.n + kCols - 1) / kCols, row_blocks = (p.m + kRows - 1) / kRows;
  const int64_t needed = panels * kCols * p.k + cpu_.threads() * kRows * (p.k + kCols);
  if (needed > packed_size_) {
    packed_ = std::make_unique<float[]>(static_cast<size_t>(needed));
    packed_size_ = needed;
  }
  float* packed = packed_.get();
  cpu::for_chosen_isa([&](auto isa) {
    using I = decltype(isa);
    cpu_.parallel_for(panels, [&](int64_t panel, int) {
      const int64_t col = panel * kCols;
      cpu::pack_columns<I>(b, col, std::min(kCols, p.n - col), 0, p.k, packed + col * p.k, kCols);
    });
    cpu_.parallel_for(row_blocks, [&](int64_t block, int thread) {
      float* acc = packed + panels * kCols * p.k + thread * kRows * (p.k + kCols);
      float* packed_a = acc + kRows * kCols;
      const int64_t row = block * kRows, rows = std::min(kRows, p.m - row);
      const float* a_rows = p.a + row * p.k;
      if (turned_a) {
        cpu::pack_rows<I>(a, row, rows, 0, p.k, packed_a, p.k);
        a_rows = packed_a;
      }
      for (int64_t col = 0; col < p.n; col += kCols) {
        for (int64_t k = 0; k < p.k; k += kDepth) {
          const cpu::Microkernel multiply(rows, kCols, std::min(kDepth, p.k - k), p.k, kCols, kCols, k > 0);
          multiply(a_rows + k, packed + col * p.k + k * kCols, acc);
        }
        for (int64_t i = 0; i < rows; ++i)
          std::copy_n(acc + i * kCols, std::min(kCols, p.n - col), p.out + (row + i) * p.n + col);
      }
    });
  });
}

TorchMm::TorchMm(const std::string& file, int threads)
    : library_("PyTorch", {file.c_str()}, file + " cannot be loaded; libtorch_cpu.so is in torch/lib"),
      make_(library_.symbol<MakeTensor>("aoti_torch_create_tensor_from_blob")),
      free_(library_.symbol<int32_t(Tensor*)>("aoti_torch_delete_tensor_object")),
      mm_out_(library_.symbol<int32_t(Tensor*, Tensor*, Tensor*)>("aoti_torch_cpu_mm_out")),
      float32_(library_.symbol<int32_t()>("aoti_torch_dtype_float32")()),
      cpu_device_(library_.symbol<int32_t()>("aoti_torch_device_type_cpu")()) {
  library_.symbol<void(int)>("_ZN2at15set_num_threadsEi")(threads);  // at::set_num_threads, which has no C function
}

TorchMm::Tensor* TorchMm::tensor(const float* data, int64_t rows, int64_t cols, bool transposed) const {
  const int64_t sizes[] = {rows, cols}, strides[] = {transposed ? 1 : cols, transposed ? rows : 1};
  Tensor* made = nullptr;
  if (make_(const_cast<float*>(data), 2, sizes, strides, 0, float32_, cpu_device_, 0, &made) != 0)
    throw Error("PyTorch could not make a tensor of the benchmark's memory");
  return made;
}

void TorchMm::operator()(const Product& p) {
  Tensor* const a = tensor(p.a, p.m, p.k, p.form == Form::NT);
  Tensor* const b = tensor(p.b, p.k, p.n, p.form == Form::TN);
  Tensor* const out = tensor(p.out, p.m, p.n, false);
  const int32_t failed = mm_out_(out, a, b);
  for (Tensor* made : {a, b, out}) free_(made);
  if (failed != 0) throw Error("torch.mm failed");
}

}  // namespace coda::bench
