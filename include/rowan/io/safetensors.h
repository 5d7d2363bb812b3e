// Safetensors files (Hugging Face): a JSON header that lists named tensors, then their bytes, little-endian and
// contiguous.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rowan/core/tensor.h"

namespace rowan {

namespace detail {
class InputFile;
}

/// One tensor of a file, as its header describes it.
struct TensorInfo {
  std::string name;
  std::string dtype;                ///< as the format spells it: "F32", "BF16", "U8", "F8_E4M3", …
  std::vector<std::int64_t> shape;  ///< at most 8 extents
  std::int64_t offset = 0;          ///< of the first byte, from the start of the file
  std::int64_t bytes = 0;

  /// The element type of a Tensor that holds it as stored; none for types that Tensor lacks (U8, F8_E4M3, …).
  std::optional<DType> tensor_dtype() const noexcept;
};

/// Changes rows of a matrix in place: rows [first_row, first_row + rows.size(0)) of it, on the CPU, in the stored
/// dtype.
using RowEdit = std::function<void(std::int64_t first_row, const Tensor& rows)>;

/// An open file whose header has been checked. Copies share the open file; const members may be called from several
/// threads.
///
/// The header must be at most 100,000,000 bytes and inside the file; strict JSON in UTF-8, at most 128 deep, without
/// duplicate keys; at most 131,072 tensors with names of at most 4 KiB and without NUL; spans that fit dtype and shape,
/// are contiguous from 0 and end with the file. Memory: a small multiple of the header. The file is read with pread,
/// never mapped, so a file that shrinks while it is read is an error, not a signal.
class SafetensorsFile {
 public:
  /// Throws Io when the file cannot be read and Format when it is not a valid file; the message names the file, the
  /// cause, and what the file looks like where that is plain (a zip archive, a git-lfs pointer, an HTML page, …).
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// The header's `__metadata__`; empty when there is none.
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Sorted by name.
  const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  /// Null when the file holds no tensor of that name.
  const TensorInfo* find(std::string_view name) const noexcept;
  /// Throws Format naming file and tensor when there is none.
  const TensorInfo& at(std::string_view name) const;

  /// A new contiguous tensor on the stream's device, in the dtype that is stored, or converted as load_into does.
  Tensor load(std::string_view name, StreamRef stream) const;
  Tensor load(std::string_view name, DType dtype, StreamRef stream) const;

  /// Overwrites `dst` (any strides, the shape that is stored) with a tensor of the file. Floating dtypes are converted
  /// to each other with one rounding; integers only load as they are. Reads through one bounded host buffer, and
  /// returns when the copy is done. Throws Format for another shape, Unsupported for a dtype that cannot be had, both
  /// before `dst` is touched; Io when the file has changed or cannot be read, which may leave `dst` partly written.
  void load_into(std::string_view name, const Tensor& dst, StreamRef stream) const;

 private:
  friend void copy_safetensors(const SafetensorsFile& source, const std::filesystem::path& path,
                               const std::map<std::string, RowEdit>& edits);

  std::filesystem::path path_;
  std::shared_ptr<const detail::InputFile> file_;
  std::map<std::string, std::string> metadata_;
  std::vector<TensorInfo> tensors_;
};

/// Writes a file atomically (see AtomicFile): tensors of any strides, on any device, contiguous in the file, ordered as
/// the reference implementation orders them (larger alignment first, then by name), with the header padded to a
/// multiple of 8. Equal inputs give equal bytes. `stream` belongs to the device of the tensors that are on CUDA. Throws
/// InvalidArgument for a duplicate or malformed name (see SafetensorsFile) or an undefined tensor, Io when writing
/// fails; the old file then stays.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata, StreamRef stream);

/// Writes a copy of a file atomically, with the same header, so that names, dtypes and order stay; the matrices named
/// in `edits` pass through their edit, a few rows at a time from the first to the last, everything else is copied as it
/// is. Memory: a few MiB, or one row where that is more. `path` is another file than `source`. Throws InvalidArgument
/// when `edits` names a tensor that `source` does not hold as a matrix of a dtype that Tensor has, before anything is
/// written; Io when reading or writing fails, and what an edit throws; the old file then stays.
void copy_safetensors(const SafetensorsFile& source, const std::filesystem::path& path,
                      const std::map<std::string, RowEdit>& edits);

}  // namespace rowan
