#include "rowan/core/shape.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace rowan {

Shape::Shape(std::initializer_list<std::int64_t> extents)
    : Shape(std::span<const std::int64_t>(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const std::int64_t> extents) {
  detail::require(extents.size() <= kMaxRank, "Shape: expected at most {} dimensions, got {}", kMaxRank,
                  extents.size());
  // The product is taken over non-zero extents, so that strides of an empty tensor stay representable too.
  std::int64_t product = 1;
  for (const std::int64_t extent : extents) {
    detail::require(extent >= 0, "Shape: expected extents >= 0, got {}", extent);
    if (extent == 0) continue;
    detail::require(product <= std::numeric_limits<std::int64_t>::max() / extent,
                    "Shape: expected fewer than 2^63 elements, got more");
    product *= extent;
  }
  std::copy(extents.begin(), extents.end(), extents_.begin());
  rank_ = static_cast<int>(extents.size());
}

std::int64_t Shape::operator[](int dim) const {
  const int index = dim < 0 ? dim + rank_ : dim;
  detail::require(index >= 0 && index < rank_, "Shape: expected a dimension of {}, got {}", to_string(*this), dim);
  return extents_[static_cast<std::size_t>(index)];
}

std::int64_t Shape::elements() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t extent : extents()) product *= extent;
  return product;
}

Shape Shape::with(int dim, std::int64_t extent) const {
  (*this)[dim];  // checks the index
  std::array<std::int64_t, kMaxRank> extents = extents_;
  extents[static_cast<std::size_t>(dim < 0 ? dim + rank_ : dim)] = extent;
  return Shape(std::span<const std::int64_t>(extents.data(), static_cast<std::size_t>(rank_)));
}

bool operator==(const Shape& a, const Shape& b) noexcept { return std::ranges::equal(a.extents(), b.extents()); }

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape.extents()) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

}  // namespace rowan
