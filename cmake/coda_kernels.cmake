# coda_add_kernels(target source…): compiles each source once per instruction set that the CPU engine chooses from at run
# time, and adds the objects to target. The sources hold the only explicit instantiations of programs.
#
# It is installed with the library: a project that writes a program of its own puts the instantiation in a source file and calls
#   find_package(coda REQUIRED)
#   add_executable(mine main.cc)
#   target_link_libraries(mine PRIVATE coda::coda)
#   coda_add_kernels(mine my_program.cc)
set(CODA_ISAS generic avx2 avx512)
set(CODA_ISA_generic_FLAGS "")
set(CODA_ISA_avx2_FLAGS -mavx2 -mfma -mbmi2)
# GCC 12's own AVX-512 headers start some intrinsics from an undefined register and warn about it (GCC bug 105593).
set(CODA_ISA_avx512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mbmi2
  $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
# Everything of a kernel is inlined into one function, and g++ takes ten times as long over it with these checks.
set(CODA_KERNEL_SANITIZE_FLAGS -fno-sanitize-address-use-after-scope -fno-sanitize=null,alignment,object-size,vptr)

function(coda_add_kernels target)
  if(NOT ARGN)
    return()
  endif()
  list(LENGTH ARGN count)
  foreach(isa ${CODA_ISAS})
    set(objects ${target}_kernels_${isa})
    add_library(${objects} OBJECT ${ARGN})
    target_compile_options(${objects} PRIVATE ${CODA_ISA_${isa}_FLAGS} $<TARGET_PROPERTY:${target},COMPILE_OPTIONS>
      $<$<CONFIG:Sanitize>:${CODA_KERNEL_SANITIZE_FLAGS}>)
    if(isa STREQUAL avx512)  # the same text as avx2 on wider lanes
      target_compile_options(${objects} PRIVATE $<$<CONFIG:Sanitize>:-fno-sanitize=all>)
    endif()
    target_compile_definitions(${objects} PRIVATE CODA_ISA=${isa} $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
    target_include_directories(${objects} PRIVATE
      $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>
      $<TARGET_PROPERTY:coda::coda,INTERFACE_INCLUDE_DIRECTORIES>)
    target_compile_features(${objects} PRIVATE cxx_std_20)
    target_link_libraries(${objects} PRIVATE XSIMD::xsimd)
    set_target_properties(${objects} PROPERTIES CXX_EXTENSIONS OFF)
    if(count GREATER 2)  # reading the headers takes a third of a small file's time
      target_precompile_headers(${objects} PRIVATE <coda/kernels.h>)
    endif()
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()
