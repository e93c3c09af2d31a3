// Plans that `coda bench --tune` found best, kept in a file for every later process: per card, program, form and class of shapes.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "hopper/plan.h"

namespace coda::hopper {

/// Shapes that are tuned as one: of each size the three leading bits, four classes from a power of two to the next.
Shape class_of(const Shape& shape);

struct TunedPlan {
  coda::detail::HopperTile tile;
  int band;  // one of kBands
};

/// One plan, for the class of a shape.
struct TunedEntry {
  std::string card, program;  // "NVIDIA H200", as CODA_HOPPER_PROGRAM spells it
  coda::detail::Form form;
  Shape shape;
  TunedPlan plan;
};

class TunedPlans {
 public:
  /// The plan for a shape of this one's class, or null. Nothing is allocated.
  const TunedPlan* find(std::string_view card, std::string_view program, coda::detail::Form form,
                        const Shape& shape) const;
  /// In the place of the one that is there.
  void put(const TunedEntry& entry);
  size_t size() const { return plans_.size(); }

  /// Throws Error that says what is wrong with the text: damaged, of another version, or with values that no plan has.
  static TunedPlans from_json(std::string_view text);
  std::string json() const;

 private:
  using Key = std::tuple<Shape, coda::detail::Form, std::string, std::string>;  // its class, form, program, card
  /// Also of a key whose strings are views.
  struct Less {
    using is_transparent = void;
    template <class A, class B>
    bool operator()(const A& a, const B& b) const {
      return values(a) < values(b);
    }
    template <class K>
    static auto values(const K& key) {
      const auto& [shape, form, program, card] = key;
      return std::tuple(shape.m, shape.n, shape.k, form, std::string_view(program), std::string_view(card));
    }
  };
  std::map<Key, TunedPlan, Less> plans_;
};

/// plans.json in $CODA_CACHE, $XDG_CACHE_HOME/coda or ~/.cache/coda; none where the environment has none of them.
std::optional<std::filesystem::path> plan_cache_path();

/// What a file holds: nothing if there is none, and nothing, with one line on stderr, if it is not one of ours.
TunedPlans load_plans(const std::filesystem::path& path);

/// What this process runs by: the file at plan_cache_path(), read the first time that somebody asks.
const TunedPlans& tuned_plans();

}  // namespace coda::hopper
