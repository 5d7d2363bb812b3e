// Choices that were measured: which of cuBLASLt's algorithms is the fastest for a matrix product on a card.
//
// The first product of a shape on CUDA times the candidates, unless it is small or being recorded into a CUDA graph
// (run a shape once before it is recorded), and remembers the best: in the process, and in a file that later runs read.
// The choice affects the order of sums: equal bits on two runs need one tuning file, or tuning switched off. Entries
// belong to a card, driver, cuBLAS version and everything that an algorithm depends on (shape, strides, alignments,
// dtypes).
//
// The file is text, one choice a line. It is a cache: lines that do not fit are passed over, a file that cannot be read
// or written is done without, it is replaced atomically and keeps at most 4096 choices.
//
// The environment decides at first: ROWAN_TUNE=0 switches tuning off, and no file is read or written then;
// ROWAN_TUNE_FILE names the file, which otherwise is rowan/tuning.txt in $XDG_CACHE_HOME or ~/.cache.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace rowan {

/// Off: the first candidate is taken, nothing is measured, no file is read or written. Choices that are already in use
/// in this process stay. Thread-safe, as are all functions here.
void set_tuning(bool on);

/// Reads choices from this file now and keeps it up to date; an empty path: choices live in the process alone. Choices
/// already in use stay.
void set_tuning_file(const std::filesystem::path& path);

/// All choices known to this process, and choices from elsewhere: one rank measures, the others take over its result
/// before their first product.
std::string export_tuning();
void import_tuning(std::string_view choices);

/// Replaces all choices of this process; from now on nothing is measured, read or written, and products without a choice
/// take the first candidate. Ranks do so with the choices of rank 0, so that all take the same algorithms.
void adopt_tuning(std::string_view choices);

}  // namespace rowan
