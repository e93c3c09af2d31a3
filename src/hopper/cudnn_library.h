// cuDNN, found when it is first needed: programs that never ask for it run on machines that have none.
#pragma once
#include <cudnn.h>

#include "coda/gpu.h"

namespace coda::hopper {

/// Loads cuDNN: the file that the environment variable CODA_CUDNN names, or else libcudnn.so.9 from where the loader looks.
/// Throws DeviceError that says what is needed, what was found, and where to get it. cuDNN's own functions, declared in
/// cudnn.h, may be called afterwards.
void load_cudnn();

/// Throws DeviceError with what cuDNN says.
inline void check(cudnnStatus_t status, const char* call) {
  if (status != CUDNN_STATUS_SUCCESS) throw DeviceError(std::string(call) + ": cuDNN says " + cudnnGetErrorString(status));
}

}  // namespace coda::hopper
