# Installs rowan to a scratch prefix, then configures, builds and runs the project beside this file against it.
# Needs: build_dir, scratch_dir, generator, compiler, build_type, cxx_flags, linker_flags.
cmake_policy(VERSION 3.25)
file(REMOVE_RECURSE "${scratch_dir}")
set(fresh COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${build_dir}" --prefix "${scratch_dir}/prefix" --component development
  OUTPUT_QUIET ${fresh})
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${scratch_dir}/build" -G "${generator}"
  "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_BUILD_TYPE=${build_type}" "-DCMAKE_PREFIX_PATH=${scratch_dir}/prefix"
  "-DCMAKE_CXX_FLAGS=${cxx_flags}" "-DCMAKE_EXE_LINKER_FLAGS=${linker_flags}" ${fresh})
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${scratch_dir}/build" ${fresh})
execute_process(COMMAND "${scratch_dir}/build/consumer" ${fresh})
