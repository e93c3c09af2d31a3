# coda_add_kernels(target source…): compiles each source once per instruction set that the CPU engine chooses from at run
# time, and adds the objects to target. The sources hold the only explicit instantiations of programs.
set(CODA_ISA_avx2_FLAGS -mavx2 -mfma -mf16c -mbmi2)
set(CODA_ISA_avx512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi2)
set(CODA_ISA_generic_FLAGS)

function(coda_add_kernels target)
  foreach(isa generic avx2 avx512)
    set(objects ${target}_kernels_${isa})
    add_library(${objects} OBJECT ${ARGN})
    target_compile_options(${objects} PRIVATE ${CODA_ISA_${isa}_FLAGS})
    target_compile_definitions(${objects} PRIVATE CODA_ISA=${isa})
    target_include_directories(${objects} PRIVATE $<TARGET_PROPERTY:coda,INCLUDE_DIRECTORIES>)
    target_compile_features(${objects} PRIVATE cxx_std_20)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()
