# The CPU's micro-kernels: LIBXSMM_FOUND, LIBXSMM_VERSION and the target LIBXSMM::xsmm. The library wants a BLAS for shapes that
# it does not generate code for; xsmmnoblas says that there is none.
find_path(LIBXSMM_INCLUDE_DIR libxsmm.h)
find_library(LIBXSMM_LIBRARY xsmm)
find_library(LIBXSMM_NOBLAS_LIBRARY xsmmnoblas)
if(LIBXSMM_INCLUDE_DIR)
  file(STRINGS ${LIBXSMM_INCLUDE_DIR}/libxsmm_version.h lines REGEX "define LIBXSMM_CONFIG_VERSION_(MAJOR|MINOR)")
  string(REGEX REPLACE ".*MAJOR +([0-9]+).*MINOR +([0-9]+).*" "\\1.\\2" LIBXSMM_VERSION "${lines}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LIBXSMM
  REQUIRED_VARS LIBXSMM_LIBRARY LIBXSMM_NOBLAS_LIBRARY LIBXSMM_INCLUDE_DIR VERSION_VAR LIBXSMM_VERSION)
mark_as_advanced(LIBXSMM_INCLUDE_DIR LIBXSMM_LIBRARY LIBXSMM_NOBLAS_LIBRARY)
if(LIBXSMM_FOUND AND NOT TARGET LIBXSMM::xsmm)
  find_package(Threads QUIET REQUIRED)
  add_library(LIBXSMM::xsmm UNKNOWN IMPORTED)
  set_target_properties(LIBXSMM::xsmm PROPERTIES
    IMPORTED_LOCATION ${LIBXSMM_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${LIBXSMM_INCLUDE_DIR}
    INTERFACE_LINK_LIBRARIES "${LIBXSMM_NOBLAS_LIBRARY};Threads::Threads;${CMAKE_DL_LIBS};m;rt")
endif()
