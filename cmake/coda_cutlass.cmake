# CUTLASS's headers, for the GPU half: the target coda_cutlass. They come from CUTLASS_DIR, a cache or environment variable that
# names a folder with include/cutlass/cutlass.h; without one, from the PyPI package whose hash scripts/requirements-cutlass.txt
# pins, fetched once into the build folder.
include(cmake/coda_wheel.cmake)
set(CODA_CUTLASS_VERSION 4.2.0)
set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A copy of CUTLASS: the folder with include/cutlass/cutlass.h")

set(cutlass_dir "${CUTLASS_DIR}")
if(NOT cutlass_dir)
  set(cutlass_dir ${PROJECT_BINARY_DIR}/cutlass-${CODA_CUTLASS_VERSION})
  coda_fetch_wheel("CUTLASS ${CODA_CUTLASS_VERSION}" requirements-cutlass.txt cutlass_library/source ${cutlass_dir}
    "or set CUTLASS_DIR to a copy of it, the folder with include/cutlass/cutlass.h")
elseif(NOT EXISTS ${cutlass_dir}/include/cutlass/version.h)
  message(FATAL_ERROR "CUTLASS_DIR is ${cutlass_dir}; it needs to be a folder with include/cutlass/cutlass.h")
endif()
file(STRINGS ${cutlass_dir}/include/cutlass/version.h lines REGEX "define CUTLASS_(MAJOR|MINOR|PATCH)")
string(REGEX REPLACE ".*MAJOR +([0-9]+).*MINOR +([0-9]+).*PATCH +([0-9]+).*" "\\1.\\2.\\3" cutlass_version "${lines}")
if(cutlass_version VERSION_LESS CODA_CUTLASS_VERSION)
  message(FATAL_ERROR "CUTLASS_DIR holds CUTLASS ${cutlass_version}; it needs to be ${CODA_CUTLASS_VERSION} or newer")
endif()
add_library(coda_cutlass INTERFACE IMPORTED)
target_include_directories(coda_cutlass SYSTEM INTERFACE ${cutlass_dir}/include)
# Its kernels wait for the one in front, and let the one behind start early, only where they are told that they may.
target_compile_definitions(coda_cutlass INTERFACE CUTLASS_ENABLE_GDC_FOR_SM90=1)
