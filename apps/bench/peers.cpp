#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "benches.h"
#include "peers_script.h"  // made by CMake from peers.py
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan::bench {

nlohmann::ordered_json run_peers(const nlohmann::ordered_json& request) {
  char folder[] = "/tmp/rowan-bench-XXXXXX";
  if (mkdtemp(folder) == nullptr) throw Error(ErrorKind::kIo, "rowan-bench: mkdtemp failed");
  const std::filesystem::path directory(folder);
  write_text_file(directory / "peers.py", kPeersScript);
  write_text_file(directory / "request.json", request.dump());
  const std::string command = "cd '" + directory.string() + "' && python3 peers.py request.json answer.json 1>&2";
  const int status = std::system(command.c_str());
  nlohmann::ordered_json answer;
  if (status == 0)
    answer = nlohmann::ordered_json::parse(read_text_file(directory / "answer.json", 1 << 24));
  else
    std::cerr << "rowan-bench: peers are left out: python3 with torch ended with status " << status << '\n';
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  return answer;
}

}  // namespace rowan::bench
