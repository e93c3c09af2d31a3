// What verification says: a row for each check of a program on an engine.
#pragma once
#include <cstdint>
#include <string>

#include "verify/case.h"

namespace coda::verify {

/// What a row says.
enum class Check {
  oracle,      // every output is the oracle's, within its bound, and nothing else was written
  derivative,  // a backward program is the derivative of its forward program, by dual numbers
  repetition,  // the same call again, and on other numbers of threads, leaves the same bytes
};

/// One check of one program on one engine.
struct Row {
  Check check;
  std::string program;
  std::string of;          // of a derivative: the forward program
  std::string engine;      // "cpu avx2"
  int64_t calls = 0;       // of a repetition, all of them
  Comparison worst;        // of all calls
  std::string worst_call;  // where worst.by_ulps was: "65x144x257 TN, bf16 · float"
  std::string fault;       // the first thing that was wrong, in words; empty: the row passed

  bool passed() const { return fault.empty(); }
  /// Takes a call's result; the first that does not pass is the fault.
  void take(const Comparison& comparison, const std::string& call);
};

}  // namespace coda::verify
