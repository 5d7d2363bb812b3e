#include "timing.h"

#include <algorithm>
#include <numeric>

#include "rowan/core/error.h"

namespace rowan::bench {

namespace {

constexpr int kCalls = 20;
constexpr double kBatchMilliseconds = 20;

Sample summarize(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  const auto at = [&](double share) {
    return microseconds[static_cast<std::size_t>(share * static_cast<double>(microseconds.size() - 1) + 0.5)];
  };
  return {at(0.5), at(0.1), at(0.9), 0};
}

class CallBatch final : public Batch {
 public:
  CallBatch(const Timed& timed, int first, int calls) : timed_(timed), first_(first), calls_(calls) {}
  void launch() override {
    for (int i = 0; i < calls_; ++i) timed_.run((first_ + i) % timed_.rotations);
  }
  int launches() const override { return 0; }

 private:
  const Timed& timed_;
  int first_, calls_;
};

// A thing with its batches of calls, which walk through all rotations.
struct Runner {
  int calls = 1;
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<double> samples;
};

double milliseconds_a_call(const Timed& timed, StreamRef stream) {
  for (int i = 0; i < timed.rotations; ++i) timed.run(i);
  Event begin(stream.device(), true), end(stream.device(), true);
  begin.record(stream);
  timed.run(0);
  end.record(stream);
  end.synchronize();
  return begin.elapsed_ms(end);
}

Runner make_runner(const Timed& timed, StreamRef stream) {
  const double milliseconds = milliseconds_a_call(timed, stream);
  Runner runner;
  if (stream.device().is_cpu()) {
    for (int i = 0; i < timed.rotations; ++i) runner.batches.push_back(std::make_unique<CallBatch>(timed, i, 1));
    return runner;
  }
  runner.calls = std::clamp(static_cast<int>(kBatchMilliseconds / std::max(milliseconds, 1e-3)), 1, kCalls);
  const int batches = std::max(1, (timed.rotations + runner.calls - 1) / runner.calls);
  for (int i = 0; i < batches; ++i)
    runner.batches.push_back(make_batch(timed, i * runner.calls % timed.rotations, runner.calls, stream));
  return runner;
}

}  // namespace

std::vector<Sample> time_interleaved(const std::vector<Timed>& timed, const TimingOptions& options, StreamRef stream) {
  std::vector<Runner> runners;
  for (const Timed& one : timed) runners.push_back(make_runner(one, stream));
  std::vector<Event> begins, ends;
  for (std::size_t i = 0; i < timed.size(); ++i) {
    begins.emplace_back(stream.device(), true);
    ends.emplace_back(stream.device(), true);
  }
  for (int round = -1; round < options.repeats; ++round) {  // round -1 warms up
    for (std::size_t i = 0; i < runners.size(); ++i) {
      auto& batches = runners[i].batches;
      begins[i].record(stream);
      batches[static_cast<std::size_t>(round + 1) % batches.size()]->launch();
      ends[i].record(stream);
    }
    for (std::size_t i = 0; i < runners.size() && round >= 0; ++i) {
      ends[i].synchronize();
      runners[i].samples.push_back(begins[i].elapsed_ms(ends[i]) * 1000 / runners[i].calls);
    }
  }
  std::vector<Sample> samples;
  for (Runner& runner : runners) {
    samples.push_back(summarize(std::move(runner.samples)));
    samples.back().launches = runner.batches.front()->launches() / runner.calls;
  }
  return samples;
}

}  // namespace rowan::bench
