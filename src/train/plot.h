// loss.svg: the loss of a run as a picture.
#pragma once
#include <span>
#include <string>

#include "metrics.h"

namespace coda::train {

/// An SVG of 800 by 500: the training loss of every step (thin), its running mean (thick), the validation's points, axes
/// with numbers, a legend. The title is escaped here.
std::string loss_svg(std::span<const StepMetrics> steps, const std::string& title);

/// Writes it whole or not at all: a viewer never sees half a picture.
void write_loss_svg(const std::string& path, std::span<const StepMetrics> steps, const std::string& title);

}  // namespace coda::train
