// cuDNN, loaded when it is asked for: everything else runs on machines without it.
#pragma once

namespace coda::hopper {

/// Loads cuDNN, once, and checks its version. CODA_CUDNN names its libcudnn.so.9; without, the loader's search path, CUDA's folder and
/// the active virtual environment are looked through. Throws DeviceError that says what is needed, what was found and where to get it.
void load_cudnn();

}  // namespace coda::hopper
