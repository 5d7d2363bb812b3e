#include "rowan/comm/communicator.h"

#include "core/check.h"

namespace rowan {

const char* to_string(ReduceOp op) noexcept { return op == ReduceOp::kSum ? "sum" : "max"; }

namespace {

void require_operand(const char* op, const char* name, const Tensor& t, StreamRef stream) {
  detail::require_contiguous(op, name, t);
  detail::require_on(op, name, t, stream);
}

/// whole [size * n, ..] beside part [n, ..], and part apart from whole or exactly the rank's rows of it.
void require_split(const char* op, const Tensor& whole, const Tensor& part, int rank, int size, StreamRef stream) {
  require_operand(op, "whole", whole, stream);
  require_operand(op, "part", part, stream);
  detail::require_dtype(op, "whole", whole, part.dtype());
  detail::require(part.rank() > 0, "{}: expected part of rank 1 or more, got shape {}", op, part.shape());
  const Shape expected = part.shape().with(0, part.size(0) * size);
  detail::require_shape(op, "whole", whole, expected);
  if (!whole.overlaps(part)) return;
  const std::int64_t begin = rank * part.size(0);
  const Tensor own = whole.slice(0, begin, begin + part.size(0));
  detail::require(own.raw() == part.raw(),
                  "{}: expected part apart from whole or as rows {} to {} of it, got another overlap", op, begin,
                  begin + part.size(0));
}

}  // namespace

void Communicator::all_reduce(Tensor& data, ReduceOp op, StreamRef stream) {
  require_operand("all_reduce", "data", data, stream);
  do_all_reduce(data, op, stream);
}

void Communicator::all_gather(const Tensor& part, Tensor& whole, StreamRef stream) {
  require_split("all_gather", whole, part, rank(), size(), stream);
  do_all_gather(part, whole, stream);
}

void Communicator::reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) {
  require_split("reduce_scatter", whole, part, rank(), size(), stream);
  do_reduce_scatter(whole, part, op, stream);
}

void Communicator::all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) {
  constexpr const char* kOp = "all_to_all";
  const auto count = static_cast<std::size_t>(size());
  detail::require(send.size() == count && receive.size() == count,
                  "{}: expected {} tensors to send and to receive, got {} and {}", kOp, count, send.size(),
                  receive.size());
  for (std::size_t p = 0; p < count; ++p) {
    require_operand(kOp, "every send", send[p], stream);
    require_operand(kOp, "every receive", receive[p], stream);
    for (std::size_t q = 0; q < count; ++q) {
      detail::require(
          !receive[p].overlaps(send[q]) && (p == q || !receive[p].overlaps(receive[q])),
          "{}: expected tensors to receive into that overlap no other, got an overlap of receive {} with tensor {}",
          kOp, p, q);
    }
  }
  const auto own = static_cast<std::size_t>(rank());
  detail::require_shape(kOp, "a rank's receive from itself", receive[own], send[own].shape());
  detail::require_dtype(kOp, "a rank's receive from itself", receive[own], send[own].dtype());
  do_all_to_all(send, receive, stream);
}

void Communicator::broadcast(Tensor& data, int root, StreamRef stream) {
  require_operand("broadcast", "data", data, stream);
  detail::require(0 <= root && root < size(), "broadcast: expected a root in [0, {}), got {}", size(), root);
  do_broadcast(data, root, stream);
}

void SingleCommunicator::do_all_reduce(Tensor&, ReduceOp, StreamRef) {}

void SingleCommunicator::do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) {
  if (!whole.overlaps(part)) whole.copy_from(part, stream);
}

void SingleCommunicator::do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp, StreamRef stream) {
  if (!whole.overlaps(part)) part.copy_from(whole, stream);
}

void SingleCommunicator::do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive,
                                       StreamRef stream) {
  receive[0].copy_from(send[0], stream);
}

void SingleCommunicator::do_broadcast(Tensor&, int, StreamRef) {}

}  // namespace rowan
