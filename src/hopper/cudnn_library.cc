// The functions of cuDNN that coda and cuDNN's frontend call are defined here, each as a call of the library's own one.
#include "cudnn_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace coda::hopper {

namespace {

/// What it was tested with. Before 9.16 the frontend copies from the host where a length is no multiple of 128.
constexpr size_t kOldestVersion = 91900;
constexpr const char* kHowToGetIt =
    "pip install nvidia-cudnn-cu13, then put its folder, site-packages/nvidia/cudnn/lib, on LD_LIBRARY_PATH, or set "
    "CODA_CUDNN to the libcudnn.so.9 in there";

std::string version(size_t number) {
  return fmt::format("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
}

void* open_library() {
  const char* chosen = std::getenv("CODA_CUDNN");
  const std::string name = chosen != nullptr && *chosen != '\0' ? chosen : "libcudnn.so.9";
  const std::string needed = fmt::format("attention on a GPU needs cuDNN {} or newer of major version 9",
                                         version(kOldestVersion));
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw DeviceError(fmt::format("{}; {} cannot be loaded ({}): {}", needed, name, dlerror(), kHowToGetIt));
  const auto get_version = reinterpret_cast<decltype(&cudnnGetVersion)>(dlsym(library, "cudnnGetVersion"));
  const size_t found = get_version != nullptr ? get_version() : 0;
  if (found < kOldestVersion || found / 10000 != 9) {
    dlclose(library);
    throw DeviceError(found == 0 ? fmt::format("{}; {} is not cuDNN: {}", needed, name, kHowToGetIt)
                                 : fmt::format("{}; {} is {}: {}", needed, name, version(found), kHowToGetIt));
  }
  return library;
}

void* library() {
  static void* const opened = open_library();  // it stays loaded: kernels may be running when the process ends
  return opened;
}

}  // namespace

void load_cudnn() {
  library();
}

namespace {

template <class F>
F* function(const char* name) {
  void* const found = dlsym(library(), name);
  if (found == nullptr) throw DeviceError(fmt::format("cuDNN {} has no {}", version(cudnnGetVersion()), name));
  return reinterpret_cast<F*>(found);
}

}  // namespace

}  // namespace coda::hopper

// Hidden, so that a process that has cuDNN already (PyTorch's) goes on calling its own.
#pragma GCC visibility push(hidden)
extern "C" {

#define CODA_CUDNN(result, name, parameters, ...)                                  \
  result name parameters {                                                         \
    static auto* const called = coda::hopper::function<result parameters>(#name);  \
    return called(__VA_ARGS__);                                                    \
  }

CODA_CUDNN(size_t, cudnnGetVersion, (), )
CODA_CUDNN(const char*, cudnnGetErrorString, (cudnnStatus_t status), status)
CODA_CUDNN(void, cudnnGetLastErrorString, (char* message, size_t size), message, size)
CODA_CUDNN(cudnnStatus_t, cudnnCreate, (cudnnHandle_t * handle), handle)
CODA_CUDNN(cudnnStatus_t, cudnnDestroy, (cudnnHandle_t handle), handle)
CODA_CUDNN(cudnnStatus_t, cudnnSetStream, (cudnnHandle_t handle, cudaStream_t stream), handle, stream)
CODA_CUDNN(cudnnStatus_t, cudnnGetStream, (cudnnHandle_t handle, cudaStream_t* stream), handle, stream)
CODA_CUDNN(cudnnStatus_t, cudnnBackendCreateDescriptor,
           (cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor), type, descriptor)
CODA_CUDNN(cudnnStatus_t, cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t descriptor), descriptor)
CODA_CUDNN(cudnnStatus_t, cudnnBackendFinalize, (cudnnBackendDescriptor_t descriptor), descriptor)
CODA_CUDNN(cudnnStatus_t, cudnnBackendSetAttribute,
           (cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
            int64_t count, const void* values),
           descriptor, name, type, count, values)
CODA_CUDNN(cudnnStatus_t, cudnnBackendGetAttribute,
           (cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
            int64_t requested, int64_t* count, void* values),
           descriptor, name, type, requested, count, values)
CODA_CUDNN(cudnnStatus_t, cudnnBackendExecute,
           (cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variant_pack), handle, plan,
           variant_pack)

#undef CODA_CUDNN

}  // extern "C"
#pragma GCC visibility pop
