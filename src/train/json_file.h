// JSON files, whoever wrote them.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace coda::train {

/// The whole of a JSON file that has to be an object. Throws FileError for a file of more than `largest` bytes, one that is
/// nested deeper than any of coda's or transformers', and for a key that occurs twice in an object, since readers differ in
/// which of the two they take.
nlohmann::json read_json(const std::filesystem::path& path, int64_t largest);

/// The number, if the value is a whole one from -2^63 to 2^63 - 1: get<int64_t>() would cut a fraction off and wrap around.
std::optional<int64_t> whole_number(const nlohmann::json& value);

/// A value for a message, on one line and not long.
std::string shown(const nlohmann::json& value);

/// A name out of a file, in quotes, fit to stand in a one-line message whatever it holds.
std::string quote_name(const std::string& name);

}  // namespace coda::train
