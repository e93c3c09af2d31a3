# The headers of cuDNN and of its frontend, for the GPU half's attention: the target coda_cudnn. cuDNN itself is loaded when it runs.
#
# cuDNN's come from CUDNN_DIR, a cache or environment variable that names a folder with include/cudnn.h (in pip's package:
# site-packages/nvidia/cudnn), else from the CUDA toolkit or the system; the frontend's from CUDNN_FRONTEND_DIR, a folder with
# include/cudnn_frontend.h. Without them, from the PyPI packages whose hashes scripts/requirements-cudnn*.txt pin.
include(cmake/coda_wheel.cmake)
set(CODA_CUDNN_FRONTEND_VERSION 1.32.0)
set(CODA_CUDNN_VERSION 9.19.0)
set(CUDNN_DIR "$ENV{CUDNN_DIR}" CACHE PATH "A copy of cuDNN: the folder with include/cudnn.h")
set(CUDNN_FRONTEND_DIR "$ENV{CUDNN_FRONTEND_DIR}" CACHE PATH "A copy of cudnn-frontend: the folder with include/cudnn_frontend.h")

# The version that a header defines, as three numbers; empty without the header.
function(coda_version_in header prefix result)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS ${header})
    file(STRINGS ${header} lines REGEX "define ${prefix}_(MAJOR|MINOR|PATCH)")
    string(REGEX REPLACE ".*MAJOR[A-Z_]* +([0-9]+).*MINOR[A-Z_]* +([0-9]+).*PATCH[A-Z_]* +([0-9]+).*" "\\1.\\2.\\3" version "${lines}")
    set(${result} ${version} PARENT_SCOPE)
  endif()
endfunction()

set(frontend_include ${CUDNN_FRONTEND_DIR}/include)
if(NOT CUDNN_FRONTEND_DIR)
  # Its headers name each other by ../include.
  set(frontend_include ${PROJECT_BINARY_DIR}/cudnn-frontend-${CODA_CUDNN_FRONTEND_VERSION}/include)
  coda_fetch_wheel("cudnn-frontend ${CODA_CUDNN_FRONTEND_VERSION}" requirements-cudnn-frontend.txt include ${frontend_include}
    "or set CUDNN_FRONTEND_DIR to a copy of it, the folder with include/cudnn_frontend.h")
endif()
coda_version_in(${frontend_include}/cudnn_frontend_version.h CUDNN_FRONTEND frontend_version)
if(NOT frontend_version OR frontend_version VERSION_LESS CODA_CUDNN_FRONTEND_VERSION)
  message(FATAL_ERROR "${frontend_include} holds cudnn-frontend '${frontend_version}'; it needs to be ${CODA_CUDNN_FRONTEND_VERSION} or newer")
endif()

if(CUDNN_DIR)
  set(cudnn_include ${CUDNN_DIR}/include)
else()
  find_path(cudnn_include cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
endif()
coda_version_in(${cudnn_include}/cudnn_version.h CUDNN cudnn_version)
if(CUDNN_DIR AND (NOT cudnn_version OR cudnn_version VERSION_LESS CODA_CUDNN_VERSION))
  message(FATAL_ERROR "CUDNN_DIR holds cuDNN '${cudnn_version}'; it needs to be ${CODA_CUDNN_VERSION} or newer")
elseif(NOT cudnn_version OR cudnn_version VERSION_LESS CODA_CUDNN_VERSION)
  set(cudnn_include ${PROJECT_BINARY_DIR}/cudnn-${CODA_CUDNN_VERSION})
  coda_fetch_wheel("cuDNN ${CODA_CUDNN_VERSION} (400 MB, for its headers)" requirements-cudnn.txt nvidia/cudnn/include ${cudnn_include}
    "or set CUDNN_DIR to a copy of it, the folder with include/cudnn.h")
endif()

add_library(coda_cudnn INTERFACE IMPORTED)
target_include_directories(coda_cudnn SYSTEM INTERFACE ${frontend_include} ${cudnn_include})
target_compile_definitions(coda_cudnn INTERFACE NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING CUDNN_FRONTEND_SKIP_JSON_LIB)
