#include "rowan/io/safetensors.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "catch.h"
#include "io/safetensors_header.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/files.h"

namespace rowan {

using test::data_path;
using test::read_file;
using test::ScratchDirectory;
using test::write_file;

namespace {

/// The message of the Error that opening the file throws; empty when it opens.
std::string why_refused(const std::filesystem::path& path, ErrorKind expected = ErrorKind::kFormat) {
  try {
    SafetensorsFile file(path);
    return "";
  } catch (const Error& error) {
    CHECK(error.kind() == expected);
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

/// A file with this JSON as header and so many zero bytes of data.
std::string make_file(const std::string& json, std::size_t data_bytes) {
  std::string content(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) content[i] = static_cast<char>(json.size() >> (8 * i) & 0xFF);
  return content + json + std::string(data_bytes, '\0');
}

std::vector<NamedTensor> sample_tensors(StreamRef stream) {
  return {{"a", test::random_normal({3, 5}, DType::kFloat32, 1, stream)},
          {"b", test::random_normal({7}, DType::kBFloat16, 2, stream)},
          {"c", test::random_normal({2, 3, 2}, DType::kFloat16, 3, stream)},
          {"scalar", Tensor::from_host(Shape{}, std::vector<std::int64_t>{-5}, stream)},
          {"empty", Tensor::empty({0, 4}, DType::kFloat32, stream)},
          {"ids", Tensor::from_host({3}, std::vector<std::int32_t>{1, 2, 3}, stream)}};
}

}  // namespace

TEST_CASE("every safetensors case file gets the verdict of its table", "[io]") {
  std::istringstream table(read_file(data_path("safetensors_cases/verdicts.tsv")));
  std::string line;
  std::getline(table, line);  // the heading
  int cases = 0;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string name, expected;
    fields >> name >> expected;
    const std::string why = why_refused(data_path("safetensors_cases") / name);
    CAPTURE(name, expected, why);
    CHECK((expected == "ACCEPT") == why.empty());
    if (!why.empty()) {
      CHECK(contains(why, name));  // names the file
      CHECK(why.size() < 1000);
    }
    ++cases;
  }
  CHECK(cases == 78);
}

TEST_CASE("a refused safetensors file says what it looks like", "[io]") {
  CHECK(contains(why_refused(data_path("safetensors_cases/r73_pickle_zip")), "zip archive"));
  CHECK(contains(why_refused(data_path("safetensors_cases/r74_git_lfs_pointer")), "git-lfs pointer"));
  ScratchDirectory scratch;
  write_file(scratch / "page", "\n<!DOCTYPE html><html><body>404</body></html>");
  CHECK(contains(why_refused(scratch / "page"), "HTML page"));
  write_file(scratch / "pickle", std::string("\x80\x02}q\x01X\x05\x00\x00\x00", 10) + std::string(100, 'x'));
  CHECK(contains(why_refused(scratch / "pickle"), "pickle"));
}

TEST_CASE("opening something that is not a regular file is an I/O error", "[io]") {
  ScratchDirectory scratch;
  CHECK(contains(why_refused(scratch / "absent", ErrorKind::kIo), "No such file"));
  CHECK(contains(why_refused(scratch.path(), ErrorKind::kIo), "directory"));
  CHECK(contains(why_refused("/dev/zero", ErrorKind::kIo), "regular file"));
}

TEST_CASE("every prefix of a valid safetensors file is rejected", "[io]") {
  ScratchDirectory scratch;
  write_safetensors(scratch / "whole", sample_tensors(StreamRef()), {{"format", "pt"}}, StreamRef());
  const std::string whole = read_file(scratch / "whole");
  const auto path = scratch / "prefix";
  write_file(path, whole);
  for (std::size_t size = whole.size(); size-- > 0;) {
    REQUIRE(::truncate(path.c_str(), static_cast<off_t>(size)) == 0);
    CAPTURE(size);
    REQUIRE_FALSE(why_refused(path).empty());
  }
}

TEST_CASE("every flipped bit of a safetensors header is rejected or leaves all tensors inside the file", "[io]") {
  ScratchDirectory scratch;
  write_safetensors(scratch / "whole", sample_tensors(StreamRef()), {{"format", "pt"}}, StreamRef());
  const std::string whole = read_file(scratch / "whole");
  const auto file_bytes = static_cast<std::int64_t>(whole.size());
  const std::int64_t header_bytes = 8 + detail::safetensors_header_length(whole, file_bytes, "whole");
  int accepted = 0;
  for (std::int64_t bit = 0; bit < 8 * header_bytes; ++bit) {
    std::string flipped = whole;
    flipped[static_cast<std::size_t>(bit / 8)] =
        static_cast<char>(flipped[static_cast<std::size_t>(bit / 8)] ^ (1 << bit % 8));
    try {
      const auto length = detail::safetensors_header_length(flipped, file_bytes, "flipped");
      const auto header = detail::parse_safetensors_header(
          std::string_view(flipped).substr(8, static_cast<std::size_t>(length)), file_bytes, "flipped");
      ++accepted;
      for (const TensorInfo& tensor : header.tensors) {
        REQUIRE(tensor.offset >= 8 + length);
        REQUIRE(tensor.bytes >= 0);
        REQUIRE(tensor.offset + tensor.bytes <= file_bytes);
      }
    } catch (const Error& error) {
      REQUIRE(error.kind() == ErrorKind::kFormat);
    }
  }
  CHECK(accepted > 0);  // flips inside names and metadata are valid headers
}

TEST_CASE("safetensors limits on rank, names, depth and number of tensors are enforced", "[io]") {
  ScratchDirectory scratch;
  const auto refused = [&](const std::string& json, std::size_t data_bytes = 0) {
    write_file(scratch / "file", make_file(json, data_bytes));
    return why_refused(scratch / "file");
  };
  CHECK(refused(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1).empty());
  CHECK(
      contains(refused(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1), "more than 8"));
  const auto named = [](std::size_t bytes) {
    return R"({")" + std::string(bytes, 'n') + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  };
  CHECK(refused(named(4096), 1).empty());
  CHECK(contains(refused(named(4097), 1), "longer than 4096"));
  const auto nested = [](std::size_t levels) {
    return R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":)" + std::string(levels - 2, '[') +
           std::string(levels - 2, ']') + "}}";
  };
  CHECK(refused(nested(128), 1).empty());
  CHECK(contains(refused(nested(129), 1), "128 levels"));
  const auto many = [](int count) {
    std::string json = "{";
    for (int i = 0; i < count; ++i)
      json += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    return json + "}";
  };
  CHECK(refused(many(131072)).empty());
  CHECK(contains(refused(many(131073)), "131072"));
  CHECK(contains(refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":1,"y":2}}})", 1),
                 "duplicate key"));
}

TEST_CASE("a header length is refused above the limit even where the file is that large", "[io]") {
  ScratchDirectory scratch;
  std::string start(8, '\0');
  const std::uint64_t length = 100'000'001;
  std::memcpy(start.data(), &length, 8);
  write_file(scratch / "file", start);
  REQUIRE(::truncate((scratch / "file").c_str(), 200'000'000) == 0);  // sparse
  CHECK(contains(why_refused(scratch / "file"), "limit"));
}

TEST_CASE("tensors come back from a safetensors file bit for bit", "[io]") {
  ScratchDirectory scratch;
  const auto tensors = sample_tensors(StreamRef());
  write_safetensors(scratch / "file", tensors, {{"format", "pt"}, {"note", "a \"quoted\"\nline, \u00e9"}}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  CHECK(file.metadata().at("note") == "a \"quoted\"\nline, \u00e9");
  CHECK(file.tensors().size() == tensors.size());
  for (const NamedTensor& t : tensors) {
    CAPTURE(t.name);
    const Tensor loaded = file.load(t.name, StreamRef());
    CHECK(loaded.shape() == t.tensor.shape());
    CHECK(loaded.dtype() == t.tensor.dtype());
    CHECK(test::values(loaded, StreamRef()) == test::values(t.tensor, StreamRef()));
  }
  CHECK(file.find("absent") == nullptr);
  REQUIRE_THROWS_AS(file.load("absent", StreamRef()), Error);
}

TEST_CASE("safetensors are written aligned, in the reference's order, with equal bytes each time", "[io]") {
  ScratchDirectory scratch;
  auto tensors = sample_tensors(StreamRef());
  write_safetensors(scratch / "one", tensors, {{"b", "1"}, {"a", "2"}}, StreamRef());
  std::swap(tensors[0], tensors[4]);
  write_safetensors(scratch / "two", tensors, {{"a", "2"}, {"b", "1"}}, StreamRef());
  const std::string content = read_file(scratch / "one");
  CHECK(content == read_file(scratch / "two"));
  const auto place = [&](const std::string& name) { return content.find("\"" + name + "\":{"); };
  CHECK(place("scalar") < place("a"));  // I64, F32, F32 by name, I32, BF16, F16
  CHECK(place("a") < place("empty"));
  CHECK(place("empty") < place("ids"));
  CHECK(place("ids") < place("b"));
  CHECK(place("b") < place("c"));
  const SafetensorsFile file(scratch / "one");
  for (const TensorInfo& tensor : file.tensors()) {
    CHECK(tensor.offset % static_cast<std::int64_t>(size_of(*tensor.tensor_dtype())) == 0);
  }
}

TEST_CASE("a file of the Python implementation is written again byte for byte", "[io]") {
  const auto path = data_path("models/llama/adapter/adapter_model.safetensors");
  const SafetensorsFile file(path);
  std::vector<NamedTensor> tensors;
  for (const TensorInfo& tensor : file.tensors()) tensors.push_back({tensor.name, file.load(tensor.name, StreamRef())});
  ScratchDirectory scratch;
  write_safetensors(scratch / "copy", tensors, file.metadata(), StreamRef());
  CHECK(read_file(scratch / "copy") == read_file(path));
}

TEST_CASE("write_safetensors takes strided views and loads into them", "[io]") {
  ScratchDirectory scratch;
  const Tensor wide = test::random_normal({6, 10}, DType::kFloat32, 4, StreamRef());
  const Tensor inner = wide.slice(0, 1, 5).slice(1, 2, 9);
  write_safetensors(scratch / "file", std::vector<NamedTensor>{{"view", inner}, {"transposed", wide.transpose(0, 1)}},
                    {}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  CHECK(test::values(file.load("view", StreamRef()), StreamRef()) == test::values(inner, StreamRef()));
  CHECK(test::values(file.load("transposed", StreamRef()), StreamRef()) ==
        test::values(wide.transpose(0, 1), StreamRef()));

  const DType dtype = GENERATE(DType::kFloat32, DType::kBFloat16, DType::kFloat64);
  const Tensor target = Tensor::zeros({6, 10}, dtype, StreamRef());
  const Tensor border = target.slice(0, 1, 5).slice(1, 2, 9);
  file.load_into("view", border, StreamRef());
  CHECK(test::values(border, StreamRef()) ==
        test::values(test::convert(inner, dtype, StreamRef(), StreamRef()), StreamRef()));
  double outside = 0;
  for (const double v : test::values(target, StreamRef())) outside += std::abs(v);
  for (const double v : test::values(border, StreamRef())) outside -= std::abs(v);
  CHECK(std::abs(outside) < 1e-9);
}

TEST_CASE("loading converts between floating dtypes with one rounding", "[io]") {
  ScratchDirectory scratch;
  const double infinity = std::numeric_limits<double>::infinity();
  // The second value is just above the middle of two bfloat16 and two float16 neighbours: rounding through float first
  // loses that.
  const std::vector<double> numbers = {
      0.0, 1.00390625 + 0x1p-40, 1.00048828125 + 0x1p-40, -3.3e38, 1e-7, 65519.9, 65520, infinity};
  write_safetensors(scratch / "file",
                    std::vector<NamedTensor>{{"f64", Tensor::from_host({8}, numbers, StreamRef())},
                                             {"f32", test::random_normal({100}, DType::kFloat32, 5, StreamRef())},
                                             {"bf16", test::random_normal({100}, DType::kBFloat16, 6, StreamRef())},
                                             {"f16", test::random_normal({100}, DType::kFloat16, 7, StreamRef())}},
                    {}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  for (const TensorInfo& tensor : file.tensors()) {
    for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      CAPTURE(tensor.name, to_string(dtype));
      const Tensor stored = file.load(tensor.name, StreamRef());
      const Tensor loaded = file.load(tensor.name, dtype, StreamRef());
      CHECK(loaded.dtype() == dtype);
      CHECK(test::values(loaded, StreamRef()) ==
            test::values(test::convert(stored, dtype, StreamRef(), StreamRef()), StreamRef()));
    }
  }
}

TEST_CASE("a safetensors tensor larger than the staging buffer loads and saves through parts", "[io]") {
  ScratchDirectory scratch;
  const Tensor big = test::random_normal({3, 700'001}, DType::kFloat32, 8, StreamRef());  // 8.4 MB, one row 2.8 MB
  write_safetensors(scratch / "file", std::vector<NamedTensor>{{"big", big.transpose(0, 1)}}, {}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  const auto difference = [](const Tensor& a, const Tensor& b) {
    return test::difference(test::values(a, StreamRef()), test::values(b, StreamRef())).max_absolute;
  };
  CHECK(difference(file.load("big", StreamRef()), big.transpose(0, 1)) == 0);
  const Tensor target = Tensor::empty({3, 700'001}, DType::kFloat64, StreamRef());
  file.load_into("big", target.transpose(0, 1), StreamRef());
  CHECK(difference(target, big) == 0);
}

TEST_CASE("what a Tensor cannot hold is listed but not loaded", "[io]") {
  const auto kind_of = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.kind();
    }
    return ErrorKind::kInterrupted;
  };
  const SafetensorsFile boolean(data_path("safetensors_cases/v21_bool_value_2"));
  CHECK(boolean.at("a").dtype == "BOOL");
  CHECK(kind_of([&] { boolean.load("a", StreamRef()); }) == ErrorKind::kUnsupported);
  ScratchDirectory scratch;
  write_file(scratch / "rank6", make_file(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1],"data_offsets":[0,4]}})", 4));
  const SafetensorsFile rank6(scratch / "rank6");
  CHECK(kind_of([&] { rank6.load("a", StreamRef()); }) == ErrorKind::kUnsupported);
  write_safetensors(scratch / "file", sample_tensors(StreamRef()), {}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  CHECK(kind_of([&] { file.load("ids", DType::kFloat32, StreamRef()); }) == ErrorKind::kUnsupported);
  CHECK(kind_of([&] { file.load("a", DType::kInt32, StreamRef()); }) == ErrorKind::kUnsupported);
  CHECK(kind_of([&] {
          file.load_into("a", Tensor::empty({5, 3}, DType::kFloat32, StreamRef()), StreamRef());
        }) == ErrorKind::kFormat);
}

TEST_CASE("a safetensors file that shrinks while it is read is an error", "[io]") {
  ScratchDirectory scratch;
  write_safetensors(scratch / "file", sample_tensors(StreamRef()), {}, StreamRef());
  const SafetensorsFile file(scratch / "file");
  const auto& tensor = file.at("a");
  REQUIRE(::truncate((scratch / "file").c_str(), static_cast<off_t>(tensor.offset + tensor.bytes - 1)) == 0);
  try {
    file.load("a", StreamRef());
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kIo);
    CHECK(contains(error.what(), "ended"));
  }
}

TEST_CASE("write_safetensors refuses names that no reader takes, and leaves the old file", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "file";
  write_file(path, "old");
  const Tensor t = Tensor::zeros({1}, DType::kFloat32, StreamRef());
  const auto refused = [&](const std::vector<NamedTensor>& tensors) {
    try {
      write_safetensors(path, tensors, {}, StreamRef());
      return false;
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kInvalidArgument;
    }
  };
  CHECK(refused({{"a", t}, {"a", Tensor::zeros({1}, DType::kInt32, StreamRef())}}));
  CHECK(refused({{"__metadata__", t}}));
  CHECK(refused({{std::string("a\0b", 3), t}}));
  CHECK(refused({{std::string(4097, 'a'), t}}));
  CHECK(refused({{"\xff", t}}));
  CHECK(refused({{"a", Tensor()}}));
  CHECK(read_file(path) == "old");
}

TEST_CASE("a safetensors file is copied with edits, a few rows at a time, and keeps every other byte", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "a.safetensors", copy = scratch / "b.safetensors";
  const Tensor large = Tensor::zeros({1500, 1000}, DType::kFloat32, StreamRef());  // more than one part
  auto tensors = sample_tensors(StreamRef());
  tensors.push_back({"large", large});
  write_safetensors(path, tensors, {{"key", "value"}}, StreamRef());
  const SafetensorsFile source(path);
  std::int64_t next = 0, parts = 0;
  copy_safetensors(source, copy, {{"large", [&](std::int64_t first, const Tensor& rows) {
                                     CHECK(first == next);
                                     next += rows.size(0);
                                     ++parts;
                                     for (std::int64_t i = 0; i < rows.size(0); ++i)
                                       rows.data<float>()[i * 1000 + 7] = static_cast<float>(first + i);
                                   }}});
  CHECK(next == 1500);
  CHECK(parts > 1);
  for (std::int64_t i = 0; i < 1500; ++i) large.data<float>()[i * 1000 + 7] = static_cast<float>(i);
  write_safetensors(scratch / "expected", tensors, {{"key", "value"}}, StreamRef());
  CHECK(read_file(copy) == read_file(scratch / "expected"));
}

TEST_CASE("an edit of a tensor that is absent, no matrix or of no dtype here is refused before anything is written",
          "[io]") {
  ScratchDirectory scratch;
  write_safetensors(scratch / "a", sample_tensors(StreamRef()), {}, StreamRef());
  const SafetensorsFile source(scratch / "a");
  for (const char* name : {"absent", "b", "c"}) {
    CAPTURE(name);
    const std::map<std::string, RowEdit> edits{{name, [](std::int64_t, const Tensor&) {}}};
    CHECK_THROWS_AS(copy_safetensors(source, scratch / "b", edits), Error);
    CHECK_FALSE(std::filesystem::exists(scratch / "b"));
  }
}

TEST_CASE("safetensors load to and save from a CUDA device", "[io][gpu]") {
  if (!test::have_gpu()) return;
  ScratchDirectory scratch;
  const Stream stream(Device::cuda());
  const auto tensors = sample_tensors(stream);
  write_safetensors(scratch / "file", tensors, {}, stream);
  const SafetensorsFile file(scratch / "file");
  for (const NamedTensor& t : tensors) {
    CAPTURE(t.name);
    CHECK(test::values(file.load(t.name, stream), stream) == test::values(t.tensor, stream));
  }
  const Tensor target = Tensor::zeros({6, 10}, DType::kBFloat16, stream);
  const Tensor border = target.slice(0, 1, 4).slice(1, 2, 7);
  file.load_into("a", border, stream);
  CHECK(test::values(border, stream) ==
        test::values(test::convert(tensors[0].tensor, DType::kBFloat16, stream, stream), stream));
}

}  // namespace rowan
