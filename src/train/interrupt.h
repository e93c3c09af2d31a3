// Ctrl-C and SIGTERM: the first asks the run to end, the second ends the process.
#pragma once

namespace coda::train {

/// Catches both signals while it lives. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  /// The signal that came, or 0.
  int signal() const;
};

}  // namespace coda::train
