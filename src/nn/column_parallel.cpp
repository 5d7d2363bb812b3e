#include "rowan/nn/column_parallel.h"

#include "core/check.h"
#include "rowan/ops/elementwise.h"

namespace rowan {

namespace {

constexpr const char* kOp = "ColumnParallelLoraLinear";

std::vector<Parameter::Shard> shards_of(const std::vector<LinearPart>& parts, const Communicator& communicator) {
  std::vector<Parameter::Shard> shards;
  for (const LinearPart& part : parts) {
    detail::require(part.out_features >= communicator.size(),
                    "{}: expected \"{}\" with an output neuron a rank ({}), got {}", kOp, part.name,
                    communicator.size(), part.out_features);
    const bool drops_output =
        part.lora && part.lora->dropout > 0 && part.lora->dropout_place == LoraConfig::DropoutPlace::kOutput;
    if (drops_output)
      detail::fail(ErrorKind::kUnsupported, "{}: expected dropout of inputs for \"{}\", got dropout of outputs", kOp,
                   part.name);
    shards.push_back({part.out_features, part.out_features * communicator.rank() / communicator.size()});
  }
  return shards;
}

/// The parts as this rank holds them.
std::vector<LinearPart> local_parts(std::vector<LinearPart> parts, const Communicator& communicator) {
  for (LinearPart& part : parts) {
    const std::int64_t all = part.out_features, rank = communicator.rank(), ranks = communicator.size();
    part.out_features = all * (rank + 1) / ranks - all * rank / ranks;
  }
  return parts;
}

}  // namespace

ColumnParallelLoraLinear::ColumnParallelLoraLinear(std::int64_t in_features, const std::vector<LinearPart>& parts,
                                                   DType dtype, bool train_weight, Communicator& communicator,
                                                   StreamRef stream)
    : communicator_(&communicator),
      shards_(shards_of(parts, communicator)),
      local_(in_features, local_parts(parts, communicator), dtype, train_weight, stream) {}

void ColumnParallelLoraLinear::backward(const Tensor& dy, const LoraLinearContext& context, Tensor* dx,
                                        StreamRef stream, double dx_beta) const {
  if (dx == nullptr) return local_.backward(dy, context, nullptr, stream);
  const bool in_place = dx_beta == 0 && dx->is_contiguous();
  Tensor sum = in_place ? *dx : Tensor::empty(dx->shape(), dx->dtype(), stream);
  local_.backward(dy, context, &sum, stream);
  communicator_->all_reduce(sum, ReduceOp::kSum, stream);
  if (in_place) return;
  if (dx_beta == 0) return dx->copy_from(sum, stream);
  if (dx_beta != 1) scale(*dx, dx_beta, stream);
  add(*dx, sum, *dx, stream);
}

std::vector<Parameter> ColumnParallelLoraLinear::parameters() const {
  std::vector<Parameter> all = local_.parameters();
  std::size_t part = 0;
  for (Parameter& p : all) {
    while (p.name.rfind(local_.parts()[part].name + ".", 0) != 0) ++part;
    if (p.role != Parameter::Role::kLoraA) p.shard = shards_[part];
  }
  return all;
}

void sum_partial_gradients(std::span<const Parameter> parameters, Communicator& communicator, StreamRef stream) {
  std::vector<Tensor> gradients;
  std::int64_t elements = 0;
  for (const Parameter& p : parameters) {
    if (p.role != Parameter::Role::kLoraA || !p.grad.defined()) continue;
    const DType dtype = gradients.empty() ? p.grad.dtype() : gradients.front().dtype();
    detail::require_dtype("sum_partial_gradients", "every gradient", p.grad, dtype);
    gradients.push_back(p.grad);
    elements += p.grad.elements();
  }
  if (gradients.empty()) return;
  Tensor all = Tensor::empty({elements}, gradients.front().dtype(), stream);
  const auto for_each_piece = [&](const auto& f) {
    std::int64_t begin = 0;
    for (const Tensor& gradient : gradients) {
      const std::int64_t end = begin + gradient.elements();
      f(gradient, all.slice(0, begin, end).reshape(gradient.shape()));
      begin = end;
    }
  };
  for_each_piece([stream](const Tensor& gradient, const Tensor& piece) { piece.copy_from(gradient, stream); });
  communicator.all_reduce(all, ReduceOp::kSum, stream);
  for_each_piece([stream](const Tensor& gradient, const Tensor& piece) { gradient.copy_from(piece, stream); });
}

}  // namespace rowan
