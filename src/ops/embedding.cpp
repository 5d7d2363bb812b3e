#include "rowan/ops/embedding.h"

#include <limits>

#include "ops/embedding_backend.h"
#include "ops/operands.h"

namespace rowan {

namespace {

using namespace detail;

EmbeddingArguments check(const char* op, const Tensor& ids, const char* rows_name, const Tensor& rows,
                         const char* table_name, const Tensor& table, bool accumulates, StreamRef stream) {
  require_rank(op, "ids", ids, 1);
  require(ids.dtype() == DType::kInt32 || ids.dtype() == DType::kInt64,
          "{}: expected ids of dtype int32 or int64, got {}", op, ids.dtype());
  require_on(op, "ids", ids, stream);
  require_contiguous(op, "ids", ids);
  require_rank(op, rows_name, rows, 2);
  require_compute(op, rows_name, rows, stream);
  require(rows.size(0) == ids.size(0), "{}: expected {} with {} rows (one per id), got shape {}", op, rows_name,
          ids.size(0), rows.shape());
  require_rank(op, table_name, table, 2);
  require_like(op, table_name, table, accumulates ? accumulator_dtype(rows.dtype()) : rows.dtype(),
               {table.size(0), rows.size(1)}, stream);

  EmbeddingArguments arguments;
  arguments.ids = ids.raw();
  arguments.id_dtype = ids.dtype();
  arguments.tokens = ids.size(0);
  arguments.vocabulary = table.size(0);
  arguments.width = rows.size(1);
  arguments.dtype = rows.dtype();
  arguments.rows = rows.raw();
  arguments.rows_stride = rows.stride(0);
  arguments.table = table.raw();
  arguments.table_stride = table.stride(0);
  return arguments;
}

}  // namespace

void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y, StreamRef stream) {
  const EmbeddingArguments arguments = check("embedding_forward", ids, "y", y, "table", table, false, stream);
  if (arguments.tokens == 0 || arguments.width == 0) return;
  if (stream.device().is_cpu()) {
    cpu::embedding_forward(arguments);
  } else {
    cuda::embedding_forward(arguments, stream);
    record_uses(stream, {&ids, &table, &y});
  }
}

void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dtable, StreamRef stream) {
  const char* const op = "embedding_backward";
  const EmbeddingArguments arguments = check(op, ids, "dy", dy, "dtable", dtable, true, stream);
  if (arguments.tokens == 0 || arguments.width == 0) return;
  if (stream.device().is_cpu()) {
    cpu::embedding_backward(arguments);
  } else {
    constexpr std::int64_t limit = std::numeric_limits<std::int32_t>::max();
    require(arguments.tokens <= limit && arguments.vocabulary < limit,
            "{}: expected at most 2^31 - 1 ids and fewer table rows, got {} and {}", op, arguments.tokens,
            arguments.vocabulary);
    const std::size_t bytes = cuda::embedding_backward_workspace(arguments, stream);
    const Tensor workspace =
        Tensor::empty({static_cast<std::int64_t>(bytes / size_of(DType::kInt32)) + 1}, DType::kInt32, stream);
    cuda::embedding_backward(arguments, workspace.raw(), stream);
    record_uses(stream, {&ids, &dy, &dtable});
  }
}

}  // namespace rowan
