# The SIMD lanes: XSIMD_FOUND, XSIMD_VERSION and the target XSIMD::xsimd (headers only). The version is read from the header,
# so that a copy without CMake files of its own serves as well.
find_path(XSIMD_INCLUDE_DIR xsimd/xsimd.hpp)
if(XSIMD_INCLUDE_DIR)
  file(STRINGS ${XSIMD_INCLUDE_DIR}/xsimd/config/xsimd_config.hpp lines REGEX "define XSIMD_VERSION_(MAJOR|MINOR|PATCH)")
  string(REGEX REPLACE ".*MAJOR +([0-9]+).*MINOR +([0-9]+).*PATCH +([0-9]+).*" "\\1.\\2.\\3" XSIMD_VERSION "${lines}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(XSIMD REQUIRED_VARS XSIMD_INCLUDE_DIR VERSION_VAR XSIMD_VERSION)
mark_as_advanced(XSIMD_INCLUDE_DIR)
if(XSIMD_FOUND AND NOT TARGET XSIMD::xsimd)
  add_library(XSIMD::xsimd INTERFACE IMPORTED)
  set_target_properties(XSIMD::xsimd PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${XSIMD_INCLUDE_DIR})
endif()
