#include "explain/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "explain/table.h"
#include "xml.h"

namespace coda::explain {
namespace {

// Columns, left to right: the stream, forward, what is kept, backward, the stream's gradient with the weights' beside it.
constexpr int kWidth = 1244;
constexpr int kStream = 24, kStreamWidth = 136, kStreamLine = kStream + kStreamWidth / 2;
constexpr int kForward = 194, kBackward = 696, kNodeWidth = 300;
constexpr int kKept = 520, kKeptWidth = 150;
constexpr int kGradient = 1030, kGradientWidth = 190, kGradientLine = kGradient + 24;
constexpr int kWeight = 1078, kWeightWidth = kGradient + kGradientWidth - kWeight;
// Rows of nodes, and the gaps between them where tensors and statistics stand.
constexpr int kTop = 150, kNodeHeight = 78, kGap = 66, kPitch = kNodeHeight + kGap, kBoxHeight = 38;
// Where lines meet the side of a node, from its top.
constexpr int kUpper = 16, kMiddle = 39, kLower = 60;
constexpr int kBend = 17;  // from a node's side to where its line turns

enum Place { kB4Product, kF4, kAttention, kF1, kF2, kF3, kF5, kB5 };

int top(int place) {
  return kTop + place * kPitch;
}
/// The middle of the gap below a row.
int gap(int place) {
  return top(place) + kNodeHeight + kGap / 2;
}

struct Palette {
  const char *fill, *line;
};
constexpr Palette kProductColor = {"#dbe8f7", "#5b84b1"};
constexpr Palette kProgramColor = {"#fdf1d8", "#c79a3e"};
constexpr Palette kOwnColor = {"#ececef", "#8a8a94"};
constexpr Palette kKeptColor = {"#e0f0e3", "#4f8f5e"};
constexpr Palette kPassingColor = {"#ffffff", "#8a8a94"};
constexpr Palette kStatisticColor = {"#f1e9f8", "#8a63ad"};
constexpr const char* kInk = "#1f2430";
constexpr const char* kFaint = "#5d6472";
constexpr const char* kStreamColor = "#34507a";

enum class Weight { normal, bold };
enum class Anchor { start, middle, end };

struct Style {
  double size = 11;
  Weight weight = Weight::normal;
  const char* color = kInk;
  Anchor anchor = Anchor::start;
};

class Canvas {
 public:
  void rect(int x, int y, int width, int height, int radius, const Palette& color, double stroke = 1) {
    add(R"(<rect x="{}" y="{}" width="{}" height="{}" rx="{}" fill="{}" stroke="{}" stroke-width="{}"/>)", x, y, width,
        height, radius, color.fill, color.line, stroke);
  }
  void text(int x, int y, std::string_view content, const Style& style) {
    add(R"(<text x="{}" y="{}" font-size="{}"{}{} fill="{}">{}</text>)", x, y, style.size,
        style.weight == Weight::bold ? R"( font-weight="bold")" : "",
        style.anchor == Anchor::middle ? R"( text-anchor="middle")"
        : style.anchor == Anchor::end  ? R"( text-anchor="end")"
                                       : "",
        style.color, escaped_xml(content));
  }
  /// data: an SVG path.
  void arrow(const std::string& data, const char* color, double width = 1.4) {
    add(R"(<path d="{}" fill="none" stroke="{}" stroke-width="{}" marker-end="{}"/>)", data, color, width,
        marker_url(color));
  }
  void dashed_arrow(const std::string& data) {
    add(R"(<path d="{}" fill="none" stroke="{}" stroke-width="1.2" stroke-dasharray="4 3" marker-end="{}"/>)", data,
        kStatisticColor.line, marker_url(kStatisticColor.line));
  }
  void line(const std::string& data, const char* color, double width) {
    add(R"(<path d="{}" fill="none" stroke="{}" stroke-width="{}"/>)", data, color, width);
  }

  std::string svg(int height, const std::string& title) const {
    std::string out =
        fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" )"
                    R"(font-family="Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif">)"
                    "\n<title>{2}</title>\n<defs>",
                    kWidth, height, escaped_xml(title));
    for (const char* color : {kFaint, kStreamColor, kKeptColor.line, kStatisticColor.line}) {
      out += fmt::format(
          R"(<marker id="{}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" )"
          R"(markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.6 L8 4 L0 7.4 z" fill="{}"/></marker>)",
          marker(color), color);
    }
    return out + fmt::format("</defs>\n<rect width=\"{}\" height=\"{}\" fill=\"#ffffff\"/>\n", kWidth, height) + body_ +
           "</svg>\n";
  }

 private:
  static std::string marker(std::string_view color) { return fmt::format("arrow-{}", color.substr(1)); }
  static std::string marker_url(std::string_view color) { return fmt::format("url(#{})", marker(color)); }
  template <class... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(body_), format, std::forward<Values>(values)...);
    body_ += '\n';
  }

  std::string body_;
};

class Picture {
 public:
  Picture(const Block& block, const std::vector<Row>& rows) : block_(block), rows_(rows) {}
  std::string svg();

 private:
  const Row& row(std::string_view name) const { return *std::ranges::find(rows_, name, &Row::name); }
  Tensor activations(const char* name, int64_t cols) const { return {name, block_.tokens, cols, block_.element}; }

  void node(int x, int place, std::string_view name);
  void box(int x, int y, int width, const Tensor& tensor, const Palette& color, std::string_view note = "");
  void statistic(int x, int y, int width, std::string_view name, std::string_view formula);
  void weight_gradient(int place, std::string_view name);
  void legend();
  int summary(int y);

  void streams();
  void forward();
  void backward();
  void loss();

  // A stream and a node's near side.
  void read_stream(int place, const char* note) {
    canvas_.arrow(fmt::format("M{} {} H{}", kStreamLine, top(place) + kUpper, kForward), kStreamColor);
    canvas_.text(kForward - 10, top(place) + kUpper - 5, note, {.size = 10, .color = kFaint, .anchor = Anchor::end});
  }
  void write_stream(int place) {
    canvas_.arrow(fmt::format("M{} {} H{} V{} H{}", kForward, top(place) + kLower, kForward - kBend, gap(place),
                              kStream + kStreamWidth),
                  kStreamColor);
  }
  void read_gradient(int place) {
    canvas_.arrow(fmt::format("M{} {} H{}", kGradientLine, top(place) + kLower, kBackward + kNodeWidth), kStreamColor);
  }
  void write_gradient(int place) {
    canvas_.arrow(fmt::format("M{} {} H{} V{} H{}", kBackward + kNodeWidth, top(place) + kUpper,
                              kBackward + kNodeWidth + kBend, gap(place - 1), kGradient),
                  kStreamColor);
  }
  // A node and a tensor in the middle column, in the gap below the row or above it.
  void keep(int place, const char* color = kKeptColor.line) {
    canvas_.arrow(fmt::format("M{} {} H{} V{}", kForward + kNodeWidth, top(place) + kLower, kKept + 40,
                              gap(place) - kBoxHeight / 2),
                  color);
  }
  void use_forward(int place) {
    canvas_.arrow(fmt::format("M{} {} V{} H{}", kKept + 40, gap(place - 1) + kBoxHeight / 2, top(place) + kUpper,
                              kForward + kNodeWidth),
                  kKeptColor.line);
  }
  void use_backward_below(int place, const char* color = kKeptColor.line) {
    canvas_.arrow(fmt::format("M{} {} V{} H{}", kKept + kKeptWidth - 40, gap(place - 1) + kBoxHeight / 2,
                              top(place) + kUpper, kBackward),
                  color);
  }
  void use_backward_above(int place) {
    canvas_.arrow(fmt::format("M{} {} V{} H{}", kKept + kKeptWidth - 40, gap(place) - kBoxHeight / 2,
                              top(place) + kLower, kBackward),
                  kKeptColor.line);
  }
  // Between two nodes of a column, through what stands in the gap below `place`.
  void down(int x, int place) {
    canvas_.arrow(fmt::format("M{} {} V{}", x, top(place) + kNodeHeight, gap(place) - kBoxHeight / 2), kFaint);
    canvas_.arrow(fmt::format("M{} {} V{}", x, gap(place) + kBoxHeight / 2, top(place + 1)), kFaint);
  }
  void up(int x, int place) {
    canvas_.arrow(fmt::format("M{} {} V{}", x, top(place + 1), gap(place) + kBoxHeight / 2), kFaint);
    canvas_.arrow(fmt::format("M{} {} V{}", x, gap(place) - kBoxHeight / 2, top(place) + kNodeHeight), kFaint);
  }
  void statistic_down(int x, int place, bool goes_on) {
    canvas_.dashed_arrow(fmt::format("M{} {} V{}", x, top(place) + kNodeHeight, gap(place) - kBoxHeight / 2));
    if (goes_on) canvas_.dashed_arrow(fmt::format("M{} {} V{}", x, gap(place) + kBoxHeight / 2, top(place + 1)));
  }
  void statistic_up(int x, int place) {
    canvas_.dashed_arrow(fmt::format("M{} {} V{}", x, top(place + 1), gap(place) + kBoxHeight / 2));
    canvas_.dashed_arrow(fmt::format("M{} {} V{}", x, gap(place) - kBoxHeight / 2, top(place) + kNodeHeight));
  }

  const Block& block_;
  const std::vector<Row>& rows_;
  Canvas canvas_;
};

constexpr size_t kLineLength = 44;  // of a formula in a node

/// Cut at ";  " so that no line is longer than fits, where that can be.
std::vector<std::string> lines_of(std::string_view formula) {
  constexpr std::string_view kCut = ";  ";
  std::vector<std::string> lines = {""};
  while (!formula.empty()) {
    const size_t end = std::min(formula.find(kCut), formula.size());
    const std::string part(formula.substr(0, end));
    formula.remove_prefix(std::min(end + kCut.size(), formula.size()));
    std::string& line = lines.back();
    if (!line.empty() && line.size() + part.size() > kLineLength) {
      line += ";";
      lines.push_back(part);
    } else {
      line += (line.empty() ? "" : ";  ") + part;
    }
  }
  return lines;
}

void Picture::node(int x, int place, std::string_view name) {
  constexpr int kStrip = 24;
  const Row& r = row(name);
  const int y = top(place);
  const bool own = r.step == Step::attention;
  const Palette& head = r.step == Step::product ? kProductColor : kOwnColor;
  const Palette& body = own ? kOwnColor : kProgramColor;
  canvas_.rect(x, y, kNodeWidth, kNodeHeight, 5, body);
  canvas_.rect(x, y, kNodeWidth, kStrip, 5, head);
  canvas_.text(x + 9, y + 16, r.name, {.size = 12.5, .weight = Weight::bold});
  canvas_.text(x + (r.name.size() > 3 ? 98 : 36), y + 16, r.step == Step::product ? r.what : "", {.size = 12});
  const char* form = r.form == Form::tn ? "TN" : r.form == Form::nn ? "NN" : "NT";
  const std::string kind = r.step == Step::product ? fmt::format("{}  {}", form, flops_text(r.fused.flops))
                           : own                   ? std::string("a kernel of its own")
                                                   : std::string("elementwise, in place");
  canvas_.text(x + kNodeWidth - 9, y + 16, kind, {.size = 10.5, .color = kFaint, .anchor = Anchor::end});
  const std::string title = !own ? r.program->name : r.backward ? "its derivative" : "online softmax";
  canvas_.text(x + 9, y + 41, title, {.size = 11.5, .weight = Weight::bold});
  canvas_.text(x + kNodeWidth - 9, y + 41,
               fmt::format("{} in, {} out", bytes_text(r.fused.read), bytes_text(r.fused.written)),
               {.size = 10, .color = kFaint, .anchor = Anchor::end});
  if (!own) {
    const std::string sizes = r.sizes.k ? fmt::format("{}×{}×{}", r.sizes.m, r.sizes.n, *r.sizes.k)
                                        : fmt::format("{}×{}", r.sizes.m, r.sizes.n);
    canvas_.text(x + kNodeWidth - 9, y + 70, sizes, {.size = 10, .color = kFaint, .anchor = Anchor::end});
  }
  int baseline = y + 56;
  for (const std::string& line : lines_of(r.formula)) {
    canvas_.text(x + 9, baseline, line, {.size = 11});
    baseline += 14;
  }
}

void Picture::box(int x, int y, int width, const Tensor& tensor, const Palette& color, std::string_view note) {
  canvas_.rect(x, y - kBoxHeight / 2, width, kBoxHeight, 3, color);
  canvas_.text(x + width / 2, y - 3, fmt::format("{}{}", tensor.name, note),
               {.size = 12, .weight = Weight::bold, .anchor = Anchor::middle});
  canvas_.text(x + width / 2, y + 12, fmt::format("[{}, {}]  {}", tensor.rows, tensor.cols, bytes_text(tensor.bytes())),
               {.size = 10, .color = kFaint, .anchor = Anchor::middle});
}

void Picture::statistic(int x, int y, int width, std::string_view name, std::string_view formula) {
  canvas_.rect(x, y - kBoxHeight / 2, width, kBoxHeight, kBoxHeight / 2, kStatisticColor);
  canvas_.text(x + width / 2, y - 3, name, {.size = 11, .weight = Weight::bold, .anchor = Anchor::middle});
  canvas_.text(x + width / 2, y + 12, formula, {.size = 10, .color = kFaint, .anchor = Anchor::middle});
}

void Picture::weight_gradient(int place, std::string_view name) {
  constexpr int kHeight = 54;
  const Row& r = row(name);
  const int y = top(place) + kMiddle - kHeight / 2;
  canvas_.line(fmt::format("M{} {} H{}", kBackward + kNodeWidth, top(place) + kMiddle, kWeight), kFaint, 1);
  canvas_.rect(kWeight, y, kWeightWidth, kHeight, 5, kProductColor);
  canvas_.text(kWeight + 8, y + 16, r.name, {.size = 11.5, .weight = Weight::bold});
  canvas_.text(kWeight + kWeightWidth - 8, y + 16, "NT", {.size = 10, .color = kFaint, .anchor = Anchor::end});
  canvas_.text(kWeight + 8, y + 31, r.what, {.size = 11});
  canvas_.text(kWeight + 8, y + 46,
               fmt::format("[{}, {}]  {}", r.sizes.m, r.sizes.n,
                           bytes_text(Tensor{"", r.sizes.m, r.sizes.n, ElementType::float32}.bytes())),
               {.size = 10, .color = kFaint});
}

void Picture::legend() {
  const int x = kStream, y = kTop + 2;
  const auto entry = [&](int at, int line, const Palette& color, int radius, const char* text) {
    canvas_.rect(at, y + line * 20, 22, 13, radius, color);
    canvas_.text(at + 29, y + line * 20 + 10, text, {.size = 11, .color = kFaint});
  };
  entry(x, 0, kProductColor, 3, "a product, and below it");
  entry(x, 1, kProgramColor, 3, "the program in its epilogue");
  entry(x, 2, kOwnColor, 3, "no product: a kernel of its own");
  entry(x + 238, 0, kKeptColor, 3, "a tensor kept for the backward pass");
  entry(x + 238, 1, kPassingColor, 3, "a tensor that is used once");
  entry(x + 238, 2, kStatisticColor, 6, "a statistic of rows: partial sums, then [M]");
}

void Picture::streams() {
  const int64_t d = block_.hidden;
  const int last = block_.vocab ? top(kF5) + kUpper : gap(kF3);
  canvas_.line(fmt::format("M{} {} V{}", kStreamLine, gap(kB4Product), last), kStreamColor, 3);
  canvas_.line(fmt::format("M{} {} V{}", kGradientLine, gap(kF3), gap(kB4Product - 1)), kStreamColor, 3);
  box(kStream, gap(kB4Product), kStreamWidth, activations("h", d), kKeptColor);
  box(kStream, gap(kF1), kStreamWidth, activations("h_mid", d), kKeptColor);
  box(kStream, gap(kF3), kStreamWidth, activations("h_next", d), kKeptColor);
  box(kGradient, gap(kB4Product - 1), kGradientWidth, activations("d_h", d), kPassingColor);
  box(kGradient, gap(kF1), kGradientWidth, activations("d_h_mid", d), kPassingColor);
  box(kGradient, gap(kF3), kGradientWidth, activations("d_h_next", d), kPassingColor);
  canvas_.text(kStream, gap(kB4Product) - kBoxHeight / 2 - 7, "residual stream",
               {.size = 11, .weight = Weight::bold, .color = kStreamColor});
  canvas_.text(kGradient, gap(kB4Product - 1) - kBoxHeight / 2 - 7, "its gradient",
               {.size = 11, .weight = Weight::bold, .color = kStreamColor});
}

void Picture::forward() {
  constexpr int kPill = 190, kPillX = kForward + (kNodeWidth - kPill) / 2, kMid = kForward + kNodeWidth / 2;
  node(kForward, kF4, "F4");
  node(kForward, kAttention, "attention");
  node(kForward, kF1, "F1");
  node(kForward, kF2, "F2");
  node(kForward, kF3, "F3");
  read_stream(kF4, "h");
  read_stream(kF1, "residual");
  read_stream(kF2, "h_mid");
  read_stream(kF3, "residual");
  write_stream(kF1);
  write_stream(kF3);

  keep(kF4);
  use_forward(kAttention);
  keep(kAttention);
  use_forward(kF1);
  keep(kF2);
  box(kKept, gap(kF4), kKeptWidth, activations("qkv", block_.qkv_width()), kKeptColor);
  box(kKept, gap(kAttention), kKeptWidth, activations("a", block_.query_width()), kKeptColor, ", lse");
  box(kKept, gap(kF2), kKeptWidth, activations("gate_up", 2 * block_.ffn), kKeptColor);
  down(kMid, kF2);
  box(kMid - kKeptWidth / 2, gap(kF2), kKeptWidth, activations("y", block_.ffn), kPassingColor);

  statistic(kPillX, gap(kB4Product), kPill, "r", "of the layer before");
  canvas_.dashed_arrow(fmt::format("M{} {} V{}", kMid, gap(kB4Product) + kBoxHeight / 2, top(kF4)));
  statistic_down(kMid, kF1, true);
  statistic(kPillX, gap(kF1), kPill, "finish r_mid", row("finish r_mid").formula);
  statistic_down(kMid, kF3, block_.vocab.has_value());
  statistic(kPillX, gap(kF3), kPill, "finish r_next", row("finish r_next").formula);
}

void Picture::backward() {
  constexpr int kHalf = 144, kLeft = kBackward, kRight = kBackward + kNodeWidth - kHalf;
  constexpr int kLeftMid = kLeft + kHalf / 2, kRightMid = kRight + kHalf / 2;
  node(kBackward, kB4Product, "B4 product");
  node(kBackward, kF4, "B4");
  node(kBackward, kAttention, "attention backward");
  node(kBackward, kF1, "B1");
  node(kBackward, kF2, "B2");
  node(kBackward, kF3, "B3");
  for (const int place : {kB4Product, kF1, kF2, kF3}) read_gradient(place);
  write_gradient(kB4Product);
  write_gradient(kF2);

  use_backward_above(kF4);
  use_backward_below(kAttention);
  use_backward_above(kAttention);
  use_backward_below(kF3);

  up(kLeftMid, kB4Product);
  box(kLeft, gap(kB4Product), kHalf, activations("d_qkv′", block_.qkv_width()), kPassingColor);
  statistic_up(kRightMid, kB4Product);
  statistic(kRight, gap(kB4Product), kHalf, "finish s", row("finish s").formula);
  up(kLeftMid, kF4);
  box(kLeft, gap(kF4), kHalf, activations("d_qkv", block_.qkv_width()), kPassingColor);
  up(kLeftMid, kAttention);
  box(kLeft, gap(kAttention), kHalf, activations("d_a", block_.query_width()), kPassingColor);
  up(kLeftMid, kF2);
  box(kLeft, gap(kF2), kHalf, activations("d_z′", 2 * block_.ffn), kPassingColor);
  statistic_up(kRightMid, kF2);
  statistic(kRight, gap(kF2), kHalf, "finish s_mid", row("finish s_mid").formula);

  weight_gradient(kB4Product, "W qkv");
  weight_gradient(kF1, "W o");
  weight_gradient(kF2, "W gate_up");
  weight_gradient(kF3, "W down");
}

void Picture::loss() {
  constexpr int kHalf = 144, kRight = kBackward + kNodeWidth - kHalf, kPill = 190;
  constexpr int kLeftMid = kBackward + kHalf / 2, kMid = kForward + kNodeWidth / 2;
  const int64_t v = *block_.vocab;
  node(kForward, kF5, "F5");
  read_stream(kF5, "h_next");
  keep(kF5, kFaint);
  const Tensor logits{"logits", block_.chunk, v, block_.element};
  box(kKept, gap(kF5), kKeptWidth, logits, kPassingColor, ", a chunk's");
  statistic_down(kMid, kF5, false);
  statistic(kMid - kPill / 2, gap(kF5), kPill, "finish lse", row("finish lse").formula);
  use_backward_below(kB5, kFaint);

  node(kBackward, kF5, "B5 product");
  node(kBackward, kB5, "B5");
  up(kLeftMid, kF5);
  box(kBackward, gap(kF5), kHalf, {"d_l′", block_.chunk, v, block_.element}, kPassingColor);
  statistic_up(kRight + kHalf / 2, kF5);
  statistic(kRight, gap(kF5), kHalf, "finish s_next", row("finish s_next").formula);
  write_gradient(kF5);
  weight_gradient(kF5, "W lm");
}

/// Backward and forward together. Returns where it ends.
int Picture::summary(int y) {
  const auto moved = [&](const char* what, Part part) {
    const Totals t = total(rows_, part, {});
    const auto unfused = [&](const Sum& sum) {
      return fmt::format("{} ({:.2f}×)", bytes_text(sum.bytes()),
                         static_cast<double>(sum.bytes()) / static_cast<double>(t.fused.bytes()));
    };
    return fmt::format("{}: {}, moves {}; a kernel per operator {}, one between products {}", what,
                       flops_text(t.fused.flops), bytes_text(t.fused.bytes()), unfused(t.separate),
                       unfused(t.compiled));
  };
  std::vector<std::string> lines = {moved("The layer without attention", Part::layer)};
  if (block_.vocab)
    lines.push_back(moved(fmt::format("The loss, {} tokens at a time", block_.chunk).c_str(), Part::loss));
  const Totals all = total(rows_, Part::all, {});
  lines.push_back(
      fmt::format("Kept for the backward pass: {}; unfused {}", bytes_text(all.kept), bytes_text(all.kept_separate)));
  for (const std::string& line : lines) {
    canvas_.text(kStream, y, line, {.size = 12});
    y += 18;
  }
  return y;
}

std::string Picture::svg() {
  const std::string title = "A Llama layer as products with programs in their epilogues";
  const Block& b = block_;
  canvas_.text(kStream, 36, title, {.size = 18, .weight = Weight::bold});
  canvas_.text(
      kStream, 58,
      fmt::format("{} tokens in {}, hidden {}, ffn {}, {} heads and {} key-value heads of {}{}. r = 1/√(mean h² + ε) "
                  "arrives one product late; W̃ = W ⊙ γ; d_z′ = r ⊙ d_z.",
                  b.tokens, name(b.element), b.hidden, b.ffn, b.heads, b.kv_heads, b.head_dim,
                  b.vocab ? fmt::format(", vocabulary {}", *b.vocab) : ""),
      {.size = 12, .color = kFaint});
  canvas_.text(kForward + kNodeWidth / 2, kTop - 24, "forward ↓",
               {.size = 14, .weight = Weight::bold, .anchor = Anchor::middle});
  canvas_.text(kBackward + kNodeWidth / 2, kTop - 24, "↑ backward",
               {.size = 14, .weight = Weight::bold, .anchor = Anchor::middle});
  legend();
  forward();
  backward();
  if (b.vocab) loss();
  streams();  // over the lines that cross them
  const int bottom = b.vocab ? top(kB5) + kNodeHeight + 24 : gap(kF3) + kBoxHeight / 2 + 24;
  return canvas_.svg(summary(bottom + 10) + 2, title);
}

}  // namespace

std::string block_svg(const Block& block, const std::vector<Row>& rows) {
  return Picture(block, rows).svg();
}

}  // namespace coda::explain
