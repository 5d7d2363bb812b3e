#include "rowan/ops/tuning.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "catch.h"
#include "ops/tuning_table.h"
#include "rowan/ops/gemm.h"
#include "support/device.h"
#include "support/files.h"
#include "support/matrix.h"

using namespace rowan;
using namespace rowan::test;

namespace {

const std::string kHead = "rowan tuning 1\n";

TuningTable table_of(const std::string& text) {
  TuningTable table;
  table.merge(text);
  return table;
}

}  // namespace

TEST_CASE("tuning choices survive the way through text") {
  TuningTable table;
  table.put("gemm NVIDIA H200 m 8192 n 4096", {3, 32});
  table.put("gemm NVIDIA H200 m 1 n 1", {0, 1});
  const TuningTable again = table_of(table.text());
  CHECK(again.text() == table.text());
  CHECK(again.size() == 2);
  CHECK(again.find("gemm NVIDIA H200 m 8192 n 4096") == TuningChoice{3, 32});
  CHECK(!again.find("gemm NVIDIA H200 m 8192"));
}

TEST_CASE("a damaged tuning text loses its damaged lines alone") {
  const TuningTable table = table_of(kHead +
                                     "good = 1/2\nno equals\nnot a number = x/3\nout of range = 3/3\nnegative = -1/3\n"
                                     "too many = 1/100000\nhuge = 99999999999999999999/3\ntail = 1/2x\n = 0/1\n"
                                     "\x01 = 0/1\n\n" +
                                     std::string(600, 'k') + " = 0/1\nlast = 0/1");
  CHECK(table.size() == 2);
  CHECK(table.find("good") == TuningChoice{1, 2});
  CHECK(table.find("last") == TuningChoice{0, 1});
}

TEST_CASE("a text that is no tuning file adds nothing") {
  for (const std::string& text : {std::string(), std::string("\0\xff", 2), std::string("rowan tuning 2\na = 0/1\n"),
                                  std::string("a = 0/1\n"), std::string(1 << 16, '\n')}) {
    CHECK(table_of(text).size() == 0);
  }
}

TEST_CASE("a tuning table stays bounded and keeps what it has over what is merged") {
  std::string text = kHead;
  for (std::size_t i = 0; i < TuningTable::kMostChoices + 10; ++i) text += "key " + std::to_string(i) + " = 0/1\n";
  TuningTable table;
  table.put("key 0", {1, 2});
  table.merge(text);
  CHECK(table.size() == TuningTable::kMostChoices);
  CHECK(table.find("key 0") == TuningChoice{1, 2});
  table.put("key 0", {0, 2});
  CHECK(table.find("key 0") == TuningChoice{0, 2});
}

TEST_CASE("choices are found again by a later process, and those of two processes add up") {
  const ScratchDirectory directory;
  const auto file = directory.path() / "deep" / "tuning.txt";
  Tuning first(true, file), second(true, file);
  CHECK(!first.find("a"));
  CHECK(!second.find("b"));
  first.put("a", {1, 4});
  second.put("b", {2, 4});
  Tuning later(true, file);
  CHECK(later.find("a") == TuningChoice{1, 4});
  CHECK(later.find("b") == TuningChoice{2, 4});
}

TEST_CASE("tuning that is off reads and writes no file") {
  const ScratchDirectory directory;
  const auto file = directory.path() / "tuning.txt";
  std::ofstream(file) << kHead << "a = 1/4\n";
  Tuning off(false, file);
  CHECK(!off.find("a"));
  off.put("b", {1, 4});
  CHECK(!Tuning(true, file).find("b"));
  Tuning nowhere(false, directory.path() / "none" / "tuning.txt");
  nowhere.put("b", {1, 4});
  CHECK(!std::filesystem::exists(directory.path() / "none"));
}

TEST_CASE("a tuning file that cannot be read or written is done without") {
  const ScratchDirectory directory;
  Tuning folder(true, directory.path());
  folder.put("a", {1, 4});
  CHECK(folder.find("a") == TuningChoice{1, 4});
  std::ofstream(directory.path() / "file") << "x";
  Tuning below_a_file(true, directory.path() / "file" / "tuning.txt");
  below_a_file.put("a", {1, 4});
  CHECK(below_a_file.find("a") == TuningChoice{1, 4});
  Tuning none(true, {});
  none.put("a", {1, 4});
  CHECK(none.find("a") == TuningChoice{1, 4});
}

TEST_CASE("choices of one rank are taken over by another") {
  Tuning measured(true, {}), other(true, {});
  measured.put("a", {1, 4});
  other.merge(measured.text());
  CHECK(other.find("a") == TuningChoice{1, 4});
}

TEST_CASE("a large product on CUDA is tuned on first use without disturbing its result, and the choice is kept",
          "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  const ScratchDirectory directory;
  set_tuning(true);
  set_tuning_file(directory / "tuning.txt");
  const Tensor a = random_normal({1024, 264}, DType::kBFloat16, 1, stream),
               b = random_normal({264, 512}, DType::kBFloat16, 2, stream);
  Tensor c = random_normal({1024, 512}, DType::kFloat32, 3, stream);
  const std::vector<double> before = values(c, stream);
  const Matrix product = times(host(a, stream), host(b, stream));
  gemm(a, b, c, stream, {.beta = 1});
  const std::vector<double> after = values(c, stream);
  double worst = 0;
  for (std::size_t i = 0; i < after.size(); ++i) worst = std::max(worst, std::abs(after[i] - before[i] - product.v[i]));
  CHECK(worst < 1e-3);  // 264 products of magnitude 1 in float32
  const std::string text = read_file(directory / "tuning.txt");
  CHECK(text.find("m 1024 n 512 k 264") != std::string::npos);
  CHECK(export_tuning().find("m 1024 n 512 k 264") != std::string::npos);
  set_tuning_file({});
}
