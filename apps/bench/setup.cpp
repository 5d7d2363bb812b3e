#include "setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "rowan/core/build_info.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/io/atomic_file.h"
#include "rowan/ops/elementwise.h"

namespace rowan::bench {

namespace {

constexpr std::int64_t kPool = (std::int64_t{1} << 22) + 8191;

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

// By a kernel or by the driver's copy, whichever is faster.
double copy_speed(Setup& setup, bool cuda) {
  const std::int64_t elements = cuda ? std::int64_t{1} << 28 : std::int64_t{1} << 25;
  const Tensor from = setup.random({elements / 4096, 4096}, DType::kFloat32);
  Tensor to = Tensor::empty(from.shape(), DType::kFloat32, setup.stream());
  const std::vector<Sample> samples = time_interleaved(
      {{1, [&](int) { to.copy_from(from, setup.stream()); }}, {1, [&](int) { cast(from, to, setup.stream()); }}}, {10},
      setup.stream());
  return 2.0 * 4.0 * static_cast<double>(elements) / std::min(samples[0].median, samples[1].median);
}

std::string cell(const Report::Row& value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return std::abs(number) >= 100 ? fmt::format("{:.0f}", number) : fmt::format("{:.3g}", number);
  }
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

void Report::add(const std::string& table, Row row) {
  const auto found = std::find_if(tables_.begin(), tables_.end(), [&](const auto& t) { return t.first == table; });
  if (found != tables_.end())
    found->second.push_back(std::move(row));
  else
    tables_.push_back({table, {std::move(row)}});
}

void Report::print(const std::string& table) const {
  for (const auto& [name, rows] : tables_) {
    if (name != table) continue;
    std::vector<std::size_t> widths;
    for (const auto& [key, value] : rows.front().items()) {
      std::size_t width = key.size();
      for (const Row& row : rows) width = std::max(width, cell(row.at(key)).size());
      widths.push_back(width);
    }
    fmt::print("\n{}\n", name);
    std::size_t column = 0;
    for (const auto& [key, value] : rows.front().items()) fmt::print("{:>{}}  ", key, widths[column++]);
    fmt::print("\n");
    for (const Row& row : rows) {
      column = 0;
      for (const auto& [key, value] : rows.front().items()) fmt::print("{:>{}}  ", cell(row.at(key)), widths[column++]);
      fmt::print("\n");
    }
  }
  std::fflush(stdout);
}

void Report::write(const std::string& folder, const std::string& name, const Row& environment) const {
  if (folder.empty()) return;
  const std::filesystem::path directory(folder);
  make_directories(directory);
  Row all = {{"environment", environment}, {"figures", figures_}};
  for (const auto& [table, rows] : tables_) all["tables"][table] = rows;
  write_text_file(directory / (name + ".json"), all.dump(1) + "\n");
  Row summary = Row::object();
  if (std::filesystem::exists(directory / "summary.json"))
    summary = Row::parse(read_text_file(directory / "summary.json", 1 << 20));
  for (const auto& [figure, value] : figures_) summary[figure] = value;
  write_text_file(directory / "summary.json", summary.dump(1) + "\n");
}

Setup::Setup(const Options& options) : options_(options), stream_(parse_device(options.device)) {
  std::vector<float> values(static_cast<std::size_t>(kPool));
  Rng rng(1);
  for (float& value : values) value = static_cast<float>(rng.normal());
  pool_ = Tensor::from_host({kPool}, values, stream_);
  if (on_cuda()) l2_bytes_ = static_cast<double>(device_info(stream_.device()).l2_bytes);
  if (!options.ceilings) return;
  copy_bytes_per_us_ = copy_speed(*this, on_cuda());
  Tensor one = Tensor::zeros({1}, DType::kFloat32, stream_);
  launch_us_ = time_interleaved({{1, [&](int) { fill(one, 0, stream_); }}}, options_.timing, stream_)[0].median;
}

int Setup::rotations(double bytes, int most) const {
  if (!on_cuda()) return 1;
  return std::clamp(static_cast<int>(std::ceil(3 * l2_bytes_ / bytes)) + 1, 1, most);
}

Tensor Setup::random(const Shape& shape, DType dtype, double scale, std::int64_t slack) {
  const Tensor tensor =
      slack > 0 ? Tensor::empty_with_slack(shape, slack, dtype, stream_) : Tensor::empty(shape, dtype, stream_);
  randomize(tensor, scale);
  return tensor;
}

void Setup::randomize(const Tensor& tensor, double scale) {
  const std::int64_t rows = tensor.size(0), cols = tensor.size(1), block = std::max<std::int64_t>(1, kPool / cols);
  for (std::int64_t row = 0; row < rows; row += block) {
    const std::int64_t count = std::min(block, rows - row);
    next_ = next_ + count * cols > kPool ? 0 : next_;
    Tensor target = tensor.slice(0, row, row + count);
    cast(pool_.slice(0, next_, next_ + count * cols).reshape({count, cols}), target, stream_);
    next_ += 8191;  // prime: neighbours differ
    if (scale != 1) rowan::scale(target, scale, stream_);
  }
}

Report::Row Setup::environment() const {
  const BuildInfo& build = build_info();
  Report::Row row = {{"date", today()},        {"rowan", build.version},
                     {"commit", build.commit}, {"compiler", build.compiler},
                     {"cuda", build.cuda},     {"blas", build.blas}};
  if (on_cuda()) {
    const DeviceInfo info = device_info(stream_.device());
    row["card"] = info.name;
    row["driver_cuda"] = fmt::format("{}.{}", info.driver / 1000, info.driver % 1000 / 10);
    row["multiprocessors"] = info.multiprocessors;
  }
  if (options_.ceilings) {
    row["copy_TB_per_s"] = copy_bytes_per_us_ * 1e-6;
    row["launch_us"] = launch_us_;
  }
  return row;
}

}  // namespace rowan::bench
