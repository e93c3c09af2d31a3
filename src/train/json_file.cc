#include "json_file.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "coda/error.h"
#include "input_file.h"

namespace coda::train {

using nlohmann::json;

namespace {

constexpr int kDeepest = 32;  // what coda and transformers write nests 3 deep

/// Asked by the parser at every step: ends what is nested too deep, and an object with two keys of one name.
class Bounds {
 public:
  explicit Bounds(const std::filesystem::path& path) : path_(path) {}

  bool operator()(int depth, json::parse_event_t event, const json& parsed) {
    if (depth > kDeepest) throw FileError(path_.string(), fmt::format("is nested more than {} deep", kDeepest));
    const auto inside = static_cast<size_t>(depth);
    if (event == json::parse_event_t::object_start) {
      keys_.resize(inside + 1);
      keys_.emplace_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_[inside].insert(key).second)
        throw FileError(path_.string(), "has " + quote_name(key) + " twice in one object");
    }
    return true;
  }

 private:
  const std::filesystem::path& path_;
  std::vector<std::set<std::string>> keys_;  // by depth, of the objects that are open
};

}  // namespace

json read_json(const std::filesystem::path& path, int64_t largest) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) throw FileError(path.string(), "is not there");
  const InputFile file(path);
  if (file.size() > largest) {
    throw FileError(path.string(), fmt::format("has {} bytes; at most {} are allowed", file.size(), largest));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, text.data(), file.size());

  json result;
  try {
    Bounds bounds(path);
    result = json::parse(
        text, [&](int depth, json::parse_event_t event, const json& parsed) { return bounds(depth, event, parsed); });
  } catch (const json::parse_error& fault) {
    throw FileError(path.string(), fmt::format("is not valid JSON (byte {})", fault.byte));
  } catch (const json::exception&) {  // a number out of range
    throw FileError(path.string(), "is not valid JSON");
  }
  if (!result.is_object()) throw FileError(path.string(), "is not a JSON object");
  return result;
}

std::optional<int64_t> whole_number(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    return std::in_range<int64_t>(number) ? std::optional(static_cast<int64_t>(number)) : std::nullopt;
  }
  return value.is_number_integer() ? std::optional(value.get<int64_t>()) : std::nullopt;
}

std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return quote_name(value.get_ref<const std::string&>());
  return value.dump();
}

std::string quote_name(const std::string& name) {
  constexpr size_t kLongest = 100;
  return json(name.size() <= kLongest ? name : name.substr(0, kLongest) + "...")
      .dump(-1, ' ', true, json::error_handler_t::replace);
}

}  // namespace coda::train
