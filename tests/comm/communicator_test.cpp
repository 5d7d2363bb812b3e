#include "rowan/comm/communicator.h"

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using rowan::test::random_normal;
using rowan::test::values;

namespace {

const StreamRef kCpu;

void check_single(StreamRef stream) {
  SingleCommunicator single;
  Communicator& comm = single;
  CHECK(comm.rank() == 0);
  CHECK(comm.size() == 1);
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64, DType::kInt64, DType::kInt32}) {
    for (const Shape& shape : {Shape{3, 5}, Shape{7}, Shape{0, 4}}) {
      CAPTURE(to_string(dtype), to_string(shape));
      const Tensor input = random_normal(shape, dtype, 1, stream, 10);
      const std::vector<double> expected = values(input, stream);
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        Tensor data = input.clone(stream);
        comm.all_reduce(data, op, stream);
        CHECK(values(data, stream) == expected);
        Tensor part = Tensor::zeros(shape, dtype, stream);
        comm.reduce_scatter(input, part, op, stream);
        CHECK(values(part, stream) == expected);
      }
      Tensor gathered = Tensor::zeros(shape, dtype, stream), received = Tensor::zeros(shape, dtype, stream);
      comm.all_gather(input, gathered, stream);
      CHECK(values(gathered, stream) == expected);
      comm.all_to_all(std::vector{input}, std::vector{received}, stream);
      CHECK(values(received, stream) == expected);
      Tensor data = input.clone(stream);
      comm.broadcast(data, 0, stream);
      CHECK(values(data, stream) == expected);
      comm.barrier(stream);
      comm.synchronize(stream);
      CHECK(values(input, stream) == expected);
    }
  }
}

/// Stands for rank 1 of 3: what the public functions check does not depend on an implementation.
class MiddleOfThree final : public Communicator {
 public:
  int rank() const noexcept override { return 1; }
  int size() const noexcept override { return 3; }
  void barrier(StreamRef) override {}
  void synchronize(StreamRef) override {}
  int calls = 0;

 private:
  void do_all_reduce(Tensor&, ReduceOp, StreamRef) override { ++calls; }
  void do_all_gather(const Tensor&, Tensor&, StreamRef) override { ++calls; }
  void do_reduce_scatter(const Tensor&, Tensor&, ReduceOp, StreamRef) override { ++calls; }
  void do_all_to_all(std::span<const Tensor>, std::span<const Tensor>, StreamRef) override { ++calls; }
  void do_broadcast(Tensor&, int, StreamRef) override { ++calls; }
};

template <class F>
void check_refused(F&& f, const std::string& word) {
  try {
    f();
    FAIL("not refused: " << word);
  } catch (const Error& error) {
    CAPTURE(error.what());
    CHECK(error.kind() == ErrorKind::kInvalidArgument);
    CHECK(std::string(error.what()).find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("the single communicator gives every operation's input back") { check_single(kCpu); }

TEST_CASE("on CUDA the single communicator gives every operation's input back", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_single(stream);
}

TEST_CASE("a communicator takes a rank's own rows of the whole as its part, and no other overlap") {
  MiddleOfThree comm;
  Tensor whole = random_normal({6, 2}, DType::kFloat32, 1, kCpu);
  Tensor own = whole.slice(0, 2, 4), other = whole.slice(0, 1, 3);
  comm.all_gather(own, whole, kCpu);
  comm.reduce_scatter(whole, own, ReduceOp::kSum, kCpu);
  CHECK(comm.calls == 2);
  check_refused([&] { comm.all_gather(other, whole, kCpu); }, "rows 2 to 4");
  check_refused([&] { comm.reduce_scatter(whole, other, ReduceOp::kSum, kCpu); }, "rows 2 to 4");
  CHECK(comm.calls == 2);
}

TEST_CASE("an all-to-all may carry another number of rows to each rank") {
  MiddleOfThree comm;
  std::vector<Tensor> send, receive;
  for (const std::int64_t n : {4, 2, 0}) send.push_back(random_normal({n, 3}, DType::kFloat32, 1, kCpu));
  for (const std::int64_t n : {1, 2, 5}) receive.push_back(random_normal({n, 3}, DType::kFloat32, 1, kCpu));
  comm.all_to_all(send, receive, kCpu);
  CHECK(comm.calls == 1);
  check_refused([&] { comm.all_to_all(std::span(send).first(2), receive, kCpu); }, "3 tensors");
  receive[1] = random_normal({3, 3}, DType::kFloat32, 1, kCpu);
  check_refused([&] { comm.all_to_all(send, receive, kCpu); }, "[3, 3]");
  receive[1] = send[0].slice(0, 0, 2);
  check_refused([&] { comm.all_to_all(send, receive, kCpu); }, "overlap");
  receive[1] = receive[2].slice(0, 0, 2);
  check_refused([&] { comm.all_to_all(send, receive, kCpu); }, "overlap");
}

TEST_CASE("a communicator refuses shapes, dtypes, strides and roots that do not fit, naming the operation") {
  MiddleOfThree comm;
  Tensor part = random_normal({2, 3}, DType::kFloat32, 1, kCpu),
         whole = random_normal({5, 3}, DType::kFloat32, 1, kCpu);
  check_refused([&] { comm.all_gather(part, whole, kCpu); }, "all_gather: expected whole of shape [6, 3], got [5, 3]");
  check_refused([&] { comm.reduce_scatter(whole, part, ReduceOp::kMax, kCpu); },
                "reduce_scatter: expected whole of shape [6, 3]");
  Tensor wide = random_normal({6, 3}, DType::kFloat64, 1, kCpu);
  check_refused([&] { comm.all_gather(part, wide, kCpu); }, "float64");
  Tensor gaps = random_normal({6, 3}, DType::kFloat32, 1, kCpu).slice(1, 0, 2), undefined;
  check_refused([&] { comm.all_reduce(gaps, ReduceOp::kSum, kCpu); }, "all_reduce: expected data to be contiguous");
  check_refused([&] { comm.all_reduce(undefined, ReduceOp::kSum, kCpu); }, "undefined");
  check_refused([&] { comm.broadcast(part, 3, kCpu); }, "broadcast: expected a root in [0, 3), got 3");
  check_refused([&] { comm.broadcast(part, -1, kCpu); }, "-1");
  CHECK(comm.calls == 0);
}
