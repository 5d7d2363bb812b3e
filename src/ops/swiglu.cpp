#include "rowan/ops/swiglu.h"

#include "ops/operands.h"
#include "ops/swiglu_backend.h"

namespace rowan {

namespace {

using namespace detail;

SwigluMatrix matrix(const Tensor& t) { return {t.raw(), t.stride(0)}; }

SwigluArguments check(const char* op, const Tensor& gate, const Tensor& up, StreamRef stream) {
  require_rank(op, "gate", gate, 2);
  require_compute(op, "gate", gate, stream);
  require_like(op, "up", up, gate.dtype(), gate.shape(), stream);
  SwigluArguments arguments;
  arguments.rows = gate.size(0);
  arguments.width = gate.size(1);
  arguments.dtype = gate.dtype();
  arguments.gate = matrix(gate);
  arguments.up = matrix(up);
  return arguments;
}

}  // namespace

void swiglu_forward(const Tensor& gate, const Tensor& up, Tensor& out, StreamRef stream) {
  const char* const op = "swiglu_forward";
  SwigluArguments arguments = check(op, gate, up, stream);
  require_like(op, "out", out, gate.dtype(), gate.shape(), stream);
  arguments.out = matrix(out);
  if (gate.elements() == 0) return;
  if (stream.device().is_cpu()) {
    cpu::swiglu_forward(arguments);
  } else {
    cuda::swiglu_forward(arguments, stream);
    record_uses(stream, {&gate, &up, &out});
  }
}

void swiglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up, Tensor& dgate, Tensor& dup,
                     StreamRef stream) {
  const char* const op = "swiglu_backward";
  SwigluArguments arguments = check(op, gate, up, stream);
  require_like(op, "dout", dout, gate.dtype(), gate.shape(), stream);
  require_like(op, "dgate", dgate, gate.dtype(), gate.shape(), stream);
  require_like(op, "dup", dup, gate.dtype(), gate.shape(), stream);
  arguments.dout = matrix(dout);
  arguments.dgate = matrix(dgate);
  arguments.dup = matrix(dup);
  if (gate.elements() == 0) return;
  if (stream.device().is_cpu()) {
    cpu::swiglu_backward(arguments);
  } else {
    cuda::swiglu_backward(arguments, stream);
    record_uses(stream, {&dout, &gate, &up, &dgate, &dup});
  }
}

}  // namespace rowan
