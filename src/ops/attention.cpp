#include "rowan/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention_backend.h"
#include "ops/operands.h"

namespace rowan {

namespace {

using namespace detail;

AttentionArguments check(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, const SequenceBatch& batch, double scale, StreamRef stream) {
  require_rank(op, "q", q, 3);
  require_compute(op, "q", q, stream);
  require_rank(op, "k", k, 3);
  const std::int64_t tokens = q.size(0), heads = q.size(1), key_heads = k.size(1), head_dim = q.size(2);
  if (head_dim < 2 || head_dim % 2 != 0 || head_dim > kMaxAttentionHeadDim) {
    fail(ErrorKind::kUnsupported, "{}: expected an even head_dim in [2, {}], got {}", op, kMaxAttentionHeadDim,
         head_dim);
  }
  require(key_heads >= 1 && heads >= 1 && heads % key_heads == 0,
          "{}: expected the number of query heads to be a multiple of the key heads, got {} and {}", op, heads,
          key_heads);
  require_like(op, "k", k, q.dtype(), {tokens, key_heads, head_dim}, stream);
  require_like(op, "v", v, q.dtype(), k.shape(), stream);
  require_like(op, "out", out, q.dtype(), q.shape(), stream);
  require_packed(op, "lse", lse, accumulator_dtype(q.dtype()), {heads, tokens}, stream);
  require_rank(op, "sequence starts", batch.starts, 1);
  require(batch.starts.size(0) >= 1, "{}: expected sequence starts of shape [S + 1], got {}", op, batch.starts.shape());
  require_packed(op, "sequence starts", batch.starts, DType::kInt32, {batch.starts.size(0)}, stream);
  require(batch.max_length >= 0, "{}: expected max_length >= 0, got {}", op, batch.max_length);
  require(tokens <= std::numeric_limits<std::int32_t>::max(), "{}: expected fewer than 2^31 tokens, got {}", op,
          tokens);
  require(std::isfinite(scale), "{}: expected a finite scale, got {}", op, scale);

  AttentionArguments arguments;
  arguments.tokens = tokens;
  arguments.query_heads = heads;
  arguments.key_heads = key_heads;
  arguments.head_dim = head_dim;
  arguments.starts = batch.starts.data<std::int32_t>();
  arguments.sequences = batch.starts.size(0) - 1;
  arguments.max_length = std::min(batch.max_length, tokens);
  arguments.scale = scale;
  arguments.dtype = q.dtype();
  arguments.q = head_view(q);
  arguments.k = head_view(k);
  arguments.v = head_view(v);
  arguments.out = head_view(out);
  arguments.lse = lse.raw();
  if (!stream.device().is_cpu()) return arguments;

  const std::int32_t* const starts = arguments.starts;
  require(starts[0] == 0, "{}: expected sequence starts to begin with 0, got {}", op, starts[0]);
  require(starts[arguments.sequences] == tokens, "{}: expected sequence starts to end with {} (tokens), got {}", op,
          tokens, starts[arguments.sequences]);
  for (std::int64_t s = 0; s < arguments.sequences; ++s) {
    const std::int64_t length = std::int64_t{starts[s + 1]} - starts[s];
    require(length >= 0 && length <= batch.max_length,
            "{}: expected sequence lengths in [0, {}] (max_length), got {} at index {}", op, batch.max_length, length,
            s);
  }
  return arguments;
}

}  // namespace

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const SequenceBatch& batch, double scale,
                       Tensor& out, Tensor& lse, StreamRef stream) {
  const AttentionArguments arguments = check("attention_forward", q, k, v, out, lse, batch, scale, stream);
  if (arguments.tokens == 0) return;
  if (stream.device().is_cpu()) {
    cpu::attention_forward(arguments);
  } else {
    cuda::attention_forward(arguments, stream);
    record_uses(stream, {&q, &k, &v, &batch.starts, &out, &lse});
  }
}

void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, const SequenceBatch& batch, double scale, Tensor& dq, Tensor& dk, Tensor& dv,
                        StreamRef stream) {
  const char* const op = "attention_backward";
  AttentionArguments arguments = check(op, q, k, v, out, lse, batch, scale, stream);
  require_like(op, "dout", dout, q.dtype(), q.shape(), stream);
  require_like(op, "dq", dq, q.dtype(), q.shape(), stream);
  require_like(op, "dk", dk, q.dtype(), k.shape(), stream);
  require_like(op, "dv", dv, q.dtype(), k.shape(), stream);
  if (arguments.tokens == 0) return;
  arguments.dout = head_view(dout);
  arguments.dq = head_view(dq);
  arguments.dk = head_view(dk);
  arguments.dv = head_view(dv);
  if (stream.device().is_cpu()) {
    cpu::attention_backward(arguments);
  } else {
    const Tensor delta = Tensor::empty(lse.shape(), DType::kFloat32, stream);
    arguments.delta = delta.raw();
    cuda::attention_backward(arguments, stream);
    record_uses(stream, {&dout, &q, &k, &v, &out, &lse, &batch.starts, &dq, &dk, &dv});
  }
}

}  // namespace rowan
