// The examples, as a reader runs them.
#include <filesystem>
#include <string>

#include "catch.h"
#include "support/files.h"
#include "support/program.h"

namespace rowan {

TEST_CASE("the example with batches of its own learns its rule and writes no file") {
  REQUIRE(test::program_is_built());
  const test::ScratchDirectory scratch, empty;
  const auto example = std::filesystem::path(ROWAN_TEST_PROGRAM).parent_path() / "example-own-batches";
  const test::Outcome run =
      test::run_command(scratch, "cd '" + empty.path().string() + "' && '" + example.string() + "'");
  CHECK(run.status == 0);
  const std::string last = test::last_line(run.out);
  CAPTURE(run.out, run.err);
  REQUIRE(last.find("loss after 60 steps: ") == 0);
  CHECK(std::stod(last.substr(21)) < 0.3);  // 3.5 at the start
  CHECK(std::filesystem::is_empty(empty.path()));
}

}  // namespace rowan
