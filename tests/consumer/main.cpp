// A program outside rowan's tree: one LoRA forward with the installed library.
#include <cstdio>
#include <vector>

#include "rowan/core/build_info.h"
#include "rowan/ops/lora.h"

int main() {
  const rowan::StreamRef cpu;
  // y = 2 (x A^T) B^T with x = [[1, 2], [3, 4]], A = [[1, 1]], B = [[1], [10]].
  const auto x = rowan::Tensor::from_host<float>({2, 2}, std::vector<float>{1, 2, 3, 4}, cpu);
  const auto a = rowan::Tensor::from_host<float>({1, 2}, std::vector<float>{1, 1}, cpu);
  const auto b = rowan::Tensor::from_host<float>({2, 1}, std::vector<float>{1, 10}, cpu);
  const auto y = rowan::lora_forward(x, a, b, 2.0, cpu).to_vector<float>(cpu);
  std::printf("rowan %s: %g %g %g %g\n", rowan::build_info().version.c_str(), y[0], y[1], y[2], y[3]);
  return y == std::vector<float>{6, 60, 14, 140} ? 0 : 1;
}
