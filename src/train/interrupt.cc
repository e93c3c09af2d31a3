#include "interrupt.h"

#include <unistd.h>

#include <csignal>

namespace coda::train {
namespace {

volatile std::sig_atomic_t caught = 0;

// Only what POSIX allows in a handler: write and _exit, no streams.
void on_signal(int signal) {
  if (caught != 0) _exit(128 + signal);
  caught = signal;
  constexpr char kText[] = "\nfinishing this step and saving; once more quits at once\n";
  [[maybe_unused]] const auto wrote = write(STDERR_FILENO, kText, sizeof(kText) - 1);
}

void handle(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // a save that is under way goes on
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  caught = 0;
  handle(on_signal);
}

Interrupt::~Interrupt() {
  handle(SIG_DFL);
}

int Interrupt::signal() const {
  return caught;
}

}  // namespace coda::train
