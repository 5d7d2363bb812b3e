#include "rowan/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/parallel.h"
#include "io/input_file.h"
#include "io/json.h"
#include "io/safetensors_header.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

using detail::fail;
using detail::quote;

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian and copied as they are");

constexpr std::int64_t kStagingBytes = std::int64_t{4} << 20;

std::int64_t bytes_of(std::int64_t elements, DType dtype) {
  return elements * static_cast<std::int64_t>(size_of(dtype));
}

/// Calls f(part) for views that cover `tensor` in row-major order, each of at most `max_elements` elements.
template <class F>
void for_each_part(const Tensor& tensor, std::int64_t max_elements, const F& f) {
  if (tensor.elements() == 0) return;
  if (tensor.elements() <= max_elements) return f(tensor);
  int dim = 0;
  while (tensor.size(dim) == 1) ++dim;
  const std::int64_t extent = tensor.size(dim);
  const std::int64_t step = std::max<std::int64_t>(1, max_elements / (tensor.elements() / extent));
  for (std::int64_t begin = 0; begin < extent; begin += step) {
    for_each_part(tensor.slice(dim, begin, std::min(begin + step, extent)), max_elements, f);
  }
}

/// Elements from one floating dtype to another, one rounding.
void convert(const std::byte* from, DType from_dtype, const Tensor& to) {
  detail::dispatch_floating(from_dtype, [&](auto from_tag) {
    using From = typename decltype(from_tag)::type;
    detail::dispatch_floating(to.dtype(), [&](auto to_tag) {
      using To = typename decltype(to_tag)::type;
      To* out = to.data<To>();
      detail::parallel_for(to.elements(), 1 << 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          From value;
          std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(From), sizeof(From));
          if constexpr (std::is_same_v<From, To>) {
            out[i] = value;
          } else if constexpr (std::is_same_v<From, double> || std::is_same_v<To, double>) {
            out[i] = static_cast<To>(static_cast<double>(value));
          } else {
            out[i] = static_cast<To>(static_cast<float>(value));
          }
        }
      });
    });
  });
}

}  // namespace

std::optional<DType> TensorInfo::tensor_dtype() const noexcept {
  if (dtype == "F64") return DType::kFloat64;
  if (dtype == "F32") return DType::kFloat32;
  if (dtype == "BF16") return DType::kBFloat16;
  if (dtype == "F16") return DType::kFloat16;
  if (dtype == "I64") return DType::kInt64;
  if (dtype == "I32") return DType::kInt32;
  return std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(std::make_shared<detail::InputFile>(path)) {
  std::string first(static_cast<std::size_t>(std::min<std::int64_t>(file_->size(), 64)), '\0');
  file_->read_at(0, first.data(), static_cast<std::int64_t>(first.size()));
  try {
    std::string json(static_cast<std::size_t>(detail::safetensors_header_length(first, file_->size(), path)), '\0');
    file_->read_at(detail::kHeaderLengthBytes, json.data(), static_cast<std::int64_t>(json.size()));
    auto header = detail::parse_safetensors_header(json, file_->size(), path);
    metadata_ = std::move(header.metadata);
    tensors_ = std::move(header.tensors);
  } catch (const Error& error) {
    throw Error(error.kind(), error.what() + detail::describe_content(first));
  }
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto place = std::ranges::lower_bound(tensors_, name, {}, &TensorInfo::name);
  return place != tensors_.end() && place->name == name ? &*place : nullptr;
}

const TensorInfo& SafetensorsFile::at(std::string_view name) const {
  if (const TensorInfo* info = find(name)) return *info;
  fail(ErrorKind::kFormat, "{}: holds no tensor {}", path_.string(), quote(name));
}

Tensor SafetensorsFile::load(std::string_view name, StreamRef stream) const {
  const auto dtype = at(name).tensor_dtype();
  if (!dtype)
    fail(ErrorKind::kUnsupported, "{}: tensor {}: dtype {} cannot be loaded", path_.string(), quote(name),
         at(name).dtype);
  return load(name, *dtype, stream);
}

Tensor SafetensorsFile::load(std::string_view name, DType dtype, StreamRef stream) const {
  const TensorInfo& info = at(name);
  if (info.shape.size() > Shape::kMaxRank) {
    fail(ErrorKind::kUnsupported, "{}: tensor {}: rank {} cannot be loaded (at most {})", path_.string(), quote(name),
         info.shape.size(), Shape::kMaxRank);
  }
  const Tensor tensor = Tensor::empty(Shape(std::span<const std::int64_t>(info.shape)), dtype, stream);
  load_into(name, tensor, stream);
  return tensor;
}

void SafetensorsFile::load_into(std::string_view name, const Tensor& dst, StreamRef stream) const {
  const TensorInfo& info = at(name);
  detail::require_defined("load_into", "dst", dst);
  if (!std::ranges::equal(info.shape, dst.shape().extents())) {
    fail(ErrorKind::kFormat, "{}: tensor {}: expected shape {}, got [{}]", path_.string(), quote(name), dst.shape(),
         fmt::join(info.shape, ", "));
  }
  const auto stored = info.tensor_dtype();
  if (!stored || (*stored != dst.dtype() && !(is_floating(*stored) && is_floating(dst.dtype())))) {
    fail(ErrorKind::kUnsupported, "{}: tensor {}: dtype {} cannot be loaded as {}", path_.string(), quote(name),
         info.dtype, dst.dtype());
  }

  const bool same = *stored == dst.dtype();
  const std::int64_t part_elements =
      kStagingBytes / static_cast<std::int64_t>(std::max(size_of(*stored), size_of(dst.dtype())));
  std::vector<std::byte> staging;
  std::int64_t offset = info.offset;
  for_each_part(dst, part_elements, [&](const Tensor& part) {
    const std::int64_t bytes = bytes_of(part.elements(), *stored);
    const bool direct = part.device().is_cpu() && part.is_contiguous();
    const Tensor host = direct ? part : Tensor::empty(part.shape(), dst.dtype(), StreamRef());
    if (same) {
      file_->read_at(offset, host.raw(), bytes);
    } else {
      staging.resize(static_cast<std::size_t>(bytes));
      file_->read_at(offset, staging.data(), bytes);
      convert(staging.data(), *stored, host);
    }
    if (!direct) part.copy_from(host, stream);
    offset += bytes;
  });
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata, StreamRef stream) {
  const detail::SafetensorsLayout layout = detail::make_safetensors_layout(tensors, metadata, path);
  AtomicFile file(path);
  std::array<char, detail::kHeaderLengthBytes> length{};
  for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(layout.header.size() >> (8 * i) & 0xFF);
  file.write(length.data(), length.size());
  file.write(layout.header);
  for (const std::size_t i : layout.order) {
    const Tensor& tensor = tensors[i].tensor;
    const std::int64_t part_elements = kStagingBytes / static_cast<std::int64_t>(size_of(tensor.dtype()));
    for_each_part(tensor, part_elements, [&](const Tensor& part) {
      Tensor host = part;
      if (part.device().is_cuda() || !part.is_contiguous()) {
        host = Tensor::empty(part.shape(), part.dtype(), StreamRef());
        host.copy_from(part, stream);
      }
      file.write(host.raw(), static_cast<std::size_t>(bytes_of(part.elements(), part.dtype())));
    });
  }
  file.commit();
}

namespace {

void copy_edited(const detail::InputFile& source, const TensorInfo& info, const RowEdit& edit, AtomicFile& to) {
  const DType dtype = *info.tensor_dtype();
  const std::int64_t rows = info.shape[0], row_bytes = bytes_of(info.shape[1], dtype);
  const std::int64_t step = std::max<std::int64_t>(1, kStagingBytes / std::max<std::int64_t>(1, row_bytes));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    const Tensor part = Tensor::empty({count, info.shape[1]}, dtype, StreamRef());
    source.read_at(info.offset + first * row_bytes, part.raw(), count * row_bytes);
    edit(first, part);
    to.write(part.raw(), static_cast<std::size_t>(count * row_bytes));
  }
}

}  // namespace

void copy_safetensors(const SafetensorsFile& source, const std::filesystem::path& path,
                      const std::map<std::string, RowEdit>& edits) {
  for (const auto& [name, edit] : edits) {
    const TensorInfo* info = source.find(name);
    detail::require(info != nullptr && info->shape.size() == 2 && info->tensor_dtype(),
                    "copy_safetensors: expected {} to hold a matrix {} of a dtype that can be loaded",
                    source.path().string(), quote(name));
  }
  std::vector<const TensorInfo*> order;
  for (const TensorInfo& info : source.tensors()) order.push_back(&info);
  std::ranges::sort(order, {}, [](const TensorInfo* info) { return std::pair(info->offset, info->bytes); });

  AtomicFile file(path);
  detail::copy_bytes(*source.file_, 0, order.empty() ? source.file_->size() : order[0]->offset, file);
  for (const TensorInfo* info : order) {
    const auto edit = edits.find(info->name);
    if (edit == edits.end()) {
      detail::copy_bytes(*source.file_, info->offset, info->bytes, file);
    } else {
      copy_edited(*source.file_, *info, edit->second, file);
    }
  }
  file.commit();
}

}  // namespace rowan
