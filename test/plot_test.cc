#include "train/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <regex>

namespace coda::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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
  static const std::regex kTag(R"(<(/?)([a-z]+)((?: [a-zA-Z:0-9-]+="[^"<]*")*) ?(/?)>)");
  std::vector<std::string> open;
  size_t end = 0;
  for (std::sregex_iterator it(xml.begin(), xml.end(), kTag), none; it != none; ++it) {
    const auto begin = static_cast<size_t>(it->position());
    if (xml.substr(end, begin - end).find_first_of("<>") != std::string::npos) return false;
    end = begin + static_cast<size_t>(it->length());
    if ((*it)[1].length() > 0) {
      if (open.empty() || open.back() != (*it)[2]) return false;
      open.pop_back();
    } else if ((*it)[4].length() == 0) {
      open.push_back((*it)[2]);
    }
  }
  static const std::regex kBare("&(?!amp;|lt;|gt;|quot;)");
  return open.empty() && end + 1 == xml.size() && !std::regex_search(xml, kBare);
}

TEST(PlotTest, ShowsBothSeries) {
  const std::string svg = loss_svg(run(500, 50), "a <run> & \"more\"");
  EXPECT_TRUE(well_formed(svg)) << svg.substr(0, 400);
  for (const char* part : {"id=\"train\"", "id=\"train-mean\"", "id=\"valid\"", "training, each step", "validation: 1.",
                           ">step<", ">loss", "a &lt;run&gt; &amp; &quot;more&quot;", ">400<"}) {
    EXPECT_THAT(svg, HasSubstr(part));
  }
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(PlotTest, NoValidationNoLegendForIt) {
  EXPECT_THAT(loss_svg(run(50, 0), "x"), Not(HasSubstr("valid")));
}

TEST(PlotTest, AnyNumberOfStepsIsDrawn) {
  for (const int64_t steps : {0, 1, 2, 3, 100, 100000}) {
    const std::string svg = loss_svg(run(steps, 0), "x");
    EXPECT_TRUE(well_formed(svg)) << steps;
    EXPECT_THAT(svg, Not(HasSubstr("nan"))) << steps;
    EXPECT_LT(svg.size(), 100000u) << steps;
  }
}

TEST(PlotTest, AFlatLossIsDrawn) {
  std::vector<StepMetrics> steps = run(10, 0);
  for (auto& s : steps) s.loss = 2;
  EXPECT_THAT(loss_svg(steps, "x"), Not(HasSubstr("nan")));
}

TEST(PlotTest, EverythingStaysInsideTheFrame) {
  const std::string svg = loss_svg(run(1000, 100), "x");
  const std::regex point(R"((-?[0-9.]+),(-?[0-9.]+) )");
  for (std::sregex_iterator it(svg.begin(), svg.end(), point), none; it != none; ++it) {
    const double x = std::stod((*it)[1]), y = std::stod((*it)[2]);
    EXPECT_TRUE(x >= 70 && x <= 765 && y >= 50 && y <= 440) << x << ", " << y;
  }
}

}  // namespace
}  // namespace coda::train
