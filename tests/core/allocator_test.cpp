#include <cmath>
#include <memory>
#include <vector>

#include "catch.h"
#include "rowan/core/allocator.h"
#include "rowan/core/error.h"
#include "rowan/core/tensor.h"
#include "support/device.h"

using namespace rowan;

namespace {

void check_tracking(StreamRef stream) {
  const auto tracker = std::make_shared<TrackingAllocator>(current_allocator(stream.device()));
  const ScopedAllocator scope(tracker);
  {
    const AllocationLabel label("weights");
    const Tensor a = Tensor::empty({1000}, DType::kFloat32, stream);
    CHECK(tracker->bytes() == 4000);
    {
      const AllocationLabel inner("activations");
      const Tensor b = Tensor::empty({500}, DType::kFloat64, stream);
      CHECK(tracker->bytes() == 8000);
      CHECK(tracker->report().find("activations") != std::string::npos);
    }
    CHECK(tracker->bytes() == 4000);
    CHECK(tracker->usage().front().label == "weights");
  }
  CHECK(tracker->bytes() == 0);
  CHECK(tracker->peak_bytes() == 8000);
  CHECK(tracker->total_allocations() == 2);
  CHECK(tracker->report().empty());
}

void check_limit(StreamRef stream) {
  const auto limiter = std::make_shared<LimitingAllocator>(current_allocator(stream.device()), 1 << 20);
  const auto tracker = std::make_shared<TrackingAllocator>(limiter);
  const ScopedAllocator scope(tracker);
  const AllocationLabel label("weights");
  const Tensor held = Tensor::empty({1000}, DType::kFloat32, stream);
  try {
    Tensor::empty({1 << 20}, DType::kFloat32, stream);
    FAIL("the limit did not act");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kOutOfMemory);
    CHECK(std::string(error.what()).find("4194304") != std::string::npos);
    CHECK(std::string(error.what()).find("weights") != std::string::npos);
  }
  const Tensor small = Tensor::zeros({1000}, DType::kFloat32, stream);  // a handled failure leaves nothing behind
  CHECK(small.to_vector<float>(stream) == std::vector<float>(1000, 0.0f));
  CHECK(tracker->bytes() == 8000);
}

void check_poison(StreamRef stream) {
  const auto poison = std::make_shared<PoisonAllocator>(current_allocator(stream.device()));
  const ScopedAllocator scope(poison);
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const Tensor t = Tensor::empty({33}, dtype, stream);
    if (dtype == DType::kFloat32) CHECK(std::isnan(t.to_vector<float>(stream)[32]));
    if (dtype == DType::kFloat64) CHECK(std::isnan(t.to_vector<double>(stream)[0]));
  }
  CHECK(poison->violations() == 0);
}

}  // namespace

TEST_CASE("a tracking allocator counts bytes by label, with peaks") { check_tracking(StreamRef()); }
TEST_CASE("a tracking allocator counts bytes by label, with peaks, on CUDA", "[gpu]") {
  if (!test::have_gpu()) return;
  check_tracking(Stream(Device::cuda()));
}

TEST_CASE("out of memory names the bytes and who holds what, and harms no later call") { check_limit(StreamRef()); }
TEST_CASE("out of memory names the bytes and who holds what, and harms no later call, on CUDA", "[gpu]") {
  if (!test::have_gpu()) return;
  check_limit(Stream(Device::cuda()));
}

TEST_CASE("the driver's own out-of-memory error harms no later call", "[gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  try {
    Tensor::empty({std::int64_t{1} << 42}, DType::kFloat32, stream);
    FAIL("16 TiB were handed out");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kOutOfMemory);
  }
  CHECK(Tensor::zeros({3}, DType::kFloat32, stream).to_vector<float>(stream) == std::vector<float>(3, 0.0f));
}

TEST_CASE("a poisoning allocator hands out NaN") { check_poison(StreamRef()); }
TEST_CASE("a poisoning allocator hands out NaN on CUDA", "[gpu]") {
  if (!test::have_gpu()) return;
  check_poison(Stream(Device::cuda()));
}

TEST_CASE("a poisoning allocator notices a write behind the end and before the start") {
  const auto poison = std::make_shared<PoisonAllocator>(current_allocator(Device::cpu()));
  auto* after = static_cast<char*>(poison->allocate(10, StreamRef()));
  after[10] = 1;
  poison->deallocate(after, 10, StreamRef());
  CHECK(poison->violations() == 1);
  auto* before = static_cast<char*>(poison->allocate(10, StreamRef()));
  before[-1] = 1;
  poison->deallocate(before, 10, StreamRef());
  CHECK(poison->violations() == 2);
}

TEST_CASE("zero bytes are no allocation") {
  const Tensor t = Tensor::empty({0, 5}, DType::kFloat32, StreamRef());
  CHECK(t.raw() == nullptr);
  CHECK(t.to_vector<float>(StreamRef()).empty());
}

TEST_CASE("page-locked memory is host memory") {
  const ScopedAllocator scope(pinned_allocator());
  const Tensor t = Tensor::zeros({100}, DType::kFloat32, StreamRef());
  CHECK(t.device() == Device::cpu());
  CHECK(t.to_vector<float>(StreamRef())[99] == 0);
}
