// Libraries of others that are loaded when they are asked for, so that nothing else needs them.
#pragma once
#include <dlfcn.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "coda/error.h"

namespace coda::bench {

class SharedLibrary {
 public:
  /// Loads the first of files that can be. Otherwise throws Error: what names the library, remedy says where to get it.
  SharedLibrary(std::string what, std::initializer_list<const char*> files, const std::string& remedy)
      : what_(std::move(what)) {
    for (const char* file : files) {
      // Once loaded it stays: a library may leave threads or handlers behind.
      handle_.reset(dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE));
      if (handle_) return;
    }
    throw Error(what_ + " is not here: " + remedy);
  }

  template <class Function>
  Function* symbol(const char* name) const {
    void* found = dlsym(handle_.get(), name);
    if (found == nullptr) throw Error("the " + what_ + " that was found has no " + name);
    return reinterpret_cast<Function*>(found);
  }

 private:
  struct Close {
    void operator()(void* handle) const { dlclose(handle); }
  };
  std::string what_;
  std::unique_ptr<void, Close> handle_;
};

}  // namespace coda::bench
