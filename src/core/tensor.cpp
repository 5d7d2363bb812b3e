#include "rowan/core/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/runtime.h"

namespace rowan {

// Storage

Storage::Storage(std::size_t bytes, StreamRef stream)
    : allocator_(current_allocator(stream.device())), stream_(stream), bytes_(bytes) {
  data_ = static_cast<std::byte*>(allocator_->allocate(bytes, stream));
}

Storage::~Storage() {
  if (data_ == nullptr) return;
  for (const Use& use : uses_) {
    try {
      stream_.wait(use.event);
    } catch (...) {  // a use within a capture that has ended is the graph's to wait for; or the context is gone
    }
  }
  allocator_->deallocate(data_, bytes_, stream_);
}

void Storage::record_use(StreamRef stream) {
  if (stream == stream_ || stream.device().is_cpu()) return;
  const std::lock_guard lock(mutex_);
  const bool capturing = stream.capturing();
  for (Use& use : uses_) {
    if (use.stream == stream && use.capturing == capturing) {
      use.event.record(stream);
      return;
    }
  }
  uses_.push_back({stream, capturing, Event(stream.device())});
  uses_.back().event.record(stream);
}

std::shared_ptr<void> Storage::claim_slack() {
  const std::lock_guard lock(mutex_);
  if (!slack_claim_.expired()) return nullptr;
  auto claim = std::make_shared<char>();
  slack_claim_ = claim;
  return claim;
}

// Construction

namespace {

using Strides = std::array<std::int64_t, Shape::kMaxRank>;

Strides row_major(const Shape& shape, std::int64_t row_stride) {
  Strides strides{};
  std::int64_t stride = 1;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    strides[static_cast<std::size_t>(d)] = stride;
    if (d == 0) break;  // the product of all extents may be more than an integer holds
    // Extents of zero count as one, so that strides stay positive.
    stride *= d == shape.rank() - 1 ? row_stride : std::max<std::int64_t>(shape[d], 1);
  }
  return strides;
}

/// Bytes of so many elements. An allocator could not tell a size that has wrapped around from a small one.
std::size_t bytes_of(std::int64_t elements, DType dtype) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  if (elements > std::numeric_limits<std::int64_t>::max() / size)
    detail::fail(ErrorKind::kOutOfMemory, "allocate: {} elements of {} are more than any memory", elements, dtype);
  return static_cast<std::size_t>(elements * size);
}

std::int64_t last_extent(const Shape& shape) { return shape.rank() == 0 ? 1 : std::max<std::int64_t>(shape[-1], 1); }

/// Merges neighbouring dimensions that both sides walk as one and drops those of extent one.
cuda::StridedCopy plan_copy(const Tensor& destination, const Tensor* source) {
  cuda::StridedCopy copy;
  copy.destination = destination.raw();
  copy.source = source ? source->raw() : nullptr;
  copy.element_size = size_of(destination.dtype());
  for (int d = 0; d < destination.rank(); ++d) {
    const std::int64_t extent = destination.size(d);
    if (extent == 1) continue;
    const std::int64_t to = destination.stride(d), from = source ? source->stride(d) : to;
    if (copy.rank > 0) {
      const auto last = static_cast<std::size_t>(copy.rank - 1);
      if (copy.destination_strides[last] == to * extent && copy.source_strides[last] == from * extent) {
        copy.extents[last] *= extent;
        copy.destination_strides[last] = to;
        copy.source_strides[last] = from;
        continue;
      }
    }
    const auto next = static_cast<std::size_t>(copy.rank++);
    copy.extents[next] = extent;
    copy.destination_strides[next] = to;
    copy.source_strides[next] = from;
  }
  if (copy.rank == 0) {
    copy.rank = 1;
    copy.extents[0] = copy.destination_strides[0] = copy.source_strides[0] = 1;
  }
  return copy;
}

bool has_plain_rows(const cuda::StridedCopy& copy) {
  const auto last = static_cast<std::size_t>(copy.rank - 1);
  return copy.rank <= 2 && copy.destination_strides[last] == 1 && copy.source_strides[last] == 1;
}

void copy_on_host(const cuda::StridedCopy& copy, int dim, std::byte* to, const std::byte* from) {
  const auto d = static_cast<std::size_t>(dim);
  const auto size = static_cast<std::int64_t>(copy.element_size);
  const std::int64_t to_step = copy.destination_strides[d] * size, from_step = copy.source_strides[d] * size;
  const bool innermost = dim == copy.rank - 1;
  if (innermost && to_step == size && from_step == size) {
    const auto bytes = static_cast<std::size_t>(copy.extents[d] * size);
    if (from) {
      std::memmove(to, from, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
    return;
  }
  for (std::int64_t i = 0; i < copy.extents[d]; ++i) {
    std::byte* const target = to + i * to_step;
    const std::byte* const origin = from ? from + i * from_step : nullptr;
    if (!innermost) {
      copy_on_host(copy, dim + 1, target, origin);
    } else if (origin) {
      std::memcpy(target, origin, copy.element_size);
    } else {
      std::memset(target, 0, copy.element_size);
    }
  }
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, StreamRef stream) {
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.strides_ = row_major(shape, last_extent(shape));
  t.storage_ = std::make_shared<Storage>(bytes_of(shape.elements(), dtype), stream);
  return t;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, StreamRef stream) {
  Tensor t = empty(shape, dtype, stream);
  t.zero(stream);
  return t;
}

Tensor Tensor::empty_with_slack(const Shape& shape, std::int64_t slack_cols, DType dtype, StreamRef stream) {
  detail::require(shape.rank() >= 1 && slack_cols >= 0,
                  "empty_with_slack: expected rank >= 1 and slack >= 0, got shape {} and slack {}", shape, slack_cols);
  const std::int64_t cols = shape[-1];
  detail::require(slack_cols <= std::numeric_limits<std::int64_t>::max() - 63 - cols,
                  "empty_with_slack: expected fewer than 2^63 columns, got {} and a slack of {}", cols, slack_cols);
  const std::int64_t row_stride = (cols + slack_cols + 63) / 64 * 64;
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.strides_ = row_major(shape, row_stride);
  t.slack_ = row_stride - cols;
  t.storage_ = std::make_shared<Storage>(bytes_of(shape.with(-1, row_stride).elements(), dtype), stream);
  return t;
}

Tensor Tensor::from_host_bytes(const Shape& shape, DType dtype, const void* values, std::size_t bytes,
                               StreamRef stream) {
  const std::size_t expected = static_cast<std::size_t>(shape.elements()) * size_of(dtype);
  detail::require(bytes == expected, "from_host: expected {} bytes for shape {} of {}, got {}", expected, shape, dtype,
                  bytes);
  Tensor t = empty(shape, dtype, stream);
  if (bytes == 0) return t;
  if (stream.device().is_cpu()) {
    std::memcpy(t.raw(), values, bytes);
  } else {
    cuda::copy_rows({t.raw(), values, 1, 1, {static_cast<std::int64_t>(bytes)}, {1}, {1}}, stream);
    stream.synchronize();  // the caller may drop or rewrite page-locked values on return
  }
  return t;
}

// Queries

std::int64_t Tensor::stride(int dim) const {
  shape_[dim];  // checks the index
  return strides_[static_cast<std::size_t>(dim < 0 ? dim + rank() : dim)];
}

Device Tensor::device() const {
  detail::require(defined(), "Tensor::device: expected a tensor, got an undefined one");
  return storage_->device();
}

StreamRef Tensor::stream() const {
  detail::require(defined(), "Tensor::stream: expected a tensor, got an undefined one");
  return storage_->stream();
}

bool Tensor::is_contiguous() const noexcept {
  if (elements() == 0) return true;
  std::int64_t expected = 1;
  for (int d = rank() - 1; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    const std::int64_t extent = shape_.extents()[i];
    if (extent != 1 && strides_[i] != expected) return false;
    expected *= extent;
  }
  return true;
}

void* Tensor::raw() const noexcept {
  if (!storage_ || storage_->data() == nullptr) return nullptr;
  return storage_->data() + offset_ * static_cast<std::int64_t>(size_of(dtype_));
}

void Tensor::check_dtype(DType dtype) const {
  detail::require(defined() && dtype == dtype_, "Tensor::data: expected {}, got {}", dtype,
                  defined() ? to_string(dtype_) : "an undefined tensor");
}

// Views

Tensor Tensor::slice(int dim, std::int64_t begin, std::int64_t end) const {
  const std::int64_t extent = shape_[dim];
  detail::require(0 <= begin && begin <= end && end <= extent, "slice: expected a range of [0, {}), got [{}, {})",
                  extent, begin, end);
  Tensor view = *this;
  view.shape_ = shape_.with(dim, end - begin);
  if (begin != end) view.offset_ += begin * stride(dim);
  const bool last = dim == -1 || dim == rank() - 1;
  if (last && (end != extent || begin == end)) view.slack_ = 0;  // an empty view ends nowhere
  return view;
}

Tensor Tensor::select(int dim, std::int64_t i) const {
  const std::int64_t extent = shape_[dim];
  detail::require(0 <= i && i < extent, "select: expected an index of [0, {}), got {}", extent, i);
  const int position = dim < 0 ? dim + rank() : dim;
  Tensor view = *this;
  view.offset_ += i * stride(dim);
  std::array<std::int64_t, Shape::kMaxRank> extents{};
  std::size_t kept = 0;
  for (int d = 0; d < rank(); ++d) {
    if (d == position) continue;
    extents[kept] = size(d);
    view.strides_[kept] = stride(d);
    ++kept;
  }
  view.shape_ = Shape(std::span<const std::int64_t>(extents.data(), kept));
  if (position == rank() - 1) view.slack_ = 0;
  return view;
}

Tensor Tensor::transpose(int dim_a, int dim_b) const {
  Tensor view = *this;
  const auto a = static_cast<std::size_t>(dim_a < 0 ? dim_a + rank() : dim_a);
  const auto b = static_cast<std::size_t>(dim_b < 0 ? dim_b + rank() : dim_b);
  view.shape_ = shape_.with(dim_a, size(dim_b)).with(dim_b, size(dim_a));
  std::swap(view.strides_[a], view.strides_[b]);
  const auto last = static_cast<std::size_t>(rank() - 1);
  if (a != b && (a == last || b == last)) view.slack_ = 0;
  return view;
}

Tensor Tensor::reshape(const Shape& shape) const {
  detail::require(defined() && shape.elements() == elements(), "reshape: expected {} elements, got shape {}",
                  elements(), shape);
  Tensor view = *this;
  view.shape_ = shape;
  const bool same_rows = shape.rank() > 0 && rank() > 0 && shape[-1] == size(-1);
  if (!same_rows || elements() == 0) view.slack_ = 0;
  if (is_contiguous()) {
    view.strides_ = row_major(shape, last_extent(shape));
    return view;
  }
  // Old dimensions merge into evenly spaced runs; each new dimension must divide what is left of its run.
  const cuda::StridedCopy runs = plan_copy(*this, nullptr);
  auto run = static_cast<std::size_t>(runs.rank - 1);
  std::int64_t left = runs.extents[run], step = runs.destination_strides[run];
  for (int d = shape.rank() - 1; d >= 0; --d) {
    const std::int64_t extent = shape[d];
    if (left == 1 && extent != 1) {
      --run;
      left = runs.extents[run];
      step = runs.destination_strides[run];
    }
    detail::require(left % extent == 0, "reshape: expected strides that allow {} without a copy, got {} with gaps",
                    shape, shape_);
    view.strides_[static_cast<std::size_t>(d)] = step;
    step *= extent;
    left /= extent;
  }
  return view;
}

Tensor Tensor::with_slack(std::int64_t columns) const {
  detail::require(rank() >= 1 && 0 <= columns && columns <= slack_,
                  "with_slack: expected at most {} spare columns, got {}", slack_, columns);
  Tensor view = *this;
  view.shape_ = shape_.with(-1, size(-1) + columns);
  view.slack_ = slack_ - columns;
  return view;
}

Tensor Tensor::slack_view(std::int64_t columns) const {
  Tensor view = with_slack(columns);
  return view.slice(-1, size(-1), size(-1) + columns);
}

std::shared_ptr<void> Tensor::claim_slack() const { return storage_ && slack_ > 0 ? storage_->claim_slack() : nullptr; }

// Copies

Tensor Tensor::clone(StreamRef stream) const {
  detail::require(defined(), "clone: expected a tensor, got an undefined one");
  Tensor copy = empty(shape_, dtype_, stream);
  copy.copy_from(*this, stream);
  return copy;
}

Tensor Tensor::to(Device target, StreamRef stream) const {
  if (device() == target) return *this;
  Tensor copy = empty(shape_, dtype_, target.is_cpu() ? StreamRef() : stream);
  copy.copy_from(*this, stream);
  return copy;
}

void Tensor::copy_from(const Tensor& source, StreamRef stream) const {
  detail::require_defined("copy_from", "destination", *this);
  detail::require_shape("copy_from", "source", source, shape_);
  detail::require_dtype("copy_from", "source", source, dtype_);
  if (elements() == 0) return;
  const cuda::StridedCopy copy = plan_copy(*this, &source);
  const bool on_host = device().is_cpu() && source.device().is_cpu();
  if (on_host) {
    copy_on_host(copy, 0, static_cast<std::byte*>(copy.destination), static_cast<const std::byte*>(copy.source));
    return;
  }
  detail::require(stream.device().is_cuda(), "copy_from: expected a stream of the CUDA side, got one of {}",
                  stream.device());
  const bool crosses = device() != source.device();
  if (has_plain_rows(copy)) {
    cuda::copy_rows(copy, stream);
  } else if (!crosses) {
    cuda::copy_strided(copy, stream);
  } else {
    // Gather on the side of the source, move one block, scatter on the side of the destination.
    const Tensor packed =
        source.is_contiguous() ? source : source.clone(source.device().is_cpu() ? StreamRef() : stream);
    if (is_contiguous()) {
      cuda::copy_rows(plan_copy(*this, &packed), stream);
    } else {
      const Tensor arrived = packed.to(device(), stream);
      copy_from(arrived, stream);
    }
  }
  if (device().is_cpu() || source.device().is_cpu()) stream.synchronize();
  record_use(stream);
  source.record_use(stream);
}

void Tensor::zero(StreamRef stream) const {
  detail::require_on("zero", "tensor", *this, stream);
  if (elements() == 0) return;
  const cuda::StridedCopy copy = plan_copy(*this, nullptr);
  if (device().is_cpu()) {
    copy_on_host(copy, 0, static_cast<std::byte*>(copy.destination), nullptr);
  } else if (has_plain_rows(copy)) {
    cuda::copy_rows(copy, stream);
  } else {
    cuda::copy_strided(copy, stream);
  }
  record_use(stream);
}

void Tensor::to_host_bytes(void* values, StreamRef stream) const {
  if (elements() == 0) return;
  Tensor host = *this;
  if (device().is_cuda() || !is_contiguous()) {
    host = empty(shape_, dtype_, StreamRef());
    host.copy_from(*this, stream);
  }
  std::memcpy(values, host.raw(), static_cast<std::size_t>(elements()) * size_of(dtype_));
}

void Tensor::record_use(StreamRef stream) const {
  if (storage_) storage_->record_use(stream);
}

bool Tensor::overlaps(const Tensor& other) const noexcept {
  if (!shares_storage(other) || elements() == 0 || other.elements() == 0) return false;
  const auto span = [](const Tensor& t) {
    std::int64_t last = t.offset_;
    for (int d = 0; d < t.rank(); ++d)
      last += (t.shape_.extents()[static_cast<std::size_t>(d)] - 1) * t.strides_[static_cast<std::size_t>(d)];
    const auto size = static_cast<std::int64_t>(size_of(t.dtype_));
    return std::pair(t.offset_ * size, (last + 1) * size);
  };
  const auto [a_begin, a_end] = span(*this);
  const auto [b_begin, b_end] = span(other);
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace rowan
