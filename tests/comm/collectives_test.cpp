// One suite for all communicators with several ranks, and how threads fail.
#include <algorithm>
#include <cmath>
#include <thread>

#include "catch.h"
#include "comm/rank_checks.h"
#include "rowan/comm/thread_communicator.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan::test {

namespace {

const StreamRef kCpu;

std::uint64_t seed_of(int rank) { return 100 + static_cast<std::uint64_t>(rank); }

/// Rank `rank`'s input. 16-bit sums of integers up to 8 are exact, so that NCCL's order of adding does not matter.
Tensor input_of(int rank, const Shape& shape, DType dtype, StreamRef stream) {
  std::vector<double> numbers = values(random_normal(shape, DType::kFloat64, seed_of(rank), kCpu, 3), kCpu);
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    for (double& x : numbers) x = std::clamp(std::round(x), -8.0, 8.0);
  }
  const Tensor t = Tensor::empty(shape, dtype, kCpu);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    switch (dtype) {
      case DType::kFloat64:
        t.data<double>()[i] = numbers[i];
        break;
      case DType::kFloat32:
        t.data<float>()[i] = static_cast<float>(numbers[i]);
        break;
      case DType::kBFloat16:
        t.data<BFloat16>()[i] = static_cast<BFloat16>(numbers[i]);
        break;
      case DType::kFloat16:
        t.data<Float16>()[i] = static_cast<Float16>(numbers[i]);
        break;
      case DType::kInt64:
        t.data<std::int64_t>()[i] = static_cast<std::int64_t>(numbers[i]);
        break;
      default:
        t.data<std::int32_t>()[i] = static_cast<std::int32_t>(numbers[i]);
    }
  }
  return t.to(stream.device(), stream);
}

/// The elementwise reduction of all ranks' inputs, in float64.
std::vector<double> reduced(int size, const Shape& shape, DType dtype, ReduceOp op) {
  std::vector<double> result = values(input_of(0, shape, dtype, kCpu), kCpu);
  for (int r = 1; r < size; ++r) {
    const std::vector<double> next = values(input_of(r, shape, dtype, kCpu), kCpu);
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = op == ReduceOp::kSum ? result[i] + next[i] : std::max(result[i], next[i]);
  }
  return result;
}

std::vector<double> part_of(const std::vector<double>& all, int rank, int size) {
  const std::size_t n = all.size() / static_cast<std::size_t>(size), begin = n * static_cast<std::size_t>(rank);
  return {all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(begin + n)};
}

/// What a float32 sum of a few terms may be off by; other dtypes' sums are exact here.
bool agree(const std::vector<double>& a, const std::vector<double>& b, DType dtype) {
  std::vector<double> bound;
  for (const double x : b)
    bound.push_back(dtype == DType::kFloat32   ? 1e-6 * (std::abs(x) + 20)
                    : dtype == DType::kFloat64 ? 1e-14 * (std::abs(x) + 20)
                                               : 0);
  return within(a, b, bound);
}

/// Every rank holds the bits of rank 0.
bool equal_on_all_ranks(const Tensor& t, Communicator& communicator, StreamRef stream) {
  Tensor first = t.clone(stream);
  communicator.broadcast(first, 0, stream);
  communicator.synchronize(stream);
  return values(first, stream) == values(t, stream);
}

class CollectiveCheck {
 public:
  CollectiveCheck(Communicator& communicator, StreamRef stream, Faults& faults, const Shape& part, DType dtype)
      : comm_(communicator),
        stream_(stream),
        faults_(faults),
        rank_(communicator.rank()),
        size_(communicator.size()),
        part_(part),
        whole_(part.with(0, part[0] * size_)),
        dtype_(dtype) {}

  void run() {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      all_reduce(op);
      reduce_scatter(op, false);
      reduce_scatter(op, true);
    }
    all_gather(false);
    all_gather(true);
    for (int root = 0; root < size_; ++root) broadcast(root);
    all_to_all();
  }

 private:
  void expect(bool condition, const std::string& what) {
    faults_.expect(condition, what + " of " + to_string(part_) + " " + to_string(dtype_) + " on rank " +
                                  std::to_string(rank_) + " of " + std::to_string(size_));
  }
  /// Values once all is done; waits only through the communicator.
  std::vector<double> result(const Tensor& t) {
    comm_.synchronize(stream_);
    return values(t, stream_);
  }

  void all_reduce(ReduceOp op) {
    Tensor data = input_of(rank_, part_, dtype_, stream_);
    comm_.all_reduce(data, op, stream_);
    expect(agree(result(data), reduced(size_, part_, dtype_, op), dtype_), "all_reduce");
    expect(equal_on_all_ranks(data, comm_, stream_), "equal bits of all_reduce");
  }

  void reduce_scatter(ReduceOp op, bool in_place) {
    const Tensor whole = input_of(rank_, whole_, dtype_, stream_);
    Tensor part =
        in_place ? whole.slice(0, rank_ * part_[0], (rank_ + 1) * part_[0]) : Tensor::zeros(part_, dtype_, stream_);
    const std::vector<double> before = values(whole, stream_);
    comm_.reduce_scatter(whole, part, op, stream_);
    expect(agree(result(part), part_of(reduced(size_, whole_, dtype_, op), rank_, size_), dtype_), "reduce_scatter");
    std::vector<double> after = values(whole, stream_);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ && in_place) continue;
      expect(part_of(after, r, size_) == part_of(before, r, size_), "reduce_scatter's input");
    }
  }

  void all_gather(bool in_place) {
    Tensor whole = Tensor::zeros(whole_, dtype_, stream_);
    Tensor part = input_of(rank_, part_, dtype_, stream_);
    if (in_place) {
      const Tensor own = whole.slice(0, rank_ * part_[0], (rank_ + 1) * part_[0]);
      own.copy_from(part, stream_);
      part = own;
    }
    comm_.all_gather(part, whole, stream_);
    const std::vector<double> gathered = result(whole);
    for (int r = 0; r < size_; ++r) {
      expect(part_of(gathered, r, size_) == values(input_of(r, part_, dtype_, kCpu), kCpu), "all_gather");
    }
  }

  void broadcast(int root) {
    Tensor data = input_of(rank_, part_, dtype_, stream_);
    comm_.broadcast(data, root, stream_);
    expect(result(data) == values(input_of(root, part_, dtype_, kCpu), kCpu), "broadcast");
  }

  /// Rank a sends rank b a tensor of (a + 2b) % 4 rows: some are empty, and counts differ in the two directions.
  void all_to_all() {
    const auto shape = [&](int from, int to) { return part_.with(0, (from + 2 * to) % 4); };
    const auto sent = [&](int from, int to, StreamRef where) {
      return input_of(from * size_ + to, shape(from, to), dtype_, where);
    };
    std::vector<Tensor> send, receive;
    for (int p = 0; p < size_; ++p) {
      send.push_back(sent(rank_, p, stream_));
      receive.push_back(Tensor::zeros(shape(p, rank_), dtype_, stream_));
    }
    comm_.all_to_all(send, receive, stream_);
    for (int p = 0; p < size_; ++p) {
      expect(result(receive[static_cast<std::size_t>(p)]) == values(sent(p, rank_, kCpu), kCpu), "all_to_all");
    }
  }

  Communicator& comm_;
  StreamRef stream_;
  Faults& faults_;
  int rank_, size_;
  Shape part_, whole_;
  DType dtype_;
};

}  // namespace

void check_collectives(Communicator& communicator, StreamRef stream, Faults& faults) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64, DType::kInt64, DType::kInt32}) {
    for (const Shape& part : {Shape{3, 5}, Shape{1}, Shape{0, 4}, Shape{70, 33}}) {
      if (communicator.size() > 4 && part.elements() > 100) continue;  // each rank makes every other's input
      CollectiveCheck(communicator, stream, faults, part, dtype).run();
    }
  }
  communicator.barrier(stream);
}

TEST_CASE("ranks on threads exchange every dtype and shape, and hold the same bits", "[dist]") {
  for (const int size : {1, 2, 3, 4, 16}) {
    CAPTURE(size);
    check_on_threads(size, check_collectives);
  }
}

TEST_CASE("ranks on threads exchange CUDA tensors", "[gpu][dist]") {
  if (!have_gpu()) return;
  for (const int size : {2, 3}) check_on_threads(size, check_collectives, Device::cuda());
}

TEST_CASE("a sum over ranks is taken in their order and rounded once") {
  // In float32, ((1 + 2^-24) + 2^-24) + … never leaves 1; in the order of ranks with one rounding it does.
  const auto outcomes = outcomes_on_threads(4, {}, [](Communicator& communicator) {
    const float own = communicator.rank() == 0 ? 1.0f : 0x1p-24f;
    Tensor t = Tensor::from_host<float>({1}, std::vector<float>{own}, kCpu);
    communicator.all_reduce(t, ReduceOp::kSum, kCpu);
    if (t.to_vector<float>(kCpu)[0] != 1.0f + 0x1p-22f) throw std::runtime_error("another sum");
  });
  for (const std::string& outcome : outcomes) CHECK(outcome.empty());
}

namespace {

using std::chrono::milliseconds;

/// All ranks throw, and every text holds `named`.
void check_all_name(const std::vector<std::string>& outcomes, const std::string& named) {
  for (const std::string& outcome : outcomes) {
    CAPTURE(outcome);
    CHECK(outcome.find(named) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("threads that differ in count, dtype, operation or root all throw, naming the one that differs") {
  const auto reduce = [](Communicator& c, std::int64_t n, DType dtype, ReduceOp op) {
    Tensor t = Tensor::zeros({n}, dtype, kCpu);
    c.all_reduce(t, op, kCpu);
  };
  const auto outcomes = [&](const std::function<void(Communicator&)>& odd) {
    return outcomes_on_threads(3, {milliseconds(5000), false}, [&](Communicator& c) {
      reduce(c, 4, DType::kFloat32, ReduceOp::kSum);
      if (c.rank() == 1) {
        odd(c);
      } else {
        reduce(c, 8, DType::kFloat32, ReduceOp::kSum);
      }
    });
  };
  check_all_name(outcomes([&](Communicator& c) { reduce(c, 7, DType::kFloat32, ReduceOp::kSum); }),
                 "rank 1 called all_reduce(sum) of 7 float32 as operation 2");
  check_all_name(outcomes([&](Communicator& c) { reduce(c, 8, DType::kBFloat16, ReduceOp::kSum); }),
                 "rank 1 called all_reduce(sum) of 8 bfloat16");
  check_all_name(outcomes([&](Communicator& c) { reduce(c, 8, DType::kFloat32, ReduceOp::kMax); }),
                 "rank 1 called all_reduce(max)");
  check_all_name(outcomes([&](Communicator& c) { c.barrier(kCpu); }), "rank 1 called barrier");
}

TEST_CASE("an all-to-all whose two ends differ throws on all threads, naming both") {
  check_all_name(
      outcomes_on_threads(2, {milliseconds(5000), false},
                          [](Communicator& c) {
                            std::vector<Tensor> send, receive;
                            for (const std::int64_t n : {2, 3}) {
                              send.push_back(Tensor::zeros({2, n}, DType::kFloat32, kCpu));
                              receive.push_back(Tensor::zeros({2, c.rank() == 0 ? 2 : n}, DType::kFloat32, kCpu));
                            }
                            // The rank's own pair has to fit.
                            const auto own = static_cast<std::size_t>(c.rank());
                            receive[own] = Tensor::zeros(send[own].shape(), DType::kFloat32, kCpu);
                            c.all_to_all(send, receive, kCpu);
                          }),
      "sends 24 bytes to rank");
}

TEST_CASE("a thread that does not come in time, or leaves, makes the others throw and is named") {
  const auto begin = std::chrono::steady_clock::now();
  const CommunicatorOptions options{milliseconds(200), false};
  auto outcomes = outcomes_on_threads(3, options, [](Communicator& c) {
    if (c.rank() == 2) std::this_thread::sleep_for(milliseconds(1500));
    c.barrier(kCpu);
  });
  check_all_name(outcomes, "rank 2 did not come to barrier as operation 1 within 0.2 s");
  outcomes = outcomes_on_threads(3, {milliseconds(20000), false}, [](Communicator& c) {
    if (c.rank() == 1) throw std::runtime_error("rank 1 left: its own reason");
    c.barrier(kCpu);
  });
  check_all_name(outcomes, "rank 1 left");
  CHECK(std::chrono::steady_clock::now() - begin < milliseconds(10000));
}

TEST_CASE("a group of no threads is refused") { CHECK_THROWS_AS(make_thread_communicators(0), Error); }

}  // namespace rowan::test
