#include <limits>
#include <numeric>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/tensor.h"
#include "support/device.h"

using rowan::Device;
using rowan::DType;
using rowan::Error;
using rowan::Shape;
using rowan::Stream;
using rowan::StreamRef;
using rowan::Tensor;

namespace {

Tensor counting(const Shape& shape, StreamRef stream) {
  std::vector<float> values(static_cast<std::size_t>(shape.elements()));
  std::iota(values.begin(), values.end(), 0.0f);
  return Tensor::from_host(shape, values, stream);
}

using Values = std::vector<float>;

void check_views(StreamRef stream) {
  const Tensor t = counting({2, 3, 4}, stream);
  CHECK(t.slice(1, 1, 3).to_vector<float>(stream) == Values{4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23});
  CHECK(t.select(0, 1).select(1, 2).to_vector<float>(stream) == Values{14, 18, 22});
  CHECK(t.transpose(0, 2).select(0, 3).to_vector<float>(stream) == Values{3, 15, 7, 19, 11, 23});
  CHECK(t.slice(-1, 1, 2).to_vector<float>(stream) == Values{1, 5, 9, 13, 17, 21});
  CHECK(t.slice(0, 1, 1).to_vector<float>(stream).empty());
  CHECK(t.transpose(0, 1).clone(stream).is_contiguous());
  CHECK(t.transpose(0, 1).clone(stream).to_vector<float>(stream) == t.transpose(0, 1).to_vector<float>(stream));
}

void check_scatter(StreamRef stream) {
  const Tensor target = Tensor::zeros({3, 4}, DType::kFloat32, stream);
  const Tensor values = counting({2, 2}, stream);
  target.slice(0, 1, 3).slice(1, 1, 3).copy_from(values, stream);
  CHECK(target.to_vector<float>(stream) == Values{0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 3, 0});
  target.transpose(0, 1).slice(0, 0, 2).slice(1, 1, 3).copy_from(
      values, stream);  // every second stride differs: the general path
  CHECK(target.to_vector<float>(stream) == Values{0, 0, 0, 0, 0, 2, 1, 0, 1, 3, 3, 0});
  target.slice(1, 1, 2).zero(stream);
  CHECK(target.to_vector<float>(stream) == Values{0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 3, 0});
}

}  // namespace

TEST_CASE("views show the right elements without a copy") { check_views(StreamRef()); }
TEST_CASE("views show the right elements without a copy on CUDA", "[gpu][sanitize]") {
  if (!rowan::test::have_gpu()) return;
  check_views(Stream(Device::cuda()));
}

TEST_CASE("copies and zeroing reach only the elements of a view") { check_scatter(StreamRef()); }
TEST_CASE("copies and zeroing reach only the elements of a view on CUDA", "[gpu][sanitize]") {
  if (!rowan::test::have_gpu()) return;
  check_scatter(Stream(Device::cuda()));
}

TEST_CASE("copies between host and device keep strides apart", "[gpu][sanitize]") {
  if (!rowan::test::have_gpu()) return;
  const Stream stream(Device::cuda());
  const Tensor host = counting({4, 6}, StreamRef());
  const Tensor device = host.transpose(0, 1).to(Device::cuda(), stream);
  CHECK(device.to_vector<float>(stream) == host.transpose(0, 1).to_vector<float>(StreamRef()));
  const Tensor wide = Tensor::zeros({6, 8}, DType::kFloat32, stream);
  const Tensor slot = wide.slice(1, 2, 6);
  slot.copy_from(host.transpose(0, 1), stream);
  CHECK(slot.to(Device::cpu(), stream).to_vector<float>(StreamRef()) ==
        host.transpose(0, 1).to_vector<float>(StreamRef()));
  const Tensor back = Tensor::zeros({8, 6}, DType::kFloat32, StreamRef());
  back.slice(0, 2, 6).copy_from(slot.transpose(0, 1), stream);
  CHECK(back.slice(0, 2, 6).to_vector<float>(StreamRef()) == host.to_vector<float>(StreamRef()));
  CHECK(back.slice(0, 0, 2).to_vector<float>(StreamRef()) == Values(12, 0.0f));
}

TEST_CASE("reshape splits and merges dimensions where strides allow it") {
  const StreamRef stream;
  const Tensor t = counting({4, 6}, stream);
  const Tensor rows = t.slice(0, 1, 3);
  CHECK(rows.reshape({3, 4}).to_vector<float>(stream) == rows.to_vector<float>(stream));
  const Tensor gapped = t.slice(1, 0, 4);  // rows of 4 with a stride of 6
  CHECK(gapped.reshape({2, 2, 2, 2}).to_vector<float>(stream) == gapped.to_vector<float>(stream));
  CHECK(gapped.reshape({4, 1, 4, 1}).to_vector<float>(stream) == gapped.to_vector<float>(stream));
  CHECK(gapped.reshape({2, 2, 4}).shares_storage(t));
  CHECK_THROWS_AS(gapped.reshape({16}), Error);
  CHECK_THROWS_AS(gapped.reshape({8, 2}), Error);
  CHECK_THROWS_AS(t.transpose(0, 1).reshape({24}), Error);
  CHECK_THROWS_AS(t.reshape({5, 5}), Error);
  CHECK(t.transpose(0, 1).reshape({2, 3, 4}).to_vector<float>(stream) == t.transpose(0, 1).to_vector<float>(stream));
  CHECK(Tensor::empty({0, 3}, DType::kFloat32, stream).reshape({3, 0, 2}).elements() == 0);
}

TEST_CASE("a tensor without elements is contiguous and takes any shape without elements, whatever its strides") {
  const StreamRef stream;
  for (const Shape& shape : {Shape{0, 3, 2}, Shape{3, 0, 2}, Shape{2, 3, 0}}) {
    CAPTURE(to_string(shape));
    const Tensor t = Tensor::empty_with_slack(shape, 8, DType::kFloat32, stream);
    CHECK(t.is_contiguous());
    for (const Shape& other : {Shape{0, 2}, Shape{6, 0}, Shape{0}, Shape{1, 0, 5}})
      CHECK(t.reshape(other).shape() == other);
    CHECK(t.to_vector<float>(stream).empty());
  }
  CHECK(counting({4, 6}, stream).transpose(0, 1).slice(1, 2, 2).reshape({3, 0}).elements() == 0);
}

TEST_CASE("slack columns belong to rows and only to whole rows") {
  const StreamRef stream;
  Tensor t = Tensor::empty_with_slack({3, 70}, 10, DType::kFloat32, stream);
  CHECK(t.stride(0) == 128);
  CHECK(t.slack() == 58);
  t.with_slack(58).zero(stream);
  t.copy_from(counting({3, 70}, stream), stream);
  const Tensor spare = t.slack_view(2);
  CHECK(spare.shape() == Shape{3, 2});
  spare.copy_from(counting({3, 2}, stream), stream);
  CHECK(t.with_slack(2).select(0, 1).slice(0, 68, 72).to_vector<float>(stream) == Values{138, 139, 2, 3});
  CHECK(t.to_vector<float>(stream) == counting({3, 70}, stream).to_vector<float>(stream));
  CHECK(t.slice(0, 1, 3).slack() == 58);
  CHECK(t.slice(1, 60, 70).slack() == 58);
  CHECK(t.slice(1, 0, 60).slack() == 0);
  CHECK(t.slice(1, 70, 70).slack() == 0);
  CHECK(t.transpose(0, 1).slack() == 0);
  CHECK(t.reshape({3, 7, 10}).slack() == 0);
  CHECK(t.reshape({1, 3, 70}).slack() == 58);
  CHECK_THROWS_AS(t.with_slack(59), Error);
  CHECK_THROWS_AS(counting({2, 2}, stream).with_slack(1), Error);
}

TEST_CASE("slack is claimed by one holder at a time") {
  const Tensor t = Tensor::empty_with_slack({2, 3}, 4, DType::kFloat32, StreamRef());
  auto claim = t.claim_slack();
  CHECK(claim);
  CHECK_FALSE(t.slice(0, 1, 2).claim_slack());
  claim.reset();
  CHECK(t.claim_slack());
  CHECK_FALSE(counting({2, 2}, StreamRef()).claim_slack());
}

TEST_CASE("shapes refuse negative extents, overflow and too many dimensions") {
  CHECK_THROWS_AS((Shape{2, -1}), Error);
  CHECK_THROWS_AS((Shape{1, 1, 1, 1, 1, 1}), Error);
  CHECK_THROWS_AS((Shape{std::int64_t{1} << 32, std::int64_t{1} << 32}), Error);
  CHECK_THROWS_AS((Shape{0, std::int64_t{1} << 32, std::int64_t{1} << 32}), Error);
  CHECK((Shape{2, 3})[-1] == 3);
  CHECK_THROWS_AS((Shape{2, 3})[2], Error);
  CHECK(to_string(Shape{2, 3}) == "[2, 3]");
  CHECK(Shape{}.elements() == 1);
}

TEST_CASE("wrong uses of a tensor name what was expected") {
  const StreamRef stream;
  const Tensor t = counting({2, 2}, stream);
  CHECK_THROWS_AS(t.data<double>(), Error);
  CHECK_THROWS_AS(Tensor().device(), Error);
  CHECK_THROWS_AS(t.slice(0, 1, 3), Error);
  CHECK_THROWS_AS(t.select(1, 2), Error);
  CHECK_THROWS_AS(t.copy_from(counting({2, 3}, stream), stream), Error);
  CHECK_THROWS_AS(t.copy_from(Tensor::zeros({2, 2}, DType::kFloat64, stream), stream), Error);
  CHECK_THROWS_AS((Tensor::from_host(Shape{3}, Values{1, 2}, stream)), Error);
  try {
    t.data<double>();
  } catch (const Error& error) {
    CHECK(error.kind() == rowan::ErrorKind::kInvalidArgument);
    CHECK(std::string(error.what()).find("float64") != std::string::npos);
  }
}

TEST_CASE("a tensor of more bytes than there are addresses is out of memory, not a small one") {
  constexpr std::int64_t kWraps = std::int64_t{1} << 61;  // times eight bytes: 2^64
  const auto kind_of = [](const auto& make) {
    try {
      make();
    } catch (const Error& error) {
      return error.kind();
    }
    return rowan::ErrorKind::kInterrupted;
  };
  CHECK(kind_of([] { Tensor::empty({kWraps}, DType::kFloat64, StreamRef()); }) == rowan::ErrorKind::kOutOfMemory);
  CHECK(kind_of([] { Tensor::empty({kWraps, 2}, DType::kBFloat16, StreamRef()); }) == rowan::ErrorKind::kOutOfMemory);
  CHECK(kind_of([] {
          Tensor::empty_with_slack({kWraps, 1}, 1, DType::kInt32, StreamRef());
        }) == rowan::ErrorKind::kInvalidArgument);  // its shape with slack has no count
  constexpr std::int64_t kSlack = std::numeric_limits<std::int64_t>::max() - 4;
  CHECK(kind_of([] {
          Tensor::empty_with_slack({2, 5}, kSlack, DType::kFloat32, StreamRef());
        }) == rowan::ErrorKind::kInvalidArgument);
  CHECK(kind_of([] {
          Tensor::empty_with_slack({1, 5}, kSlack - 128, DType::kFloat32, StreamRef());
        }) == rowan::ErrorKind::kOutOfMemory);
}

TEST_CASE("overlap is told by byte ranges within one storage") {
  const StreamRef stream;
  const Tensor t = counting({4, 4}, stream);
  CHECK(t.slice(0, 0, 2).overlaps(t.slice(0, 1, 3)));
  CHECK_FALSE(t.slice(0, 0, 2).overlaps(t.slice(0, 2, 4)));
  CHECK_FALSE(t.overlaps(t.clone(stream)));
  CHECK_FALSE(t.slice(0, 1, 1).overlaps(t));
}
