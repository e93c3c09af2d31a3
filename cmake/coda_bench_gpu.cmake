# `coda bench --device cuda`, in the GPU half only. Needs CUDA's headers and its static runtime; cuBLAS and NVML are loaded when
# they are asked for. The objects define what is a weak symbol otherwise, so they are linked, not archived:
#   target_link_libraries(coda_cli PRIVATE coda_bench_gpu)
if(coda_has_gpu AND (CODA_BUILD_CLI OR CODA_BUILD_TESTS))
  find_package(CUDAToolkit REQUIRED)
  file(GLOB bench_gpu_sources CONFIGURE_DEPENDS src/bench/gpu/*.cc)
  add_library(coda_bench_gpu OBJECT EXCLUDE_FROM_ALL ${bench_gpu_sources})
  target_link_libraries(coda_bench_gpu PUBLIC coda_bench fmt::fmt CUDA::cudart_static)
  target_compile_options(coda_bench_gpu PRIVATE $<$<CONFIG:Release>:-O1>)
endif()
