#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "durable_file.h"
#include "xml.h"

namespace coda::train {
namespace {

constexpr double kWidth = 800, kHeight = 500;
constexpr double kLeft = 70, kRight = 765, kTop = 50, kBottom = 440;  // of the plot's frame

constexpr const char* kRaw = "#a8c5e8";
constexpr const char* kMean = "#1f5fa8";
constexpr const char* kValid = "#d1495b";

/// Round numbers, about `wanted` of them, that cover [low, high].
struct Ticks {
  double first = 0, step = 1;
  int count = 1;
  int decimals = 0;

  Ticks(double low, double high, int wanted, double smallest) {
    const double rough = std::max((high - low) / wanted, smallest);
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    const double fraction = rough / power;
    step = power * (fraction <= 1.0001 ? 1 : fraction <= 2.0001 ? 2 : fraction <= 5.0001 ? 5 : 10);
    step = std::max(step, smallest);
    first = std::floor(low / step + 1e-9) * step;
    count = static_cast<int>(std::ceil((high - first) / step - 1e-9)) + 1;
    if (count < 2) count = 2;
    decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9)));
  }
  double at(int i) const { return first + step * i; }
  double last() const { return at(count - 1); }
};

struct Point {
  double x, y;
};

/// Where a loss of a step is on the picture.
struct Frame {
  double first_step, last_step;
  double low, high;
  Point operator()(double step, double loss) const {
    return {kLeft + (step - first_step) / (last_step - first_step) * (kRight - kLeft),
            kBottom - (loss - low) / (high - low) * (kBottom - kTop)};
  }
};

/// A run of a million steps has a thousand points to a pixel: of each bucket the smallest and the largest are enough.
std::vector<Point> thinned(const std::vector<Point>& points, size_t buckets) {
  if (points.size() <= 2 * buckets) return points;
  std::vector<Point> out;
  for (size_t b = 0; b < buckets; ++b) {
    const auto begin = points.begin() + static_cast<std::ptrdiff_t>(points.size() * b / buckets);
    const auto end = points.begin() + static_cast<std::ptrdiff_t>(points.size() * (b + 1) / buckets);
    auto [low, high] = std::minmax_element(begin, end, [](Point a, Point b) { return a.y < b.y; });
    if (low > high) std::swap(low, high);
    out.push_back(*low);
    if (low != high) out.push_back(*high);
  }
  return out;
}

std::string polyline(const std::vector<Point>& points, const char* name, const char* color, double width) {
  std::string out = fmt::format(
      "<polyline id=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" "
      "stroke-linejoin=\"round\" points=\"",
      name, color, width);
  for (const Point p : points) fmt::format_to(std::back_inserter(out), "{:.1f},{:.1f} ", p.x, p.y);
  return out + "\"/>\n";
}

/// The mean over a window around each step, a thirtieth of the run wide, five steps at least. It is centred, for a mean of
/// past steps alone would lie above a falling loss; at the run's end, where the loss hardly falls, it makes do with the past.
std::vector<double> smoothed(std::span<const StepMetrics> steps) {
  std::vector<double> sums = {0};
  for (const StepMetrics& s : steps) sums.push_back(sums.back() + s.loss);
  std::vector<double> means;
  for (size_t i = 0; i < steps.size(); ++i) {
    const size_t reach = std::min(i, std::max(steps.size() / 60, std::min<size_t>(2, steps.size() / 10)));
    const size_t begin = i - reach, end = std::min(steps.size(), i + reach + 1);
    means.push_back((sums[end] - sums[begin]) / static_cast<double>(end - begin));
  }
  return means;
}

}  // namespace

std::string loss_svg(std::span<const StepMetrics> steps, const std::string& title) {
  double low = INFINITY, high = -INFINITY, first_step = 0, last_step = 1;
  bool validated = false;
  for (const StepMetrics& s : steps) {
    low = std::min({low, s.loss, s.valid_loss.value_or(s.loss)});
    high = std::max({high, s.loss, s.valid_loss.value_or(s.loss)});
    validated |= s.valid_loss.has_value();
  }
  if (steps.empty()) {
    low = 0, high = 1;
  } else {
    first_step = static_cast<double>(steps.front().step);
    last_step = std::max(first_step + 1, static_cast<double>(steps.back().step + 1));
  }
  const Ticks x_ticks(first_step, last_step, 8, 1);
  const Ticks y_ticks(low, high, 7, 1e-6);
  // Losses end at a round number; steps fill the frame from edge to edge.
  const Frame place{first_step, last_step, y_ticks.first, y_ticks.last()};

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"30\" font-size=\"17\" font-weight=\"bold\">{3}</text>\n",
      kWidth, kHeight, kLeft, escaped_xml(title));

  for (int i = 0; i < y_ticks.count; ++i) {
    const double y = place(first_step, y_ticks.at(i)).y;
    fmt::format_to(std::back_inserter(svg),
                   "<line x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\" stroke=\"#e4e4e4\"/>\n"
                   "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.{}f}</text>\n",
                   kLeft, y, kRight, y, kLeft - 8, y + 4.5, y_ticks.at(i), y_ticks.decimals);
  }
  for (int i = 0; i < x_ticks.count; ++i) {
    if (x_ticks.at(i) < first_step || x_ticks.at(i) > last_step) continue;
    const double x = place(x_ticks.at(i), low).x;
    fmt::format_to(std::back_inserter(svg),
                   "<line x1=\"{:.1f}\" y1=\"{}\" x2=\"{:.1f}\" y2=\"{}\" stroke=\"#333\"/>\n"
                   "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
                   x, kBottom, x, kBottom + 5, x, kBottom + 20, x_ticks.at(i));
  }
  fmt::format_to(
      std::back_inserter(svg),
      "<polyline fill=\"none\" stroke=\"#333\" points=\"{0},{1} {0},{2} {3},{2}\"/>\n"
      "<text x=\"{4}\" y=\"{5}\" text-anchor=\"middle\">step</text>\n"
      "<text transform=\"translate(20 {6}) rotate(-90)\" text-anchor=\"middle\">loss (nats a token)</text>\n",
      kLeft, kTop, kBottom, kRight, (kLeft + kRight) / 2, kBottom + 44, (kTop + kBottom) / 2);

  std::vector<Point> raw, mean, valid;
  const std::vector<double> means = smoothed(steps);
  for (size_t i = 0; i < steps.size(); ++i) {
    const double step = static_cast<double>(steps[i].step);
    raw.push_back(place(step, steps[i].loss));
    mean.push_back(place(step, means[i]));
    // The validation is of the weights after the update, which the next step's loss is of too.
    if (steps[i].valid_loss) valid.push_back(place(step + 1, *steps[i].valid_loss));
  }
  svg += polyline(thinned(raw, 700), "train", kRaw, 1);
  svg += polyline(thinned(mean, 700), "train-mean", kMean, 2);
  if (validated) {
    svg += polyline(valid, "valid", kValid, 1.5);
    for (const Point p : valid) {
      fmt::format_to(std::back_inserter(svg), "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", p.x, p.y,
                     kValid);
    }
  }

  // A loss falls: the upper right corner is the empty one.
  const double legend = kRight - 210;
  fmt::format_to(std::back_inserter(svg),
                 "<rect x=\"{}\" y=\"{}\" width=\"200\" height=\"{}\" fill=\"white\" stroke=\"#ccc\"/>\n", legend,
                 kTop + 8, validated ? 74 : 52);
  double y = kTop + 25;
  const auto entry = [&](const char* color, double width, const std::string& label) {
    fmt::format_to(std::back_inserter(svg),
                   "<line x1=\"{0}\" y1=\"{1}\" x2=\"{2}\" y2=\"{1}\" stroke=\"{3}\" stroke-width=\"{4}\"/>\n"
                   "<text x=\"{5}\" y=\"{6}\">{7}</text>\n",
                   legend + 10, y, legend + 38, color, width, legend + 46, y + 4.5, label);
    y += 22;
  };
  entry(kRaw, 1, "training, each step");
  entry(kMean, 2, steps.empty() ? "training, mean" : fmt::format("training, mean: {:.3f}", means.back()));
  if (validated) {
    const auto last =
        std::find_if(steps.rbegin(), steps.rend(), [](const auto& s) { return s.valid_loss.has_value(); });
    entry(kValid, 1.5, fmt::format("validation: {:.3f}", *last->valid_loss));
    fmt::format_to(std::back_inserter(svg), "<circle cx=\"{}\" cy=\"{}\" r=\"4\" fill=\"{}\"/>\n", legend + 24, y - 22,
                   kValid);
  }
  return svg + "</svg>\n";
}

void write_loss_svg(const std::string& path, std::span<const StepMetrics> steps, const std::string& title) {
  replace_file(path, loss_svg(steps, title));
}

}  // namespace coda::train
