// A strided, typed view of shared device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rowan/core/allocator.h"
#include "rowan/core/dtype.h"
#include "rowan/core/shape.h"
#include "rowan/core/stream.h"

namespace rowan {

/// Owns one allocation and remembers the stream it was made on. The memory is returned in the order of that stream,
/// after the events of every other stream that record_use named. Tensors that existed before a CUDA graph was captured
/// and that it uses must outlive it.
class Storage {
 public:
  Storage(std::size_t bytes, StreamRef stream);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  StreamRef stream() const noexcept { return stream_; }
  Device device() const noexcept { return stream_.device(); }
  void record_use(StreamRef stream);
  /// See Tensor::claim_slack.
  std::shared_ptr<void> claim_slack();

 private:
  // An event recorded in a capture means nothing outside it, so eager uses of a stream have one of their own.
  struct Use {
    StreamRef stream;
    bool capturing = false;
    Event event;
  };

  AllocatorPtr allocator_;
  StreamRef stream_;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
  std::mutex mutex_;
  std::vector<Use> uses_;
  std::weak_ptr<void> slack_claim_;
};

/// Value type: shared storage + offset + shape + strides (in elements) + dtype. Copies and views share memory, const or
/// not: a const Tensor& is an input by convention. Nothing copies silently.
class Tensor {
 public:
  /// Undefined: no storage. defined() is false and every other query but shape() (rank 0) throws.
  Tensor() = default;

  /// Contiguous, uninitialised, on the stream's device.
  static Tensor empty(const Shape& shape, DType dtype, StreamRef stream);
  /// Contiguous, all bytes zero.
  static Tensor zeros(const Shape& shape, DType dtype, StreamRef stream);
  /// Rows (the last dimension) followed by at least `slack_cols` spare columns that with_slack can reach; the row
  /// stride is round_up(cols + slack_cols, 64) elements. Rank >= 1. Uninitialised.
  static Tensor empty_with_slack(const Shape& shape, std::int64_t slack_cols, DType dtype, StreamRef stream);
  /// A contiguous copy of host values on the stream's device. The values may be dropped on return.
  template <class T>
  static Tensor from_host(const Shape& shape, std::span<const T> values, StreamRef stream) {
    return from_host_bytes(shape, dtype_of<T>::value, values.data(), values.size() * sizeof(T), stream);
  }
  template <class T>
  static Tensor from_host(const Shape& shape, const std::vector<T>& values, StreamRef stream) {
    return from_host(shape, std::span<const T>(values), stream);
  }
  static Tensor from_host_bytes(const Shape& shape, DType dtype, const void* values, std::size_t bytes,
                                StreamRef stream);

  bool defined() const noexcept { return storage_ != nullptr; }
  const Shape& shape() const noexcept { return shape_; }
  int rank() const noexcept { return shape_.rank(); }
  /// Extent and stride (elements) of a dimension; negative indices count from the end.
  std::int64_t size(int dim) const { return shape_[dim]; }
  std::int64_t stride(int dim) const;
  std::int64_t elements() const noexcept { return shape_.elements(); }
  DType dtype() const noexcept { return dtype_; }
  Device device() const;
  /// The stream the storage was allocated on.
  StreamRef stream() const;
  bool is_contiguous() const noexcept;
  /// Spare columns behind each row (see empty_with_slack); 0 for every other tensor and for views that cut the last
  /// dimension.
  std::int64_t slack() const noexcept { return slack_; }

  /// Address of the first element. Throws InvalidArgument when T is not the dtype.
  template <class T>
  T* data() const {
    check_dtype(dtype_of<T>::value);
    return static_cast<T*>(raw());
  }
  /// Address of the first element, untyped; null for an undefined tensor.
  void* raw() const noexcept;

  // Views. They share storage; none copies.
  /// Elements [begin, end) of a dimension.
  Tensor slice(int dim, std::int64_t begin, std::int64_t end) const;
  /// Index `i` of a dimension, which goes away.
  Tensor select(int dim, std::int64_t i) const;
  Tensor transpose(int dim_a, int dim_b) const;
  /// The same elements in another shape of equal size, where strides allow it without a copy; otherwise throws
  /// InvalidArgument.
  Tensor reshape(const Shape& shape) const;
  /// The first `columns` spare columns joined to each row: last extent grows by that much. Throws when slack() is
  /// smaller.
  Tensor with_slack(std::int64_t columns) const;
  /// Only the first `columns` spare columns: shape [.., columns].
  Tensor slack_view(std::int64_t columns) const;
  /// Marks the spare columns of this storage as taken for as long as the returned token lives: who stores something in
  /// them holds it. Null while another token lives, and for a tensor without slack.
  std::shared_ptr<void> claim_slack() const;

  // Copies.
  /// A contiguous copy on the same device.
  Tensor clone(StreamRef stream) const;
  /// A contiguous copy on a device (this tensor itself when it is already there). `stream` belongs to the CUDA side of
  /// the copy; a result on the CPU is ready on return.
  Tensor to(Device device, StreamRef stream) const;
  /// Overwrites this tensor's elements with those of `source`: same shape and dtype, any strides, any two devices.
  /// Where one side is the CPU the call returns when the copy is done.
  void copy_from(const Tensor& source, StreamRef stream) const;
  /// Sets every element to zero.
  void zero(StreamRef stream) const;
  /// The elements in row-major order on the host; synchronizes.
  template <class T>
  std::vector<T> to_vector(StreamRef stream) const {
    check_dtype(dtype_of<T>::value);
    std::vector<T> values(static_cast<std::size_t>(elements()));
    to_host_bytes(values.data(), stream);
    return values;
  }

  /// Tells the storage that work on `stream` uses it; operations call this. No effect for the allocation's own stream.
  void record_use(StreamRef stream) const;
  /// True when the byte ranges that the two tensors span in one storage overlap.
  bool overlaps(const Tensor& other) const noexcept;
  bool shares_storage(const Tensor& other) const noexcept { return storage_ && storage_ == other.storage_; }

 private:
  void check_dtype(DType dtype) const;
  void to_host_bytes(void* values, StreamRef stream) const;

  std::shared_ptr<Storage> storage_;
  std::int64_t offset_ = 0;  // elements
  Shape shape_;
  std::array<std::int64_t, Shape::kMaxRank> strides_{};
  DType dtype_ = DType::kFloat32;
  std::int64_t slack_ = 0;
};

/// A tensor under its name in a file or a state ("model.norm.weight").
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

}  // namespace rowan
