#include "nn/host_values.h"

#include "rowan/ops/elementwise.h"

namespace rowan::detail {

void write_values_to(const Tensor& target, const std::vector<double>& values, StreamRef stream) {
  const Tensor host = Tensor::from_host(target.shape(), values, StreamRef());
  Tensor rounded = Tensor::empty(target.shape(), target.dtype(), StreamRef());
  cast(host, rounded, StreamRef());
  target.copy_from(rounded, stream);
}

std::vector<double> read_values(const Tensor& source, StreamRef stream) {
  Tensor wide = Tensor::empty(source.shape(), DType::kFloat64, StreamRef());
  cast(source.to(Device::cpu(), stream), wide, StreamRef());
  return wide.to_vector<double>(StreamRef());
}

}  // namespace rowan::detail
