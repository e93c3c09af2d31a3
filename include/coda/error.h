// Errors of the library. Every one of them is thrown before anything is written.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

namespace coda {

/// The base of every exception that coda throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An operand that cannot be used: which one, what it is, and what it has to be.
class OperandError : public Error {
 public:
  OperandError(std::string operand, std::string got, std::string needs)
      : Error(operand + " is " + got + "; it needs " + needs),
        operand_(std::move(operand)),
        got_(std::move(got)),
        needs_(std::move(needs)) {}

  const std::string& operand() const { return operand_; }
  const std::string& got() const { return got_; }
  const std::string& needs() const { return needs_; }

 private:
  std::string operand_, got_, needs_;
};

/// Two operands that share memory although one of them is written.
class OverlapError : public OperandError {
 public:
  using OperandError::OperandError;
};

/// An option or a request that makes no sense, whatever the data (the command line exits with 2).
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A file that is missing, damaged, or says something that coda does not do.
class FileError : public Error {
 public:
  FileError(const std::string& path, const std::string& trouble) : Error(path + ": " + trouble), path_(path) {}

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace coda
