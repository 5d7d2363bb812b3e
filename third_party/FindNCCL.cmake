# NCCL: a distribution package, a copy beside the CUDA Toolkit, or any prefix named by NCCL_ROOT or NCCL_HOME (a Python wheel's
# site-packages/nvidia/nccl works). Sets NCCL_FOUND and NCCL_VERSION and makes NCCL::NCCL.
# Non-blocking communicators, ncclCommAbort and ncclCommGetAsyncError behave as rowan needs from this version on.
set(NCCL_LEAST_VERSION 2.18)

set(nccl_hints "$ENV{NCCL_HOME}" ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_LIBRARY_ROOT})
find_path(NCCL_INCLUDE_DIR NAMES nccl.h HINTS ${nccl_hints} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${nccl_hints} PATH_SUFFIXES lib lib64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

set(NCCL_VERSION "")
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" nccl_defines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" nccl_defines "${nccl_defines}")
  list(JOIN nccl_defines "." NCCL_VERSION)
endif()

if(NOT NCCL_FIND_VERSION)
  set(NCCL_FIND_VERSION ${NCCL_LEAST_VERSION})
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL UNKNOWN IMPORTED)
  set_target_properties(NCCL::NCCL PROPERTIES
    IMPORTED_LOCATION "${NCCL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_GLOBAL ON)
  endif()
endif()
