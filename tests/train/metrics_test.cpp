#include "rowan/train/metrics.h"

#include <sys/resource.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "support/files.h"

using rowan::Error;
using rowan::ErrorKind;
using rowan::MetricsWriter;
using rowan::test::read_file;
using rowan::test::ScratchDirectory;
using rowan::test::write_file;

namespace {

template <class F>
ErrorKind kind_of(F f) {
  try {
    f();
  } catch (const Error& error) {
    return error.kind();
  }
  FAIL("expected an Error, got none");
  return {};
}

}  // namespace

TEST_CASE("metrics are one JSON object a line, in the order given") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  writer.write({{"step", 3}, {"loss", 0.25}, {"phase", "tune"}, {"skipped", false}});
  writer.write({{"step", std::int64_t{1} << 53}, {"a", 1.0}});
  writer.write({});
  CHECK(read_file(dir / "metrics.jsonl") ==
        "{\"step\":3,\"loss\":0.25,\"phase\":\"tune\",\"skipped\":false}\n"
        "{\"step\":9007199254740992,\"a\":1.0}\n"
        "{}\n");
}

TEST_CASE("every finite double in the metrics reads back to the same bits") {
  const ScratchDirectory dir;
  std::vector<double> written = {0.1, -0.0, 1e300, 5e-324, 1.0 / 3, std::numeric_limits<double>::max()};
  rowan::Rng rng(5);
  for (int i = 0; i < 200; ++i) written.push_back(std::ldexp(rng.normal(), static_cast<int>(rng.below(200)) - 100));
  MetricsWriter writer(dir / "metrics.jsonl");
  for (double value : written) writer.write({{"value", value}});
  std::ifstream file(dir / "metrics.jsonl");
  for (double value : written) {
    std::string line;
    REQUIRE(std::getline(file, line));
    const auto read = nlohmann::json::parse(line).at("value").get<double>();
    CHECK(read == value);
    CHECK(std::signbit(read) == std::signbit(value));
  }
}

TEST_CASE("values that JSON has no number for become null in the metrics") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  writer.write({{"a", std::nan("")}, {"b", kInfinity}, {"c", -kInfinity}});
  CHECK(read_file(dir / "metrics.jsonl") == "{\"a\":null,\"b\":null,\"c\":null}\n");
}

TEST_CASE("any bytes in a metric's text give a valid line") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  writer.write({{"sample", "say \"aye\"\n\x01\xff\xc3 o'\xc3\xa9"}});
  const std::string text = read_file(dir / "metrics.jsonl");
  CHECK(text.find('\n') == text.size() - 1);
  CHECK(nlohmann::json::parse(text).at("sample") == "say \"aye\"\n\x01\xef\xbf\xbd\xef\xbf\xbd o'\xc3\xa9");
}

TEST_CASE("metrics are appended to those of an earlier run") {
  const ScratchDirectory dir;
  for (int step = 0; step < 3; ++step) MetricsWriter(dir / "metrics.jsonl").write({{"step", step}});
  CHECK(read_file(dir / "metrics.jsonl") == "{\"step\":0}\n{\"step\":1}\n{\"step\":2}\n");
}

TEST_CASE("a line that a killed run left torn is removed before metrics are appended") {
  const ScratchDirectory dir;
  write_file(dir / "metrics.jsonl", "{\"step\":0}\n{\"step\":1,\"lo");
  MetricsWriter(dir / "metrics.jsonl").write({{"step", 1}});
  CHECK(read_file(dir / "metrics.jsonl") == "{\"step\":0}\n{\"step\":1}\n");
  write_file(dir / "torn.jsonl", "{\"st");
  MetricsWriter(dir / "torn.jsonl").write({{"step", 0}});
  CHECK(read_file(dir / "torn.jsonl") == "{\"step\":0}\n");
}

TEST_CASE("metrics beyond a step are dropped, for a run that goes on from there") {
  const ScratchDirectory dir;
  const std::string text =
      "{\"step\":1}\n{\"step\":2,\"loss\":0.5}\n{\"step\":2,\"eval_loss\":0.5}\n{\"step\":3}\n{\"st";
  write_file(dir / "metrics.jsonl", text);
  rowan::drop_metrics_after(dir / "metrics.jsonl", 2);
  CHECK(read_file(dir / "metrics.jsonl") == text.substr(0, text.find("{\"step\":3}")));
  rowan::drop_metrics_after(dir / "metrics.jsonl", 0);
  CHECK(read_file(dir / "metrics.jsonl").empty());
  rowan::drop_metrics_after(dir / "none.jsonl", 0);
  CHECK_FALSE(std::filesystem::exists(dir / "none.jsonl"));
}

TEST_CASE("each line of metrics is in the file before the next step begins") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  writer.write({{"step", 0}});
  CHECK(read_file(dir / "metrics.jsonl") == "{\"step\":0}\n");
}

TEST_CASE("metrics that cannot be stored are an Io error") {
  const ScratchDirectory dir;
  CHECK(kind_of([&] { MetricsWriter(dir / "missing" / "metrics.jsonl"); }) == ErrorKind::kIo);
  CHECK(kind_of([&] { MetricsWriter(dir.path()); }) == ErrorKind::kIo);
  CHECK(kind_of([] { MetricsWriter("/dev/full").write({{"step", 0}}); }) == ErrorKind::kIo);
}

TEST_CASE("a file size limit is an error, leaves no part of a line, and metrics can go on") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  writer.write({{"step", 0}});
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit lowered{40, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
  const ErrorKind kind = kind_of([&] { writer.write({{"sample", std::string(100, 'x')}}); });
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(kind == ErrorKind::kIo);
  CHECK(read_file(dir / "metrics.jsonl") == "{\"step\":0}\n");
  writer.write({{"step", 1}});
  CHECK(read_file(dir / "metrics.jsonl") == "{\"step\":0}\n{\"step\":1}\n");
}

TEST_CASE("a metric named twice in one line is refused and nothing is written") {
  const ScratchDirectory dir;
  MetricsWriter writer(dir / "metrics.jsonl");
  CHECK(kind_of([&] { writer.write({{"loss", 1.0}, {"loss", 2.0}}); }) == ErrorKind::kInvalidArgument);
  CHECK(read_file(dir / "metrics.jsonl").empty());
}

TEST_CASE("metrics read back as they were written, a torn last line left out") {
  const ScratchDirectory scratch;
  const rowan::MetricRecord record{
      {"step", std::int64_t{3}}, {"loss", 0.1}, {"skipped", true}, {"stage", std::string("tune")}};
  {
    MetricsWriter writer(scratch / "metrics.jsonl");
    writer.write(record);
    writer.write({{"loss", std::nan("")}});
  }
  write_file(scratch / "metrics.jsonl", read_file(scratch / "metrics.jsonl") + "{\"step\":");
  const auto records = rowan::read_metrics(scratch / "metrics.jsonl");
  REQUIRE(records.size() == 2);
  CHECK(records[0] == record);
  CHECK(std::isnan(std::get<double>(records[1].at(0).second)));
}

TEST_CASE("lines that are no metrics are refused with file and line") {
  const ScratchDirectory scratch;
  const std::string line = GENERATE("[1]", "{\"a\":[1]}", "{\"a\":1,\"a\":2}", "{\"a\":1} x", "", "nan");
  write_file(scratch / "m.jsonl", "{\"step\":1}\n" + line + "\n");
  std::string message;
  CHECK(kind_of([&] {
          try {
            rowan::read_metrics(scratch / "m.jsonl");
          } catch (const Error& error) {
            message = error.what();
            throw;
          }
        }) == ErrorKind::kFormat);
  CHECK(message.find("m.jsonl:2") != std::string::npos);
}
