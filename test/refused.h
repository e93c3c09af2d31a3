// Calls that must be refused.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "coda/error.h"

namespace coda::test {

/// call() must throw E about this operand.
template <class E = OperandError, class Call>
void expect_refused(const Call& call, const std::string& operand, const std::string& got, const std::string& needs) {
  try {
    call();
    ADD_FAILURE() << operand << " was accepted; it should be refused as " << got;
  } catch (const E& e) {
    EXPECT_EQ(e.operand(), operand);
    EXPECT_EQ(e.got(), got);
    EXPECT_EQ(e.needs(), needs);
    EXPECT_EQ(std::string(e.what()), operand + " is " + got + "; it needs " + needs);
  }
}

}  // namespace coda::test
