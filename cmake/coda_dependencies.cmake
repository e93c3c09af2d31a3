# coda_require(package version debian-package): finds a package, wherever CMAKE_PREFIX_PATH has it. What is missing or too old
# is remembered; coda_stop_if_missing() then says all of it, one line each, and what to install.
set(coda_missing "")

macro(coda_require package version debian)
  find_package(${package} ${version} QUIET)
  if(NOT ${package}_FOUND)
    message(NOTICE "coda needs ${package} ${version} or newer: apt-get install ${debian}")
    list(APPEND coda_missing ${debian})
  endif()
endmacro()

function(coda_stop_if_missing)
  if(coda_missing)
    list(JOIN coda_missing " " packages)
    message(FATAL_ERROR "apt-get install ${packages}   (or put a copy from elsewhere on CMAKE_PREFIX_PATH)")
  endif()
endfunction()
