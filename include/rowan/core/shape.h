// Extents of a tensor.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace rowan {

/// Up to five extents, each >= 0. A Shape of rank 0 has one element.
class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  /// Throws InvalidArgument for more than five extents, a negative one, or a product beyond 2^63 - 1.
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(std::span<const std::int64_t> extents);

  int rank() const noexcept { return rank_; }
  /// Extent of a dimension; negative indices count from the end. Throws InvalidArgument when out of range.
  std::int64_t operator[](int dim) const;
  std::int64_t elements() const noexcept;
  std::span<const std::int64_t> extents() const noexcept { return {extents_.data(), static_cast<std::size_t>(rank_)}; }
  /// A copy with one extent replaced.
  Shape with(int dim, std::int64_t extent) const;
  friend bool operator==(const Shape& a, const Shape& b) noexcept;

 private:
  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

/// "[2, 3]".
std::string to_string(const Shape& shape);

}  // namespace rowan
