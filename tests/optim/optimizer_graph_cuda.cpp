// Steps that are recorded once as a CUDA graph and replayed.
#include <cuda_runtime.h>

#include <limits>
#include <vector>

#include "catch.h"
#include "core/cuda_check.h"
#include "rowan/optim/optimizer.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using rowan::test::random_normal;
using rowan::test::values;

namespace {

/// What a stream was given between begin and end, to be launched again and again.
class RecordedWork {
 public:
  template <class F>
  RecordedWork(StreamRef stream, F&& work) {
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamBeginCapture(cuda::to_cuda(stream), cudaStreamCaptureModeThreadLocal), "begin capture");
    work();
    cuda::check(cudaStreamEndCapture(cuda::to_cuda(stream), &graph), "end capture");
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    cuda::check(status, "instantiate");
  }
  ~RecordedWork() { cudaGraphExecDestroy(executable_); }
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;
  void launch(StreamRef stream) const { cuda::check(cudaGraphLaunch(executable_, cuda::to_cuda(stream)), "launch"); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

std::vector<Parameter> two_parameters(StreamRef stream) {
  std::vector<Parameter> model(2);
  for (std::size_t i = 0; i < 2; ++i) {
    model[i].name = i == 0 ? "first" : "second";
    model[i].role = Parameter::Role::kEmbedding;
    model[i].trainable = true;
    model[i].value = random_normal({30, 17}, DType::kBFloat16, 1 + i, stream);
    model[i].grad = random_normal({30, 17}, DType::kFloat32, 3 + i, stream);
  }
  return model;
}

}  // namespace

TEST_CASE("on CUDA a recorded step uses the rates, flags and gradients of each replay", "[gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  SingleCommunicator single;
  OptimizerOptions options;
  options.groups = default_groups(Algorithm::kAdamW, 0.1);
  options.max_gradient_norm = 1;
  std::vector<Parameter> model = two_parameters(stream), twin = two_parameters(stream);
  const auto recorded = make_optimizer(options, model, stream);
  const auto plain = make_optimizer(options, twin, stream);
  recorded->step(model, {1e-2, 1.0}, stream, single);
  plain->step(twin, {1e-2, 1.0}, stream, single);
  const RecordedWork graph(stream, [&] { recorded->apply(model, stream, single); });
  for (int s = 1; s <= 4; ++s) {
    const StepValues step_values{0.02 * s, s % 2 == 0 ? 0.0 : 3.0};
    model[1].has_grad = twin[1].has_grad = s != 2;
    const float scale = s == 3 ? std::numeric_limits<float>::infinity() : 1.0f;  // the third one is skipped
    for (std::size_t i = 0; i < 2; ++i) {
      const Tensor g = random_normal({30, 17}, DType::kFloat32, static_cast<std::uint64_t>(10 * s) + i, stream, scale);
      model[i].grad.copy_from(g, stream);
      twin[i].grad.copy_from(g, stream);
    }
    recorded->stage(model, step_values, stream);
    graph.launch(stream);
    plain->step(twin, step_values, stream, single);
    for (std::size_t i = 0; i < 2; ++i) {
      CAPTURE(s, i);
      CHECK(values(model[i].value, stream) == values(twin[i].value, stream));
    }
    CHECK(recorded->report(stream).skipped == (s == 3));
  }
  const std::vector<NamedTensor> a = recorded->state(), b = plain->state();
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CAPTURE(a[i].name);
    CHECK(values(a[i].tensor, stream) == values(b[i].tensor, stream));
  }
}
