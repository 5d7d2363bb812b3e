// Programs of the build as a user meets them: output, exit status.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/files.h"

namespace rowan::test {

struct Outcome {
  int status = 0;
  std::string out, err;
};

inline Outcome run_command(const ScratchDirectory& scratch, const std::string& command) {
  const std::string out = (scratch / "out.txt").string(), err = (scratch / "err.txt").string();
  const int status = std::system((command + " >'" + out + "' 2>'" + err + "' </dev/null").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

/// The program rowan in quotes.
inline std::string program() { return "'" + std::string(ROWAN_TEST_PROGRAM) + "'"; }

inline Outcome run_program(const ScratchDirectory& scratch, const std::string& arguments) {
  return run_command(scratch, program() + " " + arguments);
}

inline bool program_is_built() { return std::string(ROWAN_TEST_PROGRAM).size() > 0; }

inline std::string last_line(const std::string& text) {
  const std::size_t end = text.find_last_not_of('\n');
  const std::size_t begin = text.find_last_of('\n', end);
  return text.substr(begin == std::string::npos ? 0 : begin + 1,
                     end - (begin == std::string::npos ? 0 : begin + 1) + 1);
}

}  // namespace rowan::test
