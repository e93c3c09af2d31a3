// Programs as a user would write them, covering what the programs of a Llama block leave out. user_program_kernels.cc
// instantiates them.
#pragma once
#include <limits>

#include "coda/operands.h"

namespace coda::test {

/// Per-head RMS norm of pairs: a group is 64 columns, its sum of squares known only after all of it.
template <class S = Tensors<bf16>>
struct HeadNorm {
  float eps;
  In<S, PerCol<float>> gamma;  // [N]
  Local<S, RowSum<float, 64>> sum_sq;
  Out<S, Tile<>> y;                       // [M, N]
  Out<S, RowSum<float, 64>> mean_square;  // [N/64, M]  the local, spread over the slot it came from

  CODA_FN void measure(Pair<Real<S>> acc) { sum_sq = acc * acc; }
  CODA_FN void operator()(Pair<Real<S>> acc) {
    const Real<S> mean = sum_sq * (1.f / 64.f);
    y = 1.f / sqrt(mean + eps) * (acc * Pair<Real<S>>(gamma));
    mean_square = mean * (1.f / 32.f);
  }
};

/// Softmax over groups of 32 columns in three passes: maximum, sum, quotient. The second pass leaves exp(acc − max) in the
/// accumulator.
template <class S = Tensors<bf16>>
struct GroupSoftmax {
  Local<S, RowMax<float, 32>, 0> top;
  Local<S, RowSum<float, 32>, 1> total;
  Out<S, Tile<>> p;  // [M, N]

  CODA_FN void measure(Pass<0>, Real<S> acc) { top = acc; }
  CODA_FN void measure(Pass<1>, Real<S>& acc) {
    acc = exp(acc - top);
    total = acc;
  }
  CODA_FN void operator()(Real<S> acc) { p = acc / total; }
};

/// Scores of attention: scaled, masked above the diagonal, reduced over what is left. Rows whose whole slot is masked have
/// the log-sum-exp −inf.
template <class S = Tensors<bf16>>
struct CausalScores {
  In<S, Scalar<float>> scale;
  In<S, DeviceScalar<float>> cap;
  Out<S, Tile<float>> score;          // [M, N]
  Out<S, RowMax<float, 16>> largest;  // [N/16, M]
  Out<S, RowLogSumExp<48>> lse;       // [N/48, M]

  CODA_FN void operator()(Real<S> acc, At<S> at) {
    const Real<S> capped = cap * tanh(scale * acc / cap);
    const Real<S> masked = select(at.row < at.col, Real<S>(-std::numeric_limits<float>::infinity()), capped);
    score = select(at.row < at.col, Real<S>(-1e4f), capped);
    largest = masked;
    lse = masked;
  }
};

/// The same mask where accumulators come in pairs: at is where the first of the pair stands.
template <class S = Tensors<bf16>>
struct PairPositions {
  Out<S, HalfTile<float>> where;      // [M, N/2]
  Out<S, RowLogSumExp<32>> lse;       // [N/32, M]
  Out<S, RowMax<float, 96>> largest;  // [N/96, M]
  Out<S, ColSum<float, 5>> columns;   // [M/5, N]

  CODA_FN void operator()(Pair<Real<S>> acc, At<S> at) {
    where = acc.first - acc.second + select(at.col < at.row, to_real(at.col), -to_real(at.row));
    lse = acc;
    largest = acc;
    columns = acc;
  }
};

/// More fields than an aggregate of eight, and what only they read: partial sums as inputs, half tiles, tiles of float, two
/// accumulations, column sums of two heights.
template <class S = Tensors<bf16>>
struct ManyFields {
  float eps;
  int32_t shift;
  In<S, PerRow<float>> scale;             // [M]
  In<S, PerRow<int32_t>> offset;          // [M]
  In<S, PerPair<float>> weight;           // [P]
  In<S, HalfTile<>> half;                 // [M, N/2]
  In<S, Tile<float>> precise;             // [M, N]
  In<S, RowSum<float, 64>> partial_sum;   // [N/64, M]
  In<S, RowMax<float, 128>> partial_max;  // [N/128, M]
  Out<S, Accumulate<float>> total;        // [M, N]
  Out<S, Accumulate<float>> other_total;  // [M, N]
  Out<S, HalfTile<>> product;             // [M, N/2]
  Out<S, ColSum<float, 64>> columns;      // [M/64, N]
  Out<S, ColSum<float, 16>> squares;      // [M/16, N]
  Out<S, RowSum<float, 48>> row_sum;      // [N/48, M]

  CODA_FN void operator()(Pair<Real<S>> acc) {
    const Pair<Real<S>> x = scale * acc + Pair<Real<S>>(precise);
    total = x;
    other_total = (to_real(offset) + to_real(shift)) * acc;
    product = half * weight * x.first + partial_sum * x.second + partial_max + eps;
    columns = x;
    squares = x * x;
    row_sum = x;
  }
};

/// Double tiles in and out of float and of E, single accumulators.
template <class S = Tensors<bf16>>
struct Spread {
  In<S, DoubleTile<float>> z;      // [M, 2N]
  Out<S, DoubleTile<>> scaled;     // [M, 2N]
  Out<S, DoubleTile<float>> both;  // [M, 2N]
  Out<S, RowSum<float, 16>> dots;  // [N/16, M]

  CODA_FN void operator()(Real<S> acc) {
    const Pair<Real<S>> pair = z;
    scaled = acc * pair;
    both = Pair<Real<S>>{pair.first + acc, erf(pair.second) - max(acc, min(pair.first, log(abs(acc) + 2.f)))};
    dots = dot(pair, pair);
  }
};

}  // namespace coda::test
