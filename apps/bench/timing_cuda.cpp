// Batches of calls as CUDA graphs.
#include <cuda_runtime.h>

#include "rowan/core/error.h"
#include "timing.h"

namespace rowan::bench {

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(ErrorKind::kCuda, std::string("rowan-bench: ") + what + ": " + cudaGetErrorString(status));
}

class GraphBatch final : public Batch {
 public:
  GraphBatch(const Timed& timed, int first, int calls, StreamRef stream)
      : stream_(static_cast<cudaStream_t>(stream.handle())) {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      for (int i = 0; i < calls; ++i) timed.run((first + i) % timed.rotations);
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph_);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~GraphBatch() override {
    cudaStreamSynchronize(stream_);
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  GraphBatch(const GraphBatch&) = delete;
  GraphBatch& operator=(const GraphBatch&) = delete;

  void launch() override { check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

  int launches() const override {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph_, nodes.data(), &count), "cudaGraphGetNodes");
    int work = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      work +=
          type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemcpy || type == cudaGraphNodeTypeMemset ? 1 : 0;
    }
    return work;
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<Batch> make_batch(const Timed& timed, int first, int calls, StreamRef stream) {
  return std::make_unique<GraphBatch>(timed, first, calls, stream);
}

}  // namespace rowan::bench
