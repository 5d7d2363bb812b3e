#include "rowan/ops/attention_cached.h"

#include <cmath>
#include <limits>

#include "ops/attention_cached_backend.h"
#include "ops/operands.h"
#include "rowan/ops/attention.h"

namespace rowan {

namespace {

using namespace detail;

AttentionCachedArguments check(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Tensor& out,
                               StreamRef stream) {
  const char* const op = "attention_cached";
  require_rank(op, "q", q, 3);
  require_compute(op, "q", q, stream);
  require_rank(op, "k", k, 3);
  const std::int64_t heads = q.size(1), key_heads = k.size(1), head_dim = q.size(2);
  if (head_dim < 2 || head_dim % 2 != 0 || head_dim > kMaxAttentionHeadDim) {
    fail(ErrorKind::kUnsupported, "{}: expected an even head_dim in [2, {}], got {}", op, kMaxAttentionHeadDim,
         head_dim);
  }
  require(key_heads >= 1 && heads >= 1 && heads % key_heads == 0,
          "{}: expected the number of query heads to be a multiple of the key heads, got {} and {}", op, heads,
          key_heads);
  require(k.size(0) >= q.size(0), "{}: expected at least as many keys as queries, got {} and {}", op, k.size(0),
          q.size(0));
  require_like(op, "k", k, q.dtype(), {k.size(0), key_heads, head_dim}, stream);
  require_like(op, "v", v, q.dtype(), k.shape(), stream);
  require_like(op, "out", out, q.dtype(), q.shape(), stream);
  for (const Tensor* input : {&q, &k, &v})
    require(!out.overlaps(*input), "{}: expected out not to overlap an input", op);
  require(std::isfinite(scale), "{}: expected a finite scale, got {}", op, scale);
  require(q.size(0) * heads <= std::numeric_limits<std::int32_t>::max(),
          "{}: expected fewer than 2^31 queries times heads, got {} times {}", op, q.size(0), heads);

  AttentionCachedArguments arguments;
  arguments.queries = q.size(0);
  arguments.keys = k.size(0);
  arguments.query_heads = heads;
  arguments.key_heads = key_heads;
  arguments.head_dim = head_dim;
  arguments.scale = scale;
  arguments.dtype = q.dtype();
  arguments.q = head_view(q);
  arguments.k = head_view(k);
  arguments.v = head_view(v);
  arguments.out = head_view(out);
  return arguments;
}

}  // namespace

void attention_cached(const Tensor& q, const Tensor& k, const Tensor& v, double scale, Tensor& out, StreamRef stream) {
  const AttentionCachedArguments arguments = check(q, k, v, scale, out, stream);
  if (arguments.queries == 0) return;
  if (stream.device().is_cpu()) {
    cpu::attention_cached(arguments);
  } else {
    cuda::attention_cached(arguments, stream);
    record_uses(stream, {&q, &k, &v, &out});
  }
}

}  // namespace rowan
