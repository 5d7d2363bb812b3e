#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/dropout_backend.h"

namespace rowan::cpu {

void dropout(const MatrixRef& x, const MaskArguments& mask, const MatrixRef& y) {
  detail::dispatch_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    detail::parallel_for(x.rows, 16, [&](std::int64_t begin, std::int64_t end) {
      MaskCursor cursor(mask);
      for (std::int64_t i = begin; i < end; ++i) {
        const T* const in = static_cast<const T*>(x.data) + i * x.row_stride;
        T* const out = static_cast<T*>(y.data) + i * y.row_stride;
        for (std::int64_t j = 0; j < x.cols; ++j) {
          const bool keep = !mask.active || cursor.keeps(static_cast<std::uint64_t>(i * x.cols + j));
          out[j] = keep ? detail::convert<T>(mask.factor * detail::convert<double>(in[j])) : T{};
        }
      }
    });
  });
}

}  // namespace rowan::cpu
