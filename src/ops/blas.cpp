#include "ops/blas.h"

#include "rowan_build_config.h"

#if ROWAN_HAVE_BLAS
#include <cblas.h>
#endif

namespace rowan::detail {

#if ROWAN_HAVE_BLAS

namespace {

/// Only the openmp variant sees that it runs inside a parallel region. The pthread variant would take all cores for
/// each of its callers, and cut sums by their number. Which one runs is known here alone: the system may exchange it.
bool leave_threads_to_callers() {
  if (openblas_get_parallel() == OPENBLAS_THREAD) openblas_set_num_threads(1);
  return true;
}

}  // namespace

bool have_blas() noexcept { return true; }

void sgemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
           const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  [[maybe_unused]] static const bool once = leave_threads_to_callers();
  cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(m), static_cast<blasint>(n), static_cast<blasint>(k), alpha, a,
              static_cast<blasint>(lda), b, static_cast<blasint>(ldb), beta, c, static_cast<blasint>(ldc));
}

#else

bool have_blas() noexcept { return false; }

void sgemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
           const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  for (std::int64_t i = 0; i < m; ++i) {
    float* const row = c + i * ldc;
    for (std::int64_t j = 0; j < n; ++j) row[j] = beta == 0 ? 0.0f : beta * row[j];
    for (std::int64_t l = 0; l < k; ++l) {
      const float scaled = alpha * (transpose_a ? a[l * lda + i] : a[i * lda + l]);
      if (transpose_b) {
        for (std::int64_t j = 0; j < n; ++j) row[j] += scaled * b[j * ldb + l];
      } else {
        for (std::int64_t j = 0; j < n; ++j) row[j] += scaled * b[l * ldb + j];
      }
    }
  }
}

#endif

}  // namespace rowan::detail
