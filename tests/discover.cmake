# Read by ctest when it starts: asks rowan-tests for its cases and registers each, with labels from its tags.
# Needs: executable, catch2_version, working_directory.
cmake_policy(VERSION 3.25)

# Names of the cases that match a Catch2 test spec, one a list element; brackets and semicolons are held back from CMake's lists.
function(rowan_list_cases out spec)
  set(list_option --list-test-names-only)
  if(catch2_version VERSION_GREATER_EQUAL 3)
    set(list_option --list-tests --verbosity quiet)
  endif()
  execute_process(COMMAND "${executable}" ${spec} ${list_option}
    OUTPUT_VARIABLE names RESULT_VARIABLE status ERROR_VARIABLE errors WORKING_DIRECTORY "${working_directory}")
  # Catch2 2.13 returns the number of cases, 3.x returns 0; a program that does not start says something else or nothing.
  if(NOT status MATCHES "^[0-9]+$" OR (catch2_version VERSION_GREATER_EQUAL 3 AND NOT status EQUAL 0) OR status EQUAL 127)
    message(FATAL_ERROR "${executable} cannot list its cases (${status}): ${errors}")
  endif()
  string(REPLACE ";" "<semicolon>" names "${names}")
  string(REPLACE "[" "<open>" names "${names}")
  string(REPLACE "]" "<close>" names "${names}")
  string(REPLACE "\n" ";" names "${names}")
  list(REMOVE_ITEM names "")
  set(${out} "${names}" PARENT_SCOPE)
endfunction()

if(NOT EXISTS "${executable}")
  add_test(rowan-tests_is_not_built "${executable}")
  return()
endif()

# A GPU case without a device prints one line and does nothing else. ctest's skip pattern would win over a failure, so it asks for
# Catch2's own closing line of a run without any failed or passed assertion right after it.
string(ASCII 10 newline)
set(skipped "(^|${newline})(SKIPPED: no CUDA device[^${newline}]*${newline})+=+${newline}test cases: *[0-9]+ \\| *[0-9]+ passed${newline}assertions: - none -")

rowan_list_cases(all_cases "~[.]")
foreach(tag gpu dist slow sanitize)
  rowan_list_cases(${tag}_cases "[${tag}]~[.]")
endforeach()
set(strict "")
if(catch2_version VERSION_LESS 3)
  set(strict --warn NoTests)  # there a name that matches nothing would pass
endif()
foreach(case IN LISTS all_cases)
  set(labels "")
  foreach(tag gpu dist slow sanitize)
    if(case IN_LIST ${tag}_cases)
      list(APPEND labels ${tag})
    endif()
  endforeach()
  if(NOT "gpu" IN_LIST labels)
    list(PREPEND labels cpu)
  endif()
  string(REPLACE "<semicolon>" ";" name "${case}")
  string(REPLACE "<open>" "[" name "${name}")
  string(REPLACE "<close>" "]" name "${name}")
  string(REGEX REPLACE "([][,\\\"])" "\\\\\\1" spec "${name}")
  add_test("${name}" "${executable}" "${spec}" ${strict})
  set_tests_properties("${name}" PROPERTIES
    LABELS "${labels}" WORKING_DIRECTORY "${working_directory}" ENVIRONMENT "OMP_WAIT_POLICY=passive" TIMEOUT 600)
  if("gpu" IN_LIST labels)
    set_tests_properties("${name}" PROPERTIES SKIP_REGULAR_EXPRESSION "${skipped}")
    if("dist" IN_LIST labels)  # several ranks with deadlines
      set_tests_properties("${name}" PROPERTIES RUN_SERIAL ON)
    endif()
  endif()
endforeach()
