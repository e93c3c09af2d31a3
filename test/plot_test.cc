#include "train/plot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace coda::train {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<StepMetrics> run(int64_t steps, int64_t eval_every) {
  std::vector<StepMetrics> out;
  for (int64_t k = 0; k < steps; ++k) {
    const double loss =
        1.3 + 4.3 * std::exp(-static_cast<double>(k) / 150) + 0.12 * std::sin(static_cast<double>(k * k));
    StepMetrics step{.step = k, .loss = loss, .grad_norm = 1, .tokens_per_s = 1, .lr = 1, .valid_loss = {}};
    if (eval_every > 0 && (k + 1) % eval_every == 0) step.valid_loss = loss + 0.1;
    out.push_back(step);
  }
  return out;
}

/// Every element is closed, in the right order; attributes are quoted; no bare '&'.
bool well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (size_t at = 0; at < xml.size(); ++at) {
    const std::string rest = xml.substr(at, 6);
    if (xml[at] == '>') return false;
    if (xml[at] == '&' && !rest.starts_with("&amp;") && !rest.starts_with("&lt;") && !rest.starts_with("&gt;") &&
        !rest.starts_with("&quot;")) {
      return false;
    }
    if (xml[at] != '<') continue;
    const size_t end = xml.find('>', at);
    if (end == std::string::npos) return false;
    const std::string tag = xml.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos || std::ranges::count(tag, '"') % 2 != 0) return false;
    if (std::ranges::count(tag, '=') * 2 != std::ranges::count(tag, '"')) return false;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (!tag.ends_with("/")) {
      open.push_back(name);
    }
    at = end;
  }
  return open.empty();
}

TEST(PlotTest, ShowsBothSeries) {
  const std::string svg = loss_svg(run(500, 50), "a <run> & \"more\"");
  EXPECT_TRUE(well_formed(svg)) << svg.substr(0, 400);
  for (const char* part : {"id=\"train\"", "id=\"train-mean\"", "id=\"valid\"", "training, each step", "validation: 1.",
                           ">step<", ">loss", "a &lt;run&gt; &amp; &quot;more&quot;", ">400<"}) {
    EXPECT_TRUE(contains(svg, part)) << part;
  }
  EXPECT_FALSE(contains(svg, "nan"));
  EXPECT_FALSE(contains(svg, "inf"));
}

TEST(PlotTest, NoValidationNoLegendForIt) {
  EXPECT_FALSE(contains(loss_svg(run(50, 0), "x"), "valid"));
}

TEST(PlotTest, AnyNumberOfStepsIsDrawn) {
  for (const int64_t steps : {0, 1, 2, 3, 100, 100000}) {
    const std::string svg = loss_svg(run(steps, 0), "x");
    EXPECT_TRUE(well_formed(svg)) << steps;
    EXPECT_FALSE(contains(svg, "nan")) << steps;
    EXPECT_LT(svg.size(), 100000u) << steps;
  }
}

TEST(PlotTest, AFlatLossIsDrawn) {
  std::vector<StepMetrics> steps = run(10, 0);
  for (auto& s : steps) s.loss = 2;
  EXPECT_FALSE(contains(loss_svg(steps, "x"), "nan"));
}

TEST(PlotTest, EverythingStaysInsideTheFrame) {
  const std::string svg = loss_svg(run(1000, 100), "x");
  for (size_t at = svg.find("points=\""); at != std::string::npos; at = svg.find("points=\"", at + 1)) {
    const char* p = svg.c_str() + at + 8;
    while (*p != '"') {
      char* next = nullptr;
      const double x = std::strtod(p, &next);
      const double y = std::strtod(next + 1, &next);  // past the comma
      EXPECT_TRUE(x >= 70 && x <= 765 && y >= 50 && y <= 440) << x << ", " << y;
      p = *next == ' ' ? next + 1 : next;
    }
  }
}

}  // namespace
}  // namespace coda::train
