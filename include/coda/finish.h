// The second stage of partial reductions: slots combined in ascending order, in double, one rounding per result.
#pragma once
#include "coda/cpu.h"
#include "coda/operands.h"

namespace coda {

class Gpu;

/// out[i] = 1 / sqrt(Σ_slots sum_sq[slot, i] / width + eps). sum_sq [slots, M], out [M].
void inv_rms(Cpu& cpu, Matrix<const float> sum_sq, int64_t width, double eps, Vector<float> out);

/// Mean and 1 / sqrt(variance + eps) of rows of width columns, from the sum of every 128 columns and their squared deviations
/// from their own mean (Chan, Golub and LeVeque 1983): at a mean of 1000 deviations r keeps six digits, where a sum of squares
/// keeps one. sum, sq_deviation [slots, M]; mean, inv_std [M].
void mean_inv_std(Cpu& cpu, Matrix<const float> sum, Matrix<const float> sq_deviation, int64_t width, double eps,
                  Vector<float> mean, Vector<float> inv_std);

/// out[i] = Σ_slots dot[slot, i] / width: s of the RMSNorm backward. dot [slots, M], out [M].
void mean_dot(Cpu& cpu, Matrix<const float> dot, int64_t width, Vector<float> out);

/// out[i] = Σ_slots partial[slot, i]. For a ColSum, partial [slots, N], out [N].
void total(Cpu& cpu, Matrix<const float> partial, Vector<float> out);

/// out[i] = log Σ exp over everything that the slots of row i have seen; -inf without any. partial [slots, M], out [M].
void log_sum_exp(Cpu& cpu, Matrix<const MaxSum> partial, Vector<float> out);

// The same over memory of a GPU, on its stream: slots in ascending order within sixteenths of them, these in ascending order.
// They throw what the others throw, and DeviceError if CUDA refuses the launch.
void inv_rms(const Gpu& gpu, Matrix<const float> sum_sq, int64_t width, double eps, Vector<float> out);
void mean_inv_std(const Gpu& gpu, Matrix<const float> sum, Matrix<const float> sq_deviation, int64_t width, double eps,
                  Vector<float> mean, Vector<float> inv_std);
void mean_dot(const Gpu& gpu, Matrix<const float> dot, int64_t width, Vector<float> out);
void total(const Gpu& gpu, Matrix<const float> partial, Vector<float> out);
void log_sum_exp(const Gpu& gpu, Matrix<const MaxSum> partial, Vector<float> out);

}  // namespace coda
