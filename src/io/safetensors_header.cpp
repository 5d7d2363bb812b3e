#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>

#include "io/input_file.h"
#include "io/json.h"

namespace rowan::detail {

namespace {

constexpr std::size_t kMaxTensors = 131'072;
constexpr std::size_t kMaxNameBytes = 4096;
constexpr std::size_t kMaxRank = 8;
constexpr const char* kMetadataKey = "__metadata__";

/// In the reference's order, which is also the order of tensors in a file, last first. F4 and F6 (packed below a byte)
/// are left out.
struct FileDType {
  std::string_view name;
  std::int64_t bytes;
};
constexpr FileDType kFileDTypes[] = {
    {"BOOL", 1},        {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1},
    {"F8_E5M2FNUZ", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},     {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},         {"C64", 8}, {"F64", 8}, {"I64", 8},     {"U64", 8}};

const char* file_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "F64";
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kInt64:
      return "I64";
    case DType::kInt32:
      return "I32";
  }
  return "";
}

std::size_t file_order(std::string_view dtype) {
  return static_cast<std::size_t>(std::ranges::find(kFileDTypes, dtype, &FileDType::name) - kFileDTypes);
}

const char* bad_name(std::string_view name) {
  if (name.size() > kMaxNameBytes) return "longer than 4096 bytes";
  if (name.find('\0') != name.npos) return "holds a NUL character";
  return nullptr;
}

/// Builds the list of tensors while the JSON is scanned, so that no document tree is held.
class HeaderScanner final : public JsonScanner {
 public:
  explicit HeaderScanner(const std::filesystem::path& path) : JsonScanner(path) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { return accept(Token::kNull); }
  bool boolean(bool) override { return accept(Token::kOther); }
  bool number_integer(number_integer_t) override { return accept(Token::kOther); }  // negative, also -0
  bool number_float(number_float_t, const string_t&) override { return accept(Token::kOther); }

  bool number_unsigned(number_unsigned_t value) override {
    accept(Token::kUnsigned);
    if (depth() != 3 || field_ == Field::kOther) return true;
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      fail_tensor(fmt::format("{} is too large", value));
    }
    auto& list = field_ == Field::kShape ? tensor_.shape : offsets_;
    if (list.size() == (field_ == Field::kShape ? kMaxRank : 2)) {
      fail_tensor(field_ == Field::kShape ? "shape has more than 8 extents" : "data_offsets has more than two values");
    }
    list.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    accept(Token::kString);
    if (depth() != 2) return true;
    if (in_metadata_) {
      header_.metadata[metadata_key_] = std::move(value);
    } else if (field_ == Field::kDType) {
      if (safetensors_element_bytes(value) == 0) fail_tensor(fmt::format("dtype {} is not supported", quote(value)));
      tensor_.dtype = value;
    }
    return true;
  }

  bool key(string_t& name) override {
    JsonScanner::key(name);
    if (depth() == 1) {
      in_metadata_ = name == kMetadataKey;
      tensor_.name = name;
    } else if (depth() == 2 && in_metadata_) {
      metadata_key_ = name;
    } else if (depth() == 2) {
      field_ = name == "dtype"          ? Field::kDType
               : name == "shape"        ? Field::kShape
               : name == "data_offsets" ? Field::kOffsets
                                        : Field::kOther;
      seen_[static_cast<std::size_t>(field_)] = true;
    }
    return true;
  }

  bool start_object(std::size_t size) override {
    accept(Token::kObject);
    JsonScanner::start_object(size);
    if (depth() == 2 && !in_metadata_) start_tensor();
    return true;
  }

  bool end_object() override {
    JsonScanner::end_object();
    if (depth() == 1 && !in_metadata_) end_tensor();
    return true;
  }

  bool start_array(std::size_t size) override {
    accept(Token::kArray);
    return JsonScanner::start_array(size);
  }

 private:
  enum class Token { kNull, kString, kUnsigned, kObject, kArray, kOther };
  enum class Field { kDType, kShape, kOffsets, kOther };

  /// Throws unless a value of this kind may stand here.
  bool accept(Token token) const {
    switch (depth()) {
      case 0:
        if (token != Token::kObject) fail("the header is not a JSON object");
        return true;
      case 1:
        if (token == Token::kObject || (in_metadata_ && token == Token::kNull)) return true;
        if (in_metadata_) fail("__metadata__ is not an object");
        fail_tensor("its description is not an object");
      case 2:
        if (in_metadata_ && token != Token::kString)
          fail(fmt::format("__metadata__ {} is not a string", quote(metadata_key_)));
        if (in_metadata_ || field_ == Field::kOther) return true;
        if (field_ == Field::kDType && token != Token::kString) fail_tensor("dtype is not a string");
        if (field_ == Field::kShape && token != Token::kArray) fail_tensor("shape is not an array");
        if (field_ == Field::kOffsets && token != Token::kArray) fail_tensor("data_offsets is not an array");
        return true;
      default:
        if (field_ == Field::kOther || token == Token::kUnsigned) return true;
        fail_tensor(field_ == Field::kShape ? "shape holds something else than integers >= 0"
                                            : "data_offsets holds something else than integers >= 0");
    }
  }

  void start_tensor() {
    if (header_.tensors.size() == kMaxTensors) fail(fmt::format("more than {} tensors", kMaxTensors));
    if (const char* why = bad_name(tensor_.name))
      fail(fmt::format("the name {} is refused: {}", quote(tensor_.name), why));
    std::ranges::fill(seen_, false);
    tensor_.shape.clear();
    offsets_.clear();
  }

  void end_tensor() {
    const auto seen = [this](Field field) { return seen_[static_cast<std::size_t>(field)]; };
    if (!seen(Field::kDType)) fail_tensor("dtype is missing");
    if (!seen(Field::kShape)) fail_tensor("shape is missing");
    if (!seen(Field::kOffsets)) fail_tensor("data_offsets is missing");
    if (offsets_.size() != 2) fail_tensor("data_offsets has fewer than two values");
    if (offsets_[1] < offsets_[0])
      fail_tensor(fmt::format("data_offsets [{}, {}] end before they begin", offsets_[0], offsets_[1]));
    tensor_.offset = offsets_[0];
    tensor_.bytes = offsets_[1] - offsets_[0];
    if (const auto needed = needed_bytes(); needed != tensor_.bytes) {
      fail_tensor(fmt::format("its shape needs {} bytes, data_offsets span {}", needed, tensor_.bytes));
    }
    header_.tensors.push_back(tensor_);
  }

  std::int64_t needed_bytes() const {
    std::int64_t product = safetensors_element_bytes(tensor_.dtype);
    bool empty = false;
    for (const std::int64_t extent : tensor_.shape) {
      if (extent == 0) {
        empty = true;
      } else if (__builtin_mul_overflow(product, extent, &product)) {
        fail_tensor("its shape is too large");
      }
    }
    return empty ? 0 : product;
  }

  [[noreturn]] void fail_tensor(const std::string& cause) const {
    fail(fmt::format("tensor {}: {}", quote(tensor_.name), cause));
  }

  SafetensorsHeader header_;
  bool in_metadata_ = false;
  std::string metadata_key_;
  TensorInfo tensor_;
  Field field_ = Field::kOther;
  bool seen_[4] = {};
  std::vector<std::int64_t> offsets_;
};

/// Spans must follow each other without holes from 0 and fill the file; then they become offsets from the start of the
/// file.
void place_spans(std::vector<TensorInfo>& tensors, std::int64_t data_start, std::int64_t file_bytes,
                 const std::filesystem::path& path) {
  std::ranges::sort(tensors, [](const TensorInfo& a, const TensorInfo& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  });
  std::int64_t end = 0;
  for (TensorInfo& tensor : tensors) {
    if (tensor.offset != end) {
      fail_format(path, fmt::format("tensor {}: its data begin at {}, expected {} (spans must be contiguous)",
                                    quote(tensor.name), tensor.offset, end));
    }
    if (tensor.bytes > file_bytes - data_start - end) {
      fail_format(path, fmt::format("tensor {}: its data end {} bytes behind the file's end (truncated?)",
                                    quote(tensor.name), tensor.bytes - (file_bytes - data_start - end)));
    }
    tensor.offset = data_start + end;
    end += tensor.bytes;
  }
  if (data_start + end != file_bytes) {
    fail_format(path, fmt::format("{} bytes follow the last tensor", file_bytes - data_start - end));
  }
}

}  // namespace

std::int64_t safetensors_element_bytes(std::string_view dtype) noexcept {
  const auto* found = std::ranges::find(kFileDTypes, dtype, &FileDType::name);
  return found == std::end(kFileDTypes) ? 0 : found->bytes;
}

std::int64_t safetensors_header_length(std::string_view first_bytes, std::int64_t file_bytes,
                                       const std::filesystem::path& path) {
  if (file_bytes < kHeaderLengthBytes)
    fail_format(path, fmt::format("{} bytes are too few for a safetensors file", file_bytes));
  std::uint64_t length = 0;
  for (int i = kHeaderLengthBytes - 1; i >= 0; --i) {
    length = length << 8 | static_cast<unsigned char>(first_bytes[static_cast<std::size_t>(i)]);
  }
  if (length > kMaxHeaderBytes)
    fail_format(path, fmt::format("header length {} is above the limit of {}", length, kMaxHeaderBytes));
  if (static_cast<std::int64_t>(length) > file_bytes - kHeaderLengthBytes) {
    fail_format(path, fmt::format("header length {} passes the end of the file ({} bytes)", length, file_bytes));
  }
  return static_cast<std::int64_t>(length);
}

SafetensorsHeader parse_safetensors_header(std::string_view json, std::int64_t file_bytes,
                                           const std::filesystem::path& path) {
  HeaderScanner scanner(path);
  scanner.scan(json);
  SafetensorsHeader header = scanner.take();
  place_spans(header.tensors, kHeaderLengthBytes + static_cast<std::int64_t>(json.size()), file_bytes, path);
  std::ranges::sort(header.tensors, {}, &TensorInfo::name);
  return header;
}

std::string describe_content(std::string_view first_bytes) {
  std::string text(first_bytes.substr(0, 64));
  text.erase(0, text.find_first_not_of(" \t\r\n"));
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (first_bytes.starts_with("version https://git-lfs"))
    return " (it looks like a git-lfs pointer: the file itself was not fetched, see `git lfs pull`)";
  if (first_bytes.starts_with("PK\x03\x04")) return " (it looks like a zip archive, such as a PyTorch checkpoint)";
  if (first_bytes.starts_with("\x80\x02")) return " (it looks like a Python pickle)";
  if (first_bytes.starts_with("GGUF")) return " (it looks like a GGUF file)";
  if (text.starts_with("<!doctype html") || text.starts_with("<html"))
    return " (it looks like an HTML page: a failed download?)";
  return "";
}

SafetensorsLayout make_safetensors_layout(std::span<const NamedTensor> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          const std::filesystem::path& path) {
  const auto refuse = [&](std::string_view name, const char* why) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: cannot write tensor {}: {}", path.string(), quote(name), why));
  };
  if (tensors.size() > kMaxTensors) refuse(tensors[kMaxTensors].name, "more than 131072 tensors");
  std::unordered_set<std::string_view> names;
  for (const NamedTensor& t : tensors) {
    if (const char* why = bad_name(t.name)) refuse(t.name, why);
    if (t.name == kMetadataKey) refuse(t.name, "the name is reserved");
    if (!t.tensor.defined()) refuse(t.name, "it is undefined");
    if (!names.insert(t.name).second) refuse(t.name, "duplicate name");
  }

  SafetensorsLayout layout;
  layout.order.resize(tensors.size());
  std::iota(layout.order.begin(), layout.order.end(), std::size_t{0});
  std::ranges::sort(layout.order, [&](std::size_t a, std::size_t b) {
    const auto rank = [&](std::size_t i) { return file_order(file_dtype(tensors[i].tensor.dtype())); };
    return rank(a) != rank(b) ? rank(a) > rank(b) : tensors[a].name < tensors[b].name;
  });

  try {
    const auto json = [](const std::string& text) { return nlohmann::json(text).dump(); };
    std::vector<std::string> members;
    if (!metadata.empty()) members.push_back(fmt::format("\"{}\":{}", kMetadataKey, nlohmann::json(metadata).dump()));
    std::int64_t begin = 0;
    for (const std::size_t i : layout.order) {
      const Tensor& tensor = tensors[i].tensor;
      const std::int64_t end = begin + tensor.elements() * static_cast<std::int64_t>(size_of(tensor.dtype()));
      members.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json(tensors[i].name),
                                    file_dtype(tensor.dtype()), fmt::join(tensor.shape().extents(), ","), begin, end));
      begin = end;
    }
    layout.header = fmt::format("{{{}}}", fmt::join(members, ","));
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: a tensor name or metadata value is not valid UTF-8", path.string()));
  }
  layout.header.append((8 - layout.header.size() % 8) % 8, ' ');
  if (layout.header.size() > kMaxHeaderBytes) refuse("", "the header would be larger than 100,000,000 bytes");
  return layout;
}

}  // namespace rowan::detail
