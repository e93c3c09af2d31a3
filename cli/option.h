// How options read in --help: "--batch B [8]", and words as "--dtype bf16|fp32 [fp32]".
#pragma once
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <map>
#include <string>
#include <vector>

#include "llama/model.h"
#include "llama/presets.h"
#include "train/data.h"
#include "train/options.h"

namespace coda::cli {

/// Shows the field's value as it is now after the option's text.
inline CLI::Option* show_default(CLI::Option* option) {
  option->capture_default_str();
  return option->option_text(fmt::format("{} [{}]", option->get_option_text(), option->get_default_str()));
}

/// Sets field to what the word stands for; any other word is misuse that names the ones there are.
template <class T>
CLI::Option* add_choice(CLI::App& app, const std::string& name, T& field, const std::map<std::string, T>& words,
                        const std::string& description) {
  std::string names, now;
  for (const auto& [word, value] : words) {
    names += (names.empty() ? "" : "|") + word;
    if (field == value) now = " [" + word + "]";
  }
  return app
      .add_option_function<std::string>(
          name,
          [&field, words, name, names](const std::string& word) {
            const auto found = words.find(word);
            if (found == words.end()) {
              throw CLI::ValidationError(name, fmt::format("{} is not one of {}", word, names));
            }
            field = found->second;
          },
          description)
      ->option_text(names + now);
}

inline CLI::Option* add_token_type(CLI::App& app, train::TokenType& field) {
  return add_choice<train::TokenType>(app, "--token-type", field,
                                      {{"u16", train::TokenType::u16}, {"u32", train::TokenType::u32}},
                                      "the data is token ids, headerless and little-endian, not text");
}

inline CLI::Option* add_device(CLI::App& app, train::DeviceKind& field, const std::string& description) {
  return add_choice<train::DeviceKind>(
      app, "--device", field, {{"cpu", train::DeviceKind::cpu}, {"cuda", train::DeviceKind::cuda}}, description);
}

/// Dtype, or one that may not be given.
template <class Field>
CLI::Option* add_dtype(CLI::App& app, Field& field, const std::string& description) {
  return add_choice<Field>(app, "--dtype", field, {{"fp32", llama::Dtype::fp32}, {"bf16", llama::Dtype::bf16}},
                           description);
}

inline CLI::Option* add_preset(CLI::App& app, std::string& field) {
  std::vector<std::string> names;
  for (const llama::Preset& preset : llama::kPresets) names.emplace_back(preset.name);
  return app.add_option("--preset", field, "a shape by its name, which other options change")
      ->option_text(fmt::format("{}", fmt::join(names, "|")))
      ->check(CLI::IsMember(names));
}

}  // namespace coda::cli
