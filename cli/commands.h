// The commands of `coda`: each adds itself to the command line and says what to do when it is asked for.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>

namespace coda::verify {
class Programs;
}

namespace coda::cli {

struct Command {
  CLI::App* app;
  std::function<int()> run;  // the exit code; throws coda::UsageError for misuse, anything else for failure
};

Command train_command(CLI::App& coda);
Command eval_command(CLI::App& coda);
Command sample_command(CLI::App& coda);
Command bench_command(CLI::App& coda);
Command explain_command(CLI::App& coda);
/// programs: those that there are, asked for when the command runs.
Command verify_command(CLI::App& coda, std::function<const verify::Programs&()> programs);

}  // namespace coda::cli
