// A program outside rowan's tree that uses the installed library.
#include <cstdio>

#include "rowan/core/build_info.h"
#include "rowan/core/tensor.h"

int main() {
  const rowan::StreamRef cpu;
  const auto x = rowan::Tensor::from_host<float>({1, 2}, std::vector<float>{1, 2}, cpu);
  const auto values = x.clone(cpu).to_vector<float>(cpu);
  std::printf("rowan %s: %g %g\n", rowan::build_info().version.c_str(), values[0], values[1]);
  return values[1] == 2.0f ? 0 : 1;
}
