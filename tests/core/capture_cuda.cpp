// Memory while a CUDA graph is captured.
#include <cuda_runtime.h>

#include "catch.h"
#include "core/cuda_check.h"
#include "rowan/core/tensor.h"
#include "support/device.h"

using namespace rowan;

TEST_CASE("a tensor from before a capture that is dropped in it returns its memory after the capture",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  Tensor before = Tensor::zeros({1024}, DType::kFloat32, stream);
  const void* address = before.raw();
  cudaGraph_t graph = nullptr;
  cuda::check(cudaStreamBeginCapture(cuda::to_cuda(stream), cudaStreamCaptureModeThreadLocal), "begin capture");
  {
    const Tensor inside = Tensor::zeros({256}, DType::kFloat32, stream);
    before = Tensor();
  }
  cuda::check(cudaStreamEndCapture(cuda::to_cuda(stream), &graph), "end capture");
  cudaGraphExec_t executable = nullptr;
  cuda::check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cuda::check(cudaGraphLaunch(executable, cuda::to_cuda(stream)), "launch");
  stream.synchronize();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  const Tensor first = Tensor::empty({1024}, DType::kFloat32, stream);  // frees what the capture could not
  const Tensor second = Tensor::empty({1024}, DType::kFloat32, stream);
  const bool reused = first.raw() == address || second.raw() == address;
  CHECK(reused);
}
