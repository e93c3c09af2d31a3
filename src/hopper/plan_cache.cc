#include "hopper/plan_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>

#include "coda/error.h"

namespace coda::hopper {

namespace {

using coda::detail::Form;
using coda::detail::HopperTile;
using Json = nlohmann::ordered_json;

constexpr int kVersion = 2;                    // 1 had orders that are no more
constexpr off_t kMostBytes = off_t{16} << 20;  // tens of thousands of plans
constexpr std::array kForms = {Form::TN, Form::NN, Form::NT};
constexpr std::array kTiles = {HopperTile::pingpong_128x128, HopperTile::cooperative_128x128,
                               HopperTile::pingpong_64x256, HopperTile::cooperative_128x256,
                               HopperTile::cooperative_256x128};

int64_t leading_bits(int64_t size) {
  constexpr int kBits = 3;
  const int drop = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(size))) - kBits);
  return size >> drop << drop;
}

/// The one of all that is called so.
template <class All>
auto named(const All& all, const std::string& word) {
  const auto found = std::ranges::find_if(all, [&](auto one) { return word == name(one); });
  if (found == all.end()) throw Error(fmt::format("there is no \"{}\"", word));
  return *found;
}

int64_t size_in(const Json& entry, const char* key) {
  const Json& value = entry.at(key);
  if (!value.is_number_integer() || value.is_number_float()) throw Error(fmt::format("{} is not a size", key));
  const auto size = value.get<int64_t>();
  if (size < 0) throw Error(fmt::format("{} is not a size", key));
  return size;
}

TunedEntry entry_of(const Json& json) {
  TunedEntry entry{.card = json.at("card").get<std::string>(),
                   .program = json.at("program").get<std::string>(),
                   .form = named(kForms, json.at("form").get<std::string>()),
                   .shape = {size_in(json, "m"), size_in(json, "n"), size_in(json, "k")},
                   .plan = {.tile = named(kTiles, json.at("tile").get<std::string>()),
                            .band = static_cast<int>(std::min<int64_t>(size_in(json, "band"), 1000))}};
  if (std::ranges::find(kBands, entry.plan.band) == std::end(kBands))
    throw Error(fmt::format("no plan has a band of {}", entry.plan.band));
  return entry;
}

std::string words_of(int error) {
  return std::generic_category().message(error);
}

/// A file's text; none if there is no file. Never waits on a pipe that somebody put there.
std::optional<std::string> text_of_file(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return {};
    throw Error("cannot be opened: " + words_of(errno));
  }
  const auto close = [](const int* d) { ::close(*d); };
  const std::unique_ptr<const int, decltype(close)> closed(&descriptor, close);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) throw Error("is not a file");
  if (status.st_size > kMostBytes) throw Error("is larger than any cache of plans");
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t got = ::read(descriptor, text.data() + have, text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error("cannot be read: " + words_of(errno));
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  text.resize(have);
  return text;
}

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

}  // namespace

Shape class_of(const Shape& shape) {
  return {leading_bits(shape.m), leading_bits(shape.n), leading_bits(shape.k)};
}

const TunedPlan* TunedPlans::find(std::string_view card, std::string_view program, Form form,
                                  const Shape& shape) const {
  if (plans_.empty()) return nullptr;
  const auto found = plans_.find(std::tuple(class_of(shape), form, program, card));
  return found != plans_.end() ? &found->second : nullptr;
}

void TunedPlans::put(const TunedEntry& entry) {
  plans_.insert_or_assign({class_of(entry.shape), entry.form, entry.program, entry.card}, entry.plan);
}

TunedPlans TunedPlans::from_json(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw Error("is damaged");
  if (!json.is_object() || !json.contains("coda_plans")) throw Error("is not a cache of coda's plans");
  if (json["coda_plans"] != kVersion)
    throw Error(fmt::format("is of version {}, not {}", json["coda_plans"].dump(), kVersion));
  TunedPlans plans;
  try {
    for (const Json& entry : json.at("plans")) plans.put(entry_of(entry));
  } catch (const Json::exception& error) {
    throw Error(fmt::format("is damaged: {}", error.what()));
  } catch (const Error& error) {
    throw Error(fmt::format("is damaged: {}", error.what()));
  }
  return plans;
}

std::string TunedPlans::json() const {
  Json list = Json::array();
  for (const auto& [key, plan] : plans_) {
    const auto& [shape, form, program, card] = key;
    list.push_back({{"card", card},
                    {"program", program},
                    {"form", name(form)},
                    {"m", shape.m},
                    {"n", shape.n},
                    {"k", shape.k},
                    {"tile", name(plan.tile)},
                    {"band", plan.band}});
  }
  return Json{{"coda_plans", kVersion}, {"plans", std::move(list)}}.dump(1) + "\n";
}

std::optional<std::filesystem::path> plan_cache_path() {
  const auto file = [](const std::filesystem::path& folder) { return folder / "plans.json"; };
  if (const char* folder = variable("CODA_CACHE")) return file(folder);
  // A relative one is to be ignored, says the convention.
  if (const char* folder = variable("XDG_CACHE_HOME"); folder != nullptr && *folder == '/')
    return file(std::filesystem::path(folder) / "coda");
  if (const char* home = variable("HOME")) return file(std::filesystem::path(home) / ".cache" / "coda");
  return {};
}

TunedPlans load_plans(const std::filesystem::path& path) {
  try {
    const std::optional<std::string> text = text_of_file(path);
    return text ? TunedPlans::from_json(*text) : TunedPlans{};
  } catch (const Error& error) {
    fmt::print(stderr, "coda: {} {}; plans are chosen untuned\n", path.string(), error.what());
    return {};
  }
}

const TunedPlans& tuned_plans() {
  static const TunedPlans plans = [] {
    const auto path = plan_cache_path();
    return path ? load_plans(*path) : TunedPlans{};
  }();
  return plans;
}

}  // namespace coda::hopper
