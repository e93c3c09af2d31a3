# Compiles SOURCE twice. As it stands it must compile: its mistake is behind #ifdef CODA_MISUSE. With CODA_MISUSE defined it must
# be refused, and the compiler's words must contain the sentence that the file announces in a line "// expect: sentence".
file(STRINGS ${SOURCE} line REGEX "^// expect: " LIMIT_COUNT 1)
if(NOT line)
  message(FATAL_ERROR "${SOURCE} has no line '// expect: …' that says what the compiler has to say")
endif()
string(REGEX REPLACE "^// expect: " "" sentence "${line}")
string(REPLACE "\\;" ";" sentence "${sentence}")  # file(STRINGS) escapes them

set(ENV{LC_ALL} C)
# -idirafter: named before the compiler's own, /usr/include would hide the C library from the C++ one.
set(compile ${COMPILER} -std=c++20 -fsyntax-only -I${ROOT}/include -I${ROOT}/src -idirafter ${XSIMD} ${SOURCE})
execute_process(COMMAND ${compile} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "without its mistake ${SOURCE} must compile, but:\n${output}")
endif()
execute_process(COMMAND ${compile} -DCODA_MISUSE RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles with its mistake in it")
endif()
string(FIND "${output}" "${sentence}" at)
if(at EQUAL -1)
  message(FATAL_ERROR "${SOURCE} is refused, but not in the words\n  ${sentence}\nThe compiler says:\n${output}")
endif()
