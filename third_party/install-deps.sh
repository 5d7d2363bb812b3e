#!/usr/bin/env bash
# Installs what rowan is built with on Debian 12, Ubuntu 24.04 and later; silent and quick when all of it is there already.
# Without root it names what is missing: then install it, or point CMAKE_PREFIX_PATH at a prefix that holds it.
set -euo pipefail

missing=()
need() { missing+=("$1"); }

command -v "${CXX:-g++}" > /dev/null || need g++
command -v ninja > /dev/null || need ninja-build
command -v cmake > /dev/null || need cmake

# Headers are asked for, not packages: whatever brought them will do. Prefixes of CMAKE_PREFIX_PATH count.
includes=()
IFS=':;' read -ra prefixes <<< "${CMAKE_PREFIX_PATH:-}"
for prefix in "${prefixes[@]}"; do includes+=("-I$prefix/include"); done
if command -v "${CXX:-g++}" > /dev/null; then
  found=$("${CXX:-g++}" -std=c++17 -E -P "${includes[@]}" -x c++ - <<'PROBE'
#if __has_include(<fmt/format.h>)
libfmt-dev
#endif
#if __has_include(<catch2/catch_test_macros.hpp>) || __has_include(<catch2/catch.hpp>)
catch2
#endif
#if __has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
#if __has_include(<CLI/CLI.hpp>)
libcli11-dev
#endif
#if __has_include(<oniguruma.h>)
libonig-dev
#endif
#if __has_include(<utf8proc.h>)
libutf8proc-dev
#endif
#if __has_include(<openblas_config.h>) || __has_include(<openblas-openmp/openblas_config.h>) || __has_include(<openblas/openblas_config.h>)
libopenblas-openmp-dev
#endif
PROBE
  )
else
  found=""
fi
for package in libfmt-dev catch2 nlohmann-json3-dev libcli11-dev libonig-dev libutf8proc-dev libopenblas-openmp-dev; do
  grep -qx -- "$package" <<< "$found" || need "$package"
done

if ((${#missing[@]} > 0)); then
  as_root=()
  if ((EUID != 0)); then
    if command -v sudo > /dev/null && { [[ -t 0 ]] || sudo -n true 2> /dev/null; }; then
      as_root=(sudo)
    else
      as_root=(no)
    fi
  fi
  if [[ "${as_root[*]}" == no ]] || ! command -v apt-get > /dev/null; then
    echo "install-deps: missing, by their Debian names: ${missing[*]}" >&2
    echo "install-deps: this needs root and apt-get. Install them some other way, or name their prefix in CMAKE_PREFIX_PATH." >&2
    exit 1
  fi
  echo "install-deps: installing ${missing[*]}"
  install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}")
  # The package lists may be absent or old: refresh them only when the first try fails.
  "${install[@]}" > /dev/null 2>&1 || { "${as_root[@]}" apt-get update -qq && "${install[@]}" > /dev/null; }
fi

version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
if [[ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" != 3.25 ]]; then
  echo "install-deps: cmake $version is too old, rowan needs 3.25 or newer (pip install cmake brings one)" >&2
  exit 1
fi
