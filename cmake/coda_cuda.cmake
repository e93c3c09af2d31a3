# The GPU half: the target coda_hopper, compiled by nvcc, and with it the command line. Built where CODA_CUDA is ON (`make cuda`);
# everything else builds without nvcc.
file(GLOB hopper_sources CONFIGURE_DEPENDS src/hopper/*.cc src/llama/gpu/*.cc)
list(REMOVE_ITEM hopper_sources ${hopper_sources_without_gpu})  # they are in coda
file(GLOB hopper_kernels CONFIGURE_DEPENDS src/hopper/*.cu src/kernels/*.cu)
if(NOT CODA_CUDA)
  return()
endif()
if(NOT hopper_kernels)
  add_custom_target(coda_cuda
    COMMAND ${CMAKE_COMMAND} -E echo "coda: there is no GPU half yet: neither src/hopper nor src/kernels holds a .cu file" VERBATIM)
  return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # it may have been installed since
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(CODA_CUDA OFF CACHE BOOL "" FORCE)  # so that the CPU half builds as before
  message(FATAL_ERROR "the GPU half needs nvcc, which was not found: put it on PATH, or set CUDACXX to it")
endif()
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER} CACHE FILEPATH "")
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # of which CMake 3.25.1 knows nothing
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.3)
  message(FATAL_ERROR "nvcc is of version ${CMAKE_CUDA_COMPILER_VERSION}; the GPU half needs 12.3 or newer")
endif()
find_package(CUDAToolkit REQUIRED)
include(cmake/coda_cutlass.cmake)
include(cmake/coda_cudnn.cmake)
# An nvcc takes up to 2 GB.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=2)

add_library(coda_hopper STATIC ${hopper_sources} ${hopper_kernels})
# What ptxas reports of each kernel is kept beside its object, and must be what a fast kernel's is.
set(launcher ${PROJECT_SOURCE_DIR}/scripts/nvcc_checked ${CMAKE_CXX_COMPILER_LAUNCHER})
set_target_properties(coda_hopper PROPERTIES
  CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static
  JOB_POOL_COMPILE nvcc OPTIMIZE_DEPENDENCIES ON
  CUDA_COMPILER_LAUNCHER "${launcher}")
target_include_directories(coda_hopper PRIVATE src)
target_link_libraries(coda_hopper PUBLIC coda CUDA::cudart_static PRIVATE coda_cutlass coda_cudnn ${CMAKE_DL_LIBS})
# For its host code only: what nvcc compiles has no text to format.
target_include_directories(coda_hopper SYSTEM PRIVATE
  "$<$<COMPILE_LANGUAGE:CXX>:$<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>>")
target_compile_definitions(coda_hopper PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:FMT_HEADER_ONLY=1>")
# Kernels are fast and without checks whatever the configuration. 554: nvcc warns of a conversion that its own constraint excludes.
set(coda_cuda_options
  "$<$<COMPILE_LANGUAGE:CUDA>:-O3;-DNDEBUG;--expt-relaxed-constexpr;--prec-div=false;-Xptxas=-v;-diag-suppress=554>")
target_compile_options(coda_hopper PRIVATE "${coda_cuda_options}")

# Verification finds a program's kernels by weak references, which draw nothing out of an archive.
add_custom_target(coda_cuda DEPENDS coda_hopper)
if(CODA_BUILD_CLI)
  foreach(part verify bench explain)
    file(GLOB sources CONFIGURE_DEPENDS src/${part}/gpu/*.cc)
    target_sources(coda_cli PRIVATE ${sources})
  endforeach()
  target_link_libraries(coda_cli PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,coda_hopper>)
  add_dependencies(coda_cuda coda_cli)
endif()
# libcoda_bench.so, for the comparison with PyTorch. It carries its own libstdc++, hidden as all but its C functions: a Python may have
# loaded another, and the libraries that are linked in, built for executables, can refer to nothing outside of it.
if(CODA_BUILD_CLI)
  file(GLOB torch_bench_sources CONFIGURE_DEPENDS src/bench/torch/*.cc src/bench/torch/*.cu)
  add_library(coda_torch_bench SHARED ${torch_bench_sources} src/bench/gpu/device.cc src/bench/gpu_cases.cc)
  set_target_properties(coda_torch_bench PROPERTIES OUTPUT_NAME coda_bench
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static
    CUDA_COMPILER_LAUNCHER "${launcher}"
    LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/bench/torch/exports.map)
  target_include_directories(coda_torch_bench PRIVATE src)
  target_compile_options(coda_torch_bench PRIVATE "${coda_cuda_options}")
  # As the libraries are: a part of fmt that is not there would be drawn out of whichever of their objects has it.
  target_link_libraries(coda_torch_bench PRIVATE coda_hopper coda fmt::fmt-header-only)
  target_link_options(coda_torch_bench PRIVATE -static-libstdc++ -static-libgcc
    "LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/bench/torch/exports.map")
  add_dependencies(coda_cuda coda_torch_bench)
  # It names stderr, which only code that may lie anywhere reaches from a shared library.
  set_source_files_properties(src/hopper/plan_cache.cc PROPERTIES COMPILE_OPTIONS -fPIC)
endif()
# Run by hand on a machine with a GPU: cmake --build build --target coda_gpu_tests, then build/test/gpu/…
if(CODA_BUILD_TESTS)
  add_custom_target(coda_gpu_tests)
  foreach(name attention calls elementwise loss map model)
    add_executable(gpu_${name}_test EXCLUDE_FROM_ALL test/gpu/${name}_test.cc)
    set_target_properties(gpu_${name}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/test/gpu)
    target_include_directories(gpu_${name}_test PRIVATE src test)
    target_link_libraries(gpu_${name}_test PRIVATE coda_hopper coda fmt::fmt)
    add_dependencies(coda_gpu_tests gpu_${name}_test)
  endforeach()
  # A model is made through a weak reference, which draws nothing out of an archive.
  target_link_options(gpu_model_test PRIVATE LINKER:--undefined=_ZN4coda5llama12model_on_gpuERKNS0_6ConfigE)
  target_sources(gpu_map_test PRIVATE test/gpu/map_test_kernels.cu)
  target_link_libraries(gpu_map_test PRIVATE coda_verify)
  target_compile_options(gpu_map_test PRIVATE "${coda_cuda_options}")
  set_target_properties(gpu_map_test PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static)
endif()
