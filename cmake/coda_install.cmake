# cmake --install: the library, its headers, the command line, and what find_package(coda) needs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/coda)

install(TARGETS coda EXPORT coda-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/coda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT coda-targets NAMESPACE coda:: DESTINATION ${package_dir})
if(CODA_BUILD_CLI)
  install(TARGETS coda_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/coda-config.cmake.in coda-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(coda-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/coda-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/coda-config-version.cmake
  cmake/coda_kernels.cmake cmake/FindXSIMD.cmake cmake/FindLIBXSMM.cmake
  DESTINATION ${package_dir})
