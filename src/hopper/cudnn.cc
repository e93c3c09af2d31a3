#include "hopper/cudnn.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "coda/gpu.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where cudnn-frontend looks for cuDNN's functions
}

namespace coda::hopper {

namespace {

constexpr size_t kNeededMajor = 9, kNeededMinor = 19;  // what attention is tested with
constexpr const char* kFile = "libcudnn.so.9";
constexpr const char* kRemedy =
    "pip install 'nvidia-cudnn-cu13>=9.19' and set CODA_CUDNN to its site-packages/nvidia/cudnn/lib/libcudnn.so.9, or "
    "put a folder with libcudnn.so.9 on LD_LIBRARY_PATH";

/// Where libcudnn.so.9 may be, in order.
std::vector<std::string> places() {
  if (const char* named = std::getenv("CODA_CUDNN"); named != nullptr && *named != '\0') return {named};
  std::vector<std::string> files{kFile, std::string("/usr/local/cuda/lib64/") + kFile};
  if (const char* environment = std::getenv("VIRTUAL_ENV"); environment != nullptr) {
    std::error_code none;
    for (const auto& python : std::filesystem::directory_iterator(std::filesystem::path(environment) / "lib", none))
      files.push_back(python.path() / "site-packages/nvidia/cudnn/lib" / kFile);
  }
  return files;
}

void* open_first(const std::vector<std::string>& files) {
  std::string troubles;
  for (const std::string& file : files) {
    // Once loaded it stays: it leaves threads and handlers behind.
    if (void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); handle != nullptr) return handle;
    troubles += (troubles.empty() ? "" : "; ") + std::string(dlerror());
  }
  throw DeviceError(fmt::format("attention on a GPU needs cuDNN {}.{} or newer, which is not here ({}): {}",
                                kNeededMajor, kNeededMinor, troubles, kRemedy));
}

void* load() {
  void* handle = open_first(places());
  const auto get_version = reinterpret_cast<size_t (*)()>(dlsym(handle, "cudnnGetVersion"));
  const size_t version = get_version == nullptr ? 0 : get_version();  // 91900 is 9.19.0
  if (version < kNeededMajor * 10000 + kNeededMinor * 100) {
    Dl_info where{};
    const char* file = dladdr(reinterpret_cast<void*>(get_version), &where) != 0 ? where.dli_fname : kFile;
    throw DeviceError(fmt::format("attention on a GPU needs cuDNN {}.{} or newer; {} is of version {}.{}.{}: {}",
                                  kNeededMajor, kNeededMinor, file, version / 10000, version / 100 % 100, version % 100,
                                  kRemedy));
  }
  return handle;
}

}  // namespace

void load_cudnn() {
  static void* const handle = load();
  cudnn_frontend::cudnn_dlhandle = handle;
}

}  // namespace coda::hopper
