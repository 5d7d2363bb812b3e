// Times operations against each other in one run: interleaved, on rotating buffers, as medians.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rowan/core/stream.h"

namespace rowan::bench {

/// One thing to time. run(i) puts one call on buffers of rotation i, 0 <= i < rotations, into the stream; enough
/// rotations keep the data out of the L2 cache.
struct Timed {
  int rotations = 1;
  std::function<void(int)> run;
};

struct TimingOptions {
  int repeats = 30;  ///< samples a median is taken of
};

/// Microseconds a call: median, tenth and ninetieth percentile.
struct Sample {
  double median = 0, low = 0, high = 0;
  int launches = 0;  ///< kernels, copies and fills a call puts into the stream; 0 on the CPU
};

/// Times all of them in turns, `repeats` times over. On CUDA a sample is a graph of up to 20 calls (fewer where one
/// takes more than a millisecond), divided by their number, so launches from the host cost nothing; on the CPU one
/// call. Every rotation is called once before.
std::vector<Sample> time_interleaved(const std::vector<Timed>& timed, const TimingOptions& options, StreamRef stream);

/// The part of it that depends on the device: makes something that runs `calls` calls from rotation `first` on.
class Batch {
 public:
  virtual ~Batch() = default;
  virtual void launch() = 0;
  virtual int launches() const = 0;
};
std::unique_ptr<Batch> make_batch(const Timed& timed, int first, int calls, StreamRef stream);

}  // namespace rowan::bench
