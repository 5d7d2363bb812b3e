#include "rowan/nn/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/parallel.h"
#include "io/input_file.h"
#include "rowan/io/atomic_directory.h"
#include "rowan/io/atomic_file.h"
#include "rowan/nn/llama_files.h"
#include "rowan/ops/gemm.h"

namespace rowan {

namespace {

namespace fs = std::filesystem;

/// A float64 copy on the CPU.
Tensor widened(const SafetensorsFile& file, const std::string& key) {
  return file.load(key, DType::kFloat64, StreamRef());
}

bool all_finite(const Tensor& t) {
  const double* values = t.data<double>();
  return std::all_of(values, values + t.elements(), [](double x) { return std::isfinite(x); });
}

/// rows = round(rows + delta), and whether every result is finite.
bool add_rounded(const Tensor& rows, const Tensor& delta) {
  constexpr std::int64_t kGrain = 1 << 16;
  std::vector<char> finite(static_cast<std::size_t>((rows.elements() + kGrain - 1) / kGrain), 1);
  detail::dispatch_floating(rows.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const values = rows.data<T>();
    const double* const add = delta.data<double>();
    detail::parallel_for(rows.elements(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        values[i] = static_cast<T>(static_cast<double>(values[i]) + add[i]);
        if (!std::isfinite(static_cast<double>(values[i]))) finite[static_cast<std::size_t>(begin / kGrain)] = 0;
      }
    });
  });
  return std::ranges::count(finite, 0) == 0;
}

/// Adds scale B A to the rows of one weight; loads the factors at the first rows.
RowEdit merging_edit(const AdapterFiles& adapter, const AdapterTarget& target) {
  return [&adapter, target, a = Tensor(), b = Tensor()](std::int64_t first, const Tensor& rows) mutable {
    if (!a.defined()) {
      const AdapterFiles::Keys keys = AdapterFiles::keys_of(target.module);
      a = widened(adapter.file(), keys.lora_a);
      b = widened(adapter.file(), keys.lora_b);
      if (!all_finite(a) || !all_finite(b)) {
        detail::fail(ErrorKind::kFormat, "{}: the factors of {} are not finite", adapter.file().path().string(),
                     target.module);
      }
    }
    Tensor delta = Tensor::empty(rows.shape(), DType::kFloat64, StreamRef());
    gemm(b.slice(0, first, first + rows.size(0)), a, delta, StreamRef(), {.alpha = target.scale});
    if (!add_rounded(rows, delta)) {
      detail::fail(ErrorKind::kFormat, "merge: the weight of {} is not finite in {}", target.module, rows.dtype());
    }
    if (first + rows.size(0) == b.size(0)) a = b = Tensor();  // one module's factors at a time
  };
}

/// Whether a file of the model's directory would contradict the merged weights, or change what they compute.
bool must_not_be_copied(const fs::path& path) {
  static constexpr std::array kWeightFormats = {".safetensors", ".bin", ".pt",      ".pth",  ".ckpt",
                                                ".gguf",        ".h5",  ".msgpack", ".onnx", ".ot"};
  const std::string name = path.filename().string();
  return std::ranges::count(kWeightFormats, path.extension().string()) != 0 || name.ends_with(".index.json") ||
         name.starts_with("adapter_");
}

void copy_other_files(const fs::path& from, const fs::path& to, MergeReport& report) {
  std::error_code error;
  fs::directory_iterator entry(from, error);
  if (error) detail::fail_system(from, "list", error.value());
  for (; entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (fs::exists(to / name, error)) continue;  // weights and index are there already
    if (fs::is_regular_file(entry->path(), error) && !must_not_be_copied(entry->path())) {
      copy_file_atomically(entry->path(), to / name);
      report.copied.push_back(name);
    } else {
      report.left_out.push_back(name);
    }
  }
  if (error) detail::fail_system(from, "list", error.value());
  std::ranges::sort(report.copied);
  std::ranges::sort(report.left_out);
}

}  // namespace

MergeReport merge_adapter(const ModelConfig& config, const ModelFiles& model, const AdapterFiles& adapter,
                          const fs::path& out) {
  check_base(model, config);
  std::map<std::string, RowEdit> edits;
  MergeReport report;
  for (const AdapterTarget& target : adapter.match(linear_shapes(config))) {
    edits.emplace(target.module + ".weight", merging_edit(adapter, target));
    report.merged.push_back(target.module);
  }

  AtomicDirectory directory(out);
  for (const SafetensorsFile& file : model.files()) {
    std::map<std::string, RowEdit> own;
    for (const auto& [name, edit] : edits) {
      if (file.find(name) != nullptr) own.emplace(name, edit);
    }
    copy_safetensors(file, directory.path() / file.path().filename(), own);
  }
  if (const auto& index = model.index(); !index.empty())
    copy_file_atomically(index, directory.path() / index.filename());
  copy_other_files(model.directory(), directory.path(), report);
  directory.commit();
  return report;
}

}  // namespace rowan
