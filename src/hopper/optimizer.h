// AdamW on a GPU, parameter by parameter; src/llama/parameters.cc says in which order. What changes from step to step
// is read from the device's memory, so that a captured step can be replayed.
#pragma once
#include "coda/gpu.h"
#include "llama/optimizer_rows.h"

namespace coda::hopper {

/// Bytes of gpu's workspace that add_squares needs.
inline constexpr int64_t kSquaresWorkspace = 1024 * sizeof(double);

/// *sum += Σ x², in double, in an order that depends on the shape only. sum is on the device.
void add_squares(const Gpu& gpu, Matrix<const float> x, double* sum);

/// *norm = sqrt(*sum_of_squares) and step->gradient_scale = min(1, clip / (norm + 1e-6)), or 1 for clip = 0; NaN where
/// the norm is not finite: adamw() changes nothing then. All on the device.
void clip_gradients(const Gpu& gpu, const double* sum_of_squares, double clip, double* norm, llama::AdamWStep* step);

/// What adamw() updates, and the weight that products read.
struct AdamWParameter {
  Matrix<float> master, moment1, moment2;  // [rows, cols]
  Matrix<const float> gradient;            // [rows, cols]
  Vector<const float> gamma;               // [cols]  folded into weight; none where empty
  Matrix<bf16> weight;                     // [rows, cols]  master ⊙ gamma, rounded once; none where empty
  bool decays = true;                      // by step->decay
};

/// One step of AdamW (llama::adamw_row) with the numbers of *step, which is on the device. Where its gradient_scale is
/// NaN nothing changes. gamma is read as it is: update the norms' weights first.
void adamw(const Gpu& gpu, const AdamWParameter& parameter, const llama::AdamWStep* step);

}  // namespace coda::hopper
