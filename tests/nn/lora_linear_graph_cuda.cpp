// A LoRA layer recorded in a CUDA graph.
#include <cuda_runtime.h>

#include <optional>
#include <vector>

#include "catch.h"
#include "rowan/nn/lora_linear.h"
#include "rowan/ops/elementwise.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using namespace rowan::test;

namespace {

/// A recorded piece of work that can be launched again and again.
class Recording {
 public:
  template <class F>
  Recording(StreamRef stream, const F& work) : stream_(static_cast<cudaStream_t>(stream.handle())) {
    REQUIRE(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    work();
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(stream_, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&executable_, graph, 0) == cudaSuccess);
    cudaGraphDestroy(graph);
  }
  ~Recording() { cudaGraphExecDestroy(executable_); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  void replay() { REQUIRE(cudaGraphLaunch(executable_, stream_) == cudaSuccess); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

void check_replays(bool spare, DType dtype, StreamRef stream) {
  LoraConfig config;
  config.rank = 8;
  config.alpha = 16;
  config.dropout = 0.5;
  const LoraLinear layer(64, {{"q", 48, false, config}, {"k", 16, false, config}}, dtype, false, stream);
  for (const Parameter& p : layer.parameters()) {
    Tensor value = p.value;
    cast(random_normal(value.shape(), dtype, 3, stream), value, stream);
  }
  const std::int64_t slack = spare ? layer.slack_columns() : 0;
  const Tensor x = Tensor::empty_with_slack({40, 64}, slack, dtype, stream),
               dy = Tensor::empty_with_slack({40, 64}, slack, dtype, stream);
  x.copy_from(random_normal({40, 64}, dtype, 1, stream), stream);
  dy.copy_from(random_normal({40, 64}, dtype, 2, stream), stream);
  Tensor y = Tensor::empty({40, 64}, dtype, stream), dx = Tensor::empty({40, 64}, dtype, stream);
  const Tensor counter = Tensor::zeros({1}, DType::kInt64, stream);
  const auto work = [&](const DropoutKey& key) {
    for (const Parameter& p : layer.parameters()) {
      if (p.grad.defined()) p.grad.zero(stream);
    }
    LoraLinearContext context;
    layer.forward(x, y, context, stream, key);
    layer.backward(dy, context, &dx, stream);
  };
  const auto results = [&] {
    std::vector<std::vector<double>> all{values(y, stream), values(dx, stream)};
    for (const Parameter& p : layer.parameters()) {
      if (p.grad.defined()) all.push_back(values(p.grad, stream));
    }
    return all;
  };
  std::vector<std::vector<std::vector<double>>> direct;
  for (const std::uint64_t offset : {5, 6}) {
    work({1, offset});
    direct.push_back(results());
  }
  REQUIRE(direct[0] != direct[1]);
  Recording recording(stream, [&] { work({1, 4, counter}); });
  for (const std::int64_t step : {1, 2, 1}) {
    counter.copy_from(Tensor::from_host({1}, std::vector<std::int64_t>{step}, stream), stream);
    recording.replay();
    CHECK(results() == direct[static_cast<std::size_t>(step - 1)]);
  }
}

}  // namespace

TEST_CASE("replays of a recorded LoRA layer draw new dropout masks and equal the unrecorded runs", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check_replays(true, dtype, stream);
    check_replays(false, dtype, stream);
  }
}
