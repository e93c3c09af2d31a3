// A program is copied to where it runs as bytes.
// expect: an epilogue program is trivially copyable: views and numbers only
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  struct Scale {
    float value;
    Scale() = default;
    Scale(const Scale& other) : value(other.value) {}
    operator float() const { return value; }
  } scale;
  Out<S, Tile<>> out;
#else
  float scale;
  Out<S, Tile<>> out;
#endif

  CODA_FN void operator()(Real<S> acc) {
    out = scale * acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
