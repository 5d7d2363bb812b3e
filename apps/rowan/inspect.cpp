#include "inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "exit_code.h"
#include "rowan/core/error.h"
#include "rowan/nn/llama_files.h"

namespace rowan::app {

namespace {

/// What was found at a path.
struct Contents {
  const char* kind;  // file, model or adapter
  std::vector<SafetensorsFile> files;
  nlohmann::ordered_json notes;  // an object: what the configuration says
};

std::int64_t elements_of(const TensorInfo& tensor) {
  std::int64_t product = 1;
  if (std::ranges::count(tensor.shape, 0) > 0) return 0;
  for (const std::int64_t extent : tensor.shape) product *= extent;  // at most the tensor's bytes
  return product;
}

Contents inspect_model(const std::string& path) {
  const ModelFiles files(path);
  Contents contents{"model", files.files(), nlohmann::ordered_json::object()};
  try {
    const ModelConfig config = read_model_config(path);
    check_base(files, config);
    contents.notes["architecture"] = config.architecture;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    contents.notes["unsupported"] = error.what();  // sound all the same
  }
  return contents;
}

Contents inspect_adapter(const std::string& path) {
  const AdapterFiles adapter(path);
  // The layers that the factors fit: match() then tells what is missing, left over or at odds with the configuration.
  std::vector<LinearShape> linears;
  for (const std::string& module : adapter.modules()) {
    const auto [key_a, key_b] = AdapterFiles::keys_of(module);
    const TensorInfo *a = adapter.file().find(key_a), *b = adapter.file().find(key_b);
    linears.push_back({module, a == nullptr || a->shape.size() != 2 ? 0 : a->shape[1],
                       b == nullptr || b->shape.size() != 2 ? 0 : b->shape[0]});
  }
  static_cast<void>(adapter.match(linears));
  const AdapterConfig& config = adapter.config();
  return {"adapter",
          {adapter.file()},
          {{"modules", linears.size()},
           {"r", config.r},
           {"lora_alpha", config.lora_alpha},
           {"use_rslora", config.use_rslora}}};
}

Contents inspect_path(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored))
    return {"file", {SafetensorsFile(path)}, nlohmann::ordered_json::object()};
  const bool is_adapter = std::filesystem::exists(std::filesystem::path(path) / "adapter_config.json", ignored);
  return is_adapter ? inspect_adapter(path) : inspect_model(path);
}

/// A name from a file as it may go to a terminal: in quotes and escaped unless it is plain ASCII.
std::string printable(const std::string& text) {
  const bool plain = !text.empty() && std::ranges::all_of(text, [](char c) { return c > ' ' && c <= '~'; });
  return plain ? text : nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string printable_size(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double size = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; size >= 1024 && unit + 1 < std::size(kUnits); ++unit) size /= 1024;
  return fmt::format("{:.1f} {}", size, kUnits[unit]);
}

struct Totals {
  std::int64_t tensors = 0, parameters = 0, bytes = 0;
};

Totals totals_of(const Contents& contents) {
  Totals totals;
  for (const SafetensorsFile& file : contents.files) {
    for (const TensorInfo& tensor : file.tensors()) {
      ++totals.tensors;
      totals.parameters += elements_of(tensor);
      totals.bytes += tensor.bytes;
    }
  }
  return totals;
}

void print_json(const InspectOptions& options, const Contents& contents) {
  nlohmann::ordered_json json = {{"path", options.path}, {"kind", contents.kind}};
  json.update(contents.notes);
  json["files"] = nlohmann::ordered_json::array();
  json["tensors"] = nlohmann::ordered_json::array();
  for (const SafetensorsFile& file : contents.files) {
    const std::string name = file.path().filename().string();
    json["files"].push_back({{"file", name}, {"metadata", file.metadata()}});
    for (const TensorInfo& tensor : file.tensors()) {
      json["tensors"].push_back({{"name", tensor.name},
                                 {"dtype", tensor.dtype},
                                 {"shape", tensor.shape},
                                 {"bytes", tensor.bytes},
                                 {"file", name}});
    }
  }
  const Totals totals = totals_of(contents);
  json["parameters"] = totals.parameters;
  json["bytes"] = totals.bytes;
  std::cout << json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
}

void print_table(const Contents& contents) {
  for (const auto& [name, value] : contents.notes.items())
    std::cout << fmt::format("{}: {}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
  std::size_t width = 4;
  for (const SafetensorsFile& file : contents.files) {
    for (const TensorInfo& tensor : file.tensors())
      width = std::max(width, std::min<std::size_t>(60, printable(tensor.name).size()));
  }
  for (const SafetensorsFile& file : contents.files) {
    std::cout << printable(file.path().filename().string()) << '\n';
    for (const auto& [key, value] : file.metadata())
      std::cout << fmt::format("  metadata {} = {}\n", printable(key), printable(value));
    for (const TensorInfo& tensor : file.tensors()) {
      std::cout << fmt::format("  {:{}}  {:8}  {:>12} bytes  [{}]\n", printable(tensor.name), width, tensor.dtype,
                               tensor.bytes, fmt::join(tensor.shape, ", "));
    }
  }
  const Totals totals = totals_of(contents);
  std::cout << fmt::format("{} tensors, {} parameters, {}\n", totals.tensors, totals.parameters,
                           printable_size(totals.bytes));
}

}  // namespace

void run_inspect(const InspectOptions& options) {
  const Contents contents = reading_input([&] { return inspect_path(options.path); });
  if (options.json) {
    print_json(options, contents);
  } else {
    print_table(contents);
  }
}

}  // namespace rowan::app
