#include "rowan/io/gguf.h"

#include <algorithm>
#include <bit>
#include <set>
#include <type_traits>

#include "core/check.h"
#include "io/json.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

using detail::quote;
using detail::require;

static_assert(std::endian::native == std::endian::little, "GGUF is little-endian, and values are copied as they are");

constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kAlignment = 32;  // what readers assume without general.alignment
constexpr std::size_t kMaxNameBytes = 63;
constexpr int kMaxRank = 4;

enum class ValueType : std::uint32_t { kUint32 = 4, kFloat32 = 6, kString = 8 };
enum class TensorType : std::uint32_t { kFloat32 = 0, kFloat16 = 1 };

std::uint64_t aligned(std::uint64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

std::uint64_t bytes_of(const GgufTensor& tensor) {
  return static_cast<std::uint64_t>(tensor.shape.elements()) * size_of(tensor.dtype);
}

/// Bytes of a header under construction.
class Bytes {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void put_string(const std::string& text) {
    put<std::uint64_t>(text.size());
    text_ += text;
  }
  void put_value(const GgufValue& value) {
    if (const auto* number = std::get_if<std::uint32_t>(&value)) {
      put(ValueType::kUint32);
      put(*number);
    } else if (const auto* real = std::get_if<float>(&value)) {
      put(ValueType::kFloat32);
      put(*real);
    } else {
      put(ValueType::kString);
      put_string(std::get<std::string>(value));
    }
  }
  void align() { text_.resize(aligned(text_.size()), '\0'); }
  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

void check(std::span<const std::pair<std::string, GgufValue>> metadata, std::span<const GgufTensor> tensors) {
  std::set<std::string> keys, names;
  for (const auto& [key, value] : metadata)
    require(!key.empty() && keys.insert(key).second, "write_gguf: expected metadata keys once each, got {}",
            quote(key));
  for (const GgufTensor& t : tensors) {
    require(!t.name.empty() && t.name.size() <= kMaxNameBytes, "write_gguf: expected names of 1 to {} bytes, got {}",
            kMaxNameBytes, quote(t.name));
    require(names.insert(t.name).second, "write_gguf: expected names once each, got {} twice", quote(t.name));
    require(t.dtype == DType::kFloat32 || t.dtype == DType::kFloat16,
            "write_gguf: expected {} in float32 or float16, got {}", quote(t.name), t.dtype);
    require(t.shape.rank() >= 1 && t.shape.rank() <= kMaxRank, "write_gguf: expected {} of rank 1 to {}, got shape {}",
            quote(t.name), kMaxRank, t.shape);
  }
}

std::string header_of(std::span<const std::pair<std::string, GgufValue>> metadata,
                      std::span<const GgufTensor> tensors) {
  Bytes header;
  for (const char c : {'G', 'G', 'U', 'F'}) header.put(c);
  header.put(kVersion);
  header.put<std::uint64_t>(tensors.size());
  header.put<std::uint64_t>(metadata.size());
  for (const auto& [key, value] : metadata) {
    header.put_string(key);
    header.put_value(value);
  }
  std::uint64_t offset = 0;
  for (const GgufTensor& t : tensors) {
    header.put_string(t.name);
    header.put(static_cast<std::uint32_t>(t.shape.rank()));
    for (int dim = t.shape.rank() - 1; dim >= 0; --dim) header.put(static_cast<std::uint64_t>(t.shape[dim]));
    header.put(t.dtype == DType::kFloat32 ? TensorType::kFloat32 : TensorType::kFloat16);
    header.put(offset);
    offset += aligned(bytes_of(t));
  }
  header.align();
  return header.text();
}

}  // namespace

void write_gguf(const std::filesystem::path& path, std::span<const std::pair<std::string, GgufValue>> metadata,
                std::span<const GgufTensor> tensors) {
  check(metadata, tensors);
  AtomicFile file(path);
  file.write(header_of(metadata, tensors));
  for (const GgufTensor& t : tensors) {
    const Tensor made = t.make();
    require(made.defined() && made.device().is_cpu() && made.is_contiguous() && made.shape() == t.shape &&
                made.dtype() == t.dtype,
            "write_gguf: expected {} as a contiguous CPU tensor of shape {} and dtype {}", quote(t.name), t.shape,
            t.dtype);
    file.write(made.raw(), bytes_of(t));
    file.write(std::string(aligned(bytes_of(t)) - bytes_of(t), '\0'));
  }
  file.commit();
}

}  // namespace rowan
