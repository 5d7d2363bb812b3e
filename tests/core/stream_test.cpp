#include <atomic>
#include <stdexcept>
#include <vector>

#include "catch.h"
#include "core/parallel.h"
#include "rowan/core/build_info.h"
#include "rowan/core/error.h"
#include "rowan/core/stream.h"
#include "rowan/core/tensor.h"
#include "support/device.h"

using namespace rowan;

TEST_CASE("the CPU stream answers every call at once") {
  const Stream stream(Device::cpu());
  Event begin(Device::cpu(), true), end(Device::cpu(), true);
  begin.record(stream);
  end.record(stream);
  stream.ref().wait(end);
  CHECK(stream.ref().query());
  CHECK_FALSE(stream.ref().capturing());
  CHECK(end.query());
  CHECK(begin.elapsed_ms(end) >= 0);
}

TEST_CASE("device names are parsed, and wrong ones refused by name") {
  CHECK(parse_device("cpu") == Device::cpu());
  CHECK(to_string(Device::cuda(3)) == "cuda:3");
  for (const char* text : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cudax", "CPU"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_device(text), Error);
  }
  if (cuda_device_count() == 0) {
    CHECK(parse_device("auto") == Device::cpu());
    try {
      parse_device("cuda");
      FAIL("cuda was accepted without a device");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUnsupported);
    }
  }
}

TEST_CASE("events order work of two streams, and memory freed early stays whole", "[gpu]") {
  if (!test::have_gpu()) return;
  const Stream first(Device::cuda()), second(Device::cuda());
  CHECK(parse_device("auto") == Device::cuda());
  for (int round = 0; round < 20; ++round) {
    Tensor copy;
    {
      const Tensor source = Tensor::zeros({1 << 22}, DType::kFloat32, first);
      Event ready(Device::cuda());
      ready.record(first);
      second.ref().wait(ready);
      copy = source.clone(second);  // records the use; the storage goes away while the copy may still run
    }
    const Tensor reuse = Tensor::from_host(Shape{1 << 22}, std::vector<float>(1 << 22, 1.0f), first);
    const auto values = copy.to_vector<float>(second);
    CHECK(std::count(values.begin(), values.end(), 0.0f) == (1 << 22));
  }
}

TEST_CASE("a storage may outlive its stream", "[gpu]") {
  if (!test::have_gpu()) return;
  Tensor t;
  {
    const Stream stream(Device::cuda());
    t = Tensor::zeros({100}, DType::kFloat32, stream);
    stream.synchronize();
  }
  const Stream other(Device::cuda());
  CHECK(t.to_vector<float>(other) == std::vector<float>(100, 0.0f));
}

TEST_CASE("device_info describes the device", "[gpu]") {
  if (!test::have_gpu()) return;
  const DeviceInfo info = device_info(Device::cuda());
  CHECK(info.multiprocessors > 0);
  CHECK(info.driver >= info.runtime / 1000 * 1000);
  CHECK_THROWS_AS(device_info(Device::cpu()), Error);
  CHECK_THROWS_AS(require_device(Device::cuda(1000)), Error);
}

TEST_CASE("build_info names the version and the compiler") {
  CHECK_FALSE(build_info().version.empty());
  CHECK_FALSE(build_info().compiler.empty());
}

TEST_CASE("parallel_for visits each index once, in blocks of the grain") {
  std::vector<std::atomic<int>> visits(1001);
  detail::parallel_for(1001, 10, [&](std::int64_t begin, std::int64_t end) {
    REQUIRE(begin % 10 == 0);
    REQUIRE(end <= 1001);
    for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
  });
  for (const auto& count : visits) CHECK(count == 1);
  detail::parallel_for(0, 1, [](std::int64_t, std::int64_t) { FAIL("no index to visit"); });
}

TEST_CASE("parallel_for hands an exception to the caller") {
  CHECK_THROWS_AS(detail::parallel_for(100, 1,
                                       [](std::int64_t begin, std::int64_t) {
                                         if (begin == 42) throw Error(ErrorKind::kIo, "planted");
                                       }),
                  Error);
  std::atomic<int> total{0};
  detail::parallel_for(4, 1, [&](std::int64_t, std::int64_t) {
    detail::parallel_for(5, 1, [&](std::int64_t, std::int64_t) { ++total; });
  });
  CHECK(total == 20);
}
