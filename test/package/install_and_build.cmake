# Installs the build in BUILD under BUILD/package/installed, builds the project in SOURCE against it and runs it.
set(work ${BUILD}/package)
file(REMOVE_RECURSE ${work})

macro(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endmacro()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/installed)
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -G ${GENERATOR}
  -D CMAKE_CXX_COMPILER=${COMPILER} "-DCMAKE_CXX_FLAGS=${FLAGS}"
  -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} "-DCMAKE_PREFIX_PATH=${work}/installed;${PREFIX_PATH}")
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)
