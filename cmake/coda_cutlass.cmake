# CUTLASS's headers, for the GPU half: the target coda_cutlass. They come from CUTLASS_DIR, a cache or environment variable that
# names a folder with include/cutlass/cutlass.h; without one, from the PyPI package whose hash scripts/requirements-cutlass.txt
# pins, fetched once into the build folder.
set(CODA_CUTLASS_VERSION 4.2.0)
set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A copy of CUTLASS: the folder with include/cutlass/cutlass.h")

# Sets result to a folder with include/cutlass/cutlass.h.
function(coda_fetch_cutlass result)
  set(folder ${PROJECT_BINARY_DIR}/cutlass-${CODA_CUTLASS_VERSION})
  set(${result} ${folder} PARENT_SCOPE)
  if(EXISTS ${folder}/include/cutlass/cutlass.h)
    return()
  endif()
  set(otherwise "or set CUTLASS_DIR to a copy of CUTLASS ${CODA_CUTLASS_VERSION}, the folder with include/cutlass/cutlass.h")
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(NOT Python3_FOUND)
    message(FATAL_ERROR "fetching CUTLASS needs python3: apt-get install python3-venv, ${otherwise}")
  endif()
  message(STATUS "Fetching CUTLASS ${CODA_CUTLASS_VERSION}")
  set(work ${folder}.part)
  file(REMOVE_RECURSE ${work})
  # Debian's python3 has pip inside virtual environments only.
  foreach(command
      "-m;venv;${work}/venv"
      "-m;pip;--disable-pip-version-check;--quiet;download;--no-deps;--only-binary=:all:;--require-hashes;-r;${PROJECT_SOURCE_DIR}/scripts/requirements-cutlass.txt;-d;${work}")
    execute_process(COMMAND ${Python3_EXECUTABLE} ${command} RESULT_VARIABLE failed ERROR_VARIABLE trouble OUTPUT_VARIABLE trouble)
    if(failed)
      message(FATAL_ERROR "CUTLASS could not be fetched: repair what follows, ${otherwise}\n${trouble}")
    endif()
    set(Python3_EXECUTABLE ${work}/venv/bin/python)
  endforeach()
  file(GLOB wheel ${work}/*.whl)
  file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${work}/wheel PATTERNS "cutlass_library/source/include/*")
  file(RENAME ${work}/wheel/cutlass_library/source ${folder})
  file(REMOVE_RECURSE ${work})
endfunction()

set(cutlass_dir "${CUTLASS_DIR}")
if(NOT cutlass_dir)
  coda_fetch_cutlass(cutlass_dir)
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
