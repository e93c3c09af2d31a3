// coda: the command line. An error is one line on stderr; the exit code is 2 for misuse, 1 for failure.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "coda/error.h"
#include "commands.h"
#include "cpu/isa.h"
#include "train/version.h"
#include "verify/programs.h"

namespace {

constexpr int kFailure = 1;
constexpr int kMisuse = 2;

int refuse(std::string message, int code) {
  std::ranges::replace(message, '\n', ' ');
  fmt::print(stderr, "coda: {}\n", message);
  return code;
}

/// One line where the CPU engine will be slow. Throws UsageError if CODA_CPU_ISA asks for what is not there.
void announce_slow_engine() {
  if (coda::cpu::chosen_isa() == coda::cpu::Isa::generic) {
    fmt::print(
        stderr,
        "coda: running on SSE2, several times slower than on AVX2, which this CPU lacks or CODA_CPU_ISA excludes\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Llama models on this machine: train one on a text, measure it, let it write.\n\n"
      "  coda train --data FILE                 train a small Llama on a text file\n"
      "  coda eval --model DIR --data FILE      its loss on a text, as JSON\n"
      "  coda sample --model DIR --prompt TEXT  how it goes on from a text\n"
      "  coda bench                             how fast its products are beside a library's\n"
      "  coda explain [PROGRAM]                 what a program moves and computes, or a block of them\n"
      "  coda verify                            every program on every engine, against double precision\n\n"
      "`coda COMMAND --help` explains each. Models are folders in Hugging Face's layout, both ways.\n",
      "coda");
  app.set_version_flag("--version", fmt::format("coda {}", coda::train::kVersion));
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  // The program's name as it was called: what the commands tell the user to type has to work.
  if (argc > 0) app.name(argv[0]);

  const std::vector<coda::cli::Command> commands = {
      coda::cli::train_command(app),   coda::cli::eval_command(app),
      coda::cli::sample_command(app),  coda::cli::bench_command(app),
      coda::cli::explain_command(app), coda::cli::verify_command(app, coda::verify::library)};
  // The description above lists them, a line each; their own are pages.
  for (const coda::cli::Command& command : commands) command.app->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::string help = app.get_name();
    for (const coda::cli::Command& command : commands) {
      if (command.app->parsed()) help += " " + command.app->get_name();
    }
    return refuse(fmt::format("{} (see {} --help)", error.what(), help), kMisuse);
  }
  try {
    announce_slow_engine();
    for (const coda::cli::Command& command : commands) {
      if (command.app->parsed()) return command.run();
    }
  } catch (const coda::UsageError& error) {
    return refuse(error.what(), kMisuse);
  } catch (const std::bad_alloc&) {
    return refuse("out of memory", kFailure);
  } catch (const std::exception& error) {
    return refuse(error.what(), kFailure);
  }
  return refuse("no command", kMisuse);
}
