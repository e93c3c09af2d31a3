// The card's clock and power, by NVML, which comes with the driver.
#pragma once
#include <limits>
#include <memory>
#include <string>

namespace coda::bench {

struct CardState {
  double mhz = std::numeric_limits<double>::quiet_NaN();  // SM clock at the moment
  double watts =
      std::numeric_limits<double>::quiet_NaN();  // what NVML calls usage: on this generation the last second's mean
};

/// Where NVML is missing or does not answer, everything is unknown and trouble() says why.
class Nvml {
 public:
  explicit Nvml(int device);  // as CUDA counts them
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  const std::string& trouble() const { return trouble_; }
  const std::string& driver() const { return driver_; }
  double power_limit_watts() const { return power_limit_watts_; }
  double top_mhz() const { return top_mhz_; }
  CardState state() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  std::string trouble_, driver_ = "unknown";
  double power_limit_watts_ = 0, top_mhz_ = 0;
};

}  // namespace coda::bench
