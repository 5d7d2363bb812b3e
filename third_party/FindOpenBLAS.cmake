# OpenBLAS by its own name (never a generic libblas), its openmp variant first.
# Sets OpenBLAS_FOUND, OpenBLAS_VERSION, OpenBLAS_VARIANT (openmp, pthread, serial or unknown) and makes OpenBLAS::OpenBLAS.
# OpenBLAS_LIBRARY and OpenBLAS_INCLUDE_DIR may be given.
find_library(OpenBLAS_LIBRARY NAMES openblaso openblas PATH_SUFFIXES openblas-openmp)
if(OpenBLAS_LIBRARY)
  # The header of the same variant: Debian keeps include/<arch>/openblas-openmp beside lib/<arch>/openblas-openmp.
  get_filename_component(openblas_folder "${OpenBLAS_LIBRARY}" DIRECTORY)
  get_filename_component(openblas_folder "${openblas_folder}" NAME)
endif()
find_path(OpenBLAS_INCLUDE_DIR NAMES openblas_config.h PATH_SUFFIXES ${openblas_folder} openblas-openmp openblas)
mark_as_advanced(OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR)

if(OpenBLAS_LIBRARY AND OpenBLAS_INCLUDE_DIR AND NOT OpenBLAS_VARIANT)
  set(OpenBLAS_VARIANT unknown)
  set(OpenBLAS_VERSION "")
  if(NOT CMAKE_CROSSCOMPILING)
    set(openblas_probe "${CMAKE_BINARY_DIR}/CMakeFiles/openblas_probe.cpp")
    file(WRITE "${openblas_probe}" "#include <cstdio>
extern \"C\" int openblas_get_parallel();
extern \"C\" char* openblas_get_config();
int main() { std::printf(\"%d %s\", openblas_get_parallel(), openblas_get_config()); }
")
    try_run(openblas_status openblas_links "${CMAKE_BINARY_DIR}/CMakeFiles" "${openblas_probe}"
      LINK_LIBRARIES "${OpenBLAS_LIBRARY}" RUN_OUTPUT_VARIABLE openblas_says)
    if(openblas_links AND "${openblas_status}" STREQUAL "0" AND openblas_says MATCHES "^([012]) OpenBLAS ([0-9.]+)")
      set(OpenBLAS_VERSION "${CMAKE_MATCH_2}")
      set(openblas_parallel ${CMAKE_MATCH_1})
      set(openblas_variants serial pthread openmp)
      list(GET openblas_variants ${openblas_parallel} OpenBLAS_VARIANT)
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OpenBLAS REQUIRED_VARS OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR VERSION_VAR OpenBLAS_VERSION)
if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  add_library(OpenBLAS::OpenBLAS UNKNOWN IMPORTED)
  set_target_properties(OpenBLAS::OpenBLAS PROPERTIES
    IMPORTED_LOCATION "${OpenBLAS_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}")
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set_target_properties(OpenBLAS::OpenBLAS PROPERTIES IMPORTED_GLOBAL ON)
  endif()
endif()
