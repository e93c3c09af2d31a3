# Headers out of packages of PyPI, by the hashes of a scripts/requirements-*.txt.

# Fetches the package into folder, unless it is there, and keeps `kept`, a folder of the package, as folder. title is what messages call
# it; otherwise says what one can do instead.
function(coda_fetch_wheel title requirements kept folder otherwise)
  if(EXISTS ${folder})
    return()
  endif()
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(NOT Python3_FOUND)
    message(FATAL_ERROR "fetching ${title} needs python3: apt-get install python3-venv, ${otherwise}")
  endif()
  message(STATUS "Fetching ${title}")
  set(work ${folder}.part)
  file(REMOVE_RECURSE ${work})
  # Debian's python3 has pip inside virtual environments only.
  foreach(command
      "-m;venv;${work}/venv"
      "-m;pip;--disable-pip-version-check;--quiet;download;--no-deps;--only-binary=:all:;--require-hashes;-r;${PROJECT_SOURCE_DIR}/scripts/${requirements};-d;${work}")
    execute_process(COMMAND ${Python3_EXECUTABLE} ${command} RESULT_VARIABLE failed ERROR_VARIABLE trouble OUTPUT_VARIABLE trouble)
    if(failed)
      message(FATAL_ERROR "${title} could not be fetched: repair what follows, ${otherwise}\n${trouble}")
    endif()
    set(Python3_EXECUTABLE ${work}/venv/bin/python)
  endforeach()
  file(GLOB wheel ${work}/*.whl)
  file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${work}/wheel PATTERNS "${kept}/*")
  file(RENAME ${work}/wheel/${kept} ${folder})
  file(REMOVE_RECURSE ${work})
endfunction()
