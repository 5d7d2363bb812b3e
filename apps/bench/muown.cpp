#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>

#include "benches.h"
#include "rowan/comm/communicator.h"
#include "rowan/ops/muown.h"
#include "rowan/ops/newton_schulz.h"
#include "rowan/optim/optimizer.h"

namespace rowan::bench {

namespace {

// Bytes an element that both row kernels together must move: prepare reads W, G, M and writes M, U (16-bit); finish
// reads W and O (16-bit) and writes W.
constexpr double kPrepareBytes = 18, kFinishBytes = 10;

// ---- row kernels -------------------------------------------------------------------------------------------------

struct RowSet {
  Tensor weight, gradient;
  MuownState state;
  MuownUpdate update;
  MuownStep step;
};

RowSet make_row_set(Setup& setup, const Shape& shape, const MuownOptions& options) {
  const StreamRef stream = setup.stream();
  RowSet set;
  set.weight = setup.random(shape, DType::kFloat32, 0.02);
  set.gradient = setup.random(shape, DType::kFloat32, 0.01);
  set.state = muown_init(set.weight, options, stream);
  set.update = muown_empty_update(set.weight, options, DType::kBFloat16, stream);
  setup.randomize(set.update.update, 0.01);
  set.step = {Tensor::from_host<double>({2}, std::vector<double>{1e-3, 0.0}, stream),
              Tensor::from_host<std::int64_t>({1}, std::vector<std::int64_t>{3}, stream),
              {}};
  return set;
}

void add_row_case(Setup& setup, Report& report, const std::string& table, std::int64_t rows, std::int64_t columns,
                  MatrixLayout layout, double& worst) {
  const StreamRef stream = setup.stream();
  MuownOptions options;
  options.layout = layout;
  const Shape shape = layout == MatrixLayout::kOutIn ? Shape{rows, columns} : Shape{columns, rows};
  const double elements = static_cast<double>(rows) * static_cast<double>(columns);
  const int rotations = setup.rotations(kFinishBytes * elements, 320);
  std::vector<RowSet> sets;
  for (int i = 0; i < rotations; ++i) sets.push_back(make_row_set(setup, shape, options));
  const auto prepare = [&](int i) {
    RowSet& s = sets[static_cast<std::size_t>(i)];
    muown_prepare(s.weight, s.gradient, s.state, options, s.step.control, s.update, stream);
  };
  const auto finish = [&](int i) {
    RowSet& s = sets[static_cast<std::size_t>(i)];
    muown_finish(s.weight, s.gradient, s.state, s.update.update, s.update.magnitude_grad, options, s.step, nullptr,
                 stream);
  };
  const std::vector<Sample> t = time_interleaved({{rotations, prepare}, {rotations, finish}}, setup.timing(), stream);
  const double floor = setup.floor_us((kPrepareBytes + kFinishBytes) * elements);
  const double ratio = (t[0].median + t[1].median) / floor;
  if (elements >= 4096.0 * 4096) worst = std::max(worst, ratio);
  report.add(table, {{"rows", rows},
                     {"columns", columns},
                     {"stored", layout == MatrixLayout::kOutIn ? "[out, in]" : "[in, out]"},
                     {"prepare us", t[0].median},
                     {"finish us", t[1].median},
                     {"28-byte floor us", floor},
                     {"ratio", ratio}});
}

void bench_rows(Setup& setup, Report& report) {
  const std::string table = "Muown rows, float32 weights, bf16 updates, one matrix";
  const std::int64_t s = setup.on_cuda() ? 1 : 8;
  double worst = 0;
  for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{{4096, 4096},
                                                                                        {14336, 4096},
                                                                                        {4096, 14336},
                                                                                        {8192, 28672},
                                                                                        {2048, 8192},
                                                                                        {1024, 1024},
                                                                                        {128 / s, 32768},
                                                                                        {128, 4096},
                                                                                        {4096, 128}})
    add_row_case(setup, report, table, std::max<std::int64_t>(16, rows / s), columns / s, MatrixLayout::kOutIn, worst);
  for (const auto& [rows, columns] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{4096, 4096}, {14336, 4096}, {4096, 14336}, {1024, 1024}})
    add_row_case(setup, report, table, rows / s, columns / s, MatrixLayout::kInOut, worst);
  report.print(table);
  if (worst > 0) report.figure("muown_rows_ratio", worst);
}

// ---- Newton-Schulz -----------------------------------------------------------------------------------------------

using Size = std::pair<std::int64_t, std::int64_t>;

void bench_newton_schulz(Setup& setup, Report& report) {
  const StreamRef stream = setup.stream();
  const std::vector<Size> sizes =
      setup.on_cuda() ? std::vector<Size>{{4096, 4096}, {14336, 4096}, {4096, 14336}, {2048, 2048}, {2048, 8192},
                                          {8192, 2048}, {1024, 1024},  {512, 2048},   {16, 4096},   {4096, 16}}
                      : std::vector<Size>{{256, 256}, {256, 1024}, {16, 1024}};
  nlohmann::ordered_json peers;
  if (setup.options().peers)
    peers = run_peers({{"bench", "newton_schulz"}, {"sizes", sizes}, {"repeats", setup.timing().repeats}});
  const std::string table = "Newton-Schulz, 5 steps, bf16 in and out, microseconds a matrix";
  double worst_rectangle = 0;
  for (const Size& size : sizes) {
    const std::int64_t shorter = std::min(size.first, size.second);
    const double elements = static_cast<double>(size.first * size.second);
    const int rotations = setup.rotations(4 * elements, 64);
    std::vector<std::pair<Tensor, Tensor>> sets;
    for (int i = 0; i < rotations; ++i)
      sets.emplace_back(setup.random({size.first, size.second}, DType::kBFloat16),
                        Tensor::empty({size.first, size.second}, DType::kBFloat16, stream));
    const auto with = [&](NewtonSchulzPath path) {
      NewtonSchulzOptions options;
      options.path = path;
      return Timed{rotations, [&sets, options, stream](int i) {
                     newton_schulz(sets[static_cast<std::size_t>(i)].first, sets[static_cast<std::size_t>(i)].second,
                                   options, stream);
                   }};
    };
    const std::vector<Sample> t =
        time_interleaved({with(NewtonSchulzPath::kStandard), with(NewtonSchulzPath::kAuto)}, setup.timing(), stream);
    Report::Row row = {
        {"rows", size.first},
        {"columns", size.second},
        {"path", to_string(resolve_newton_schulz_path(NewtonSchulzPath::kAuto, size.first, size.second))},
        {"auto us", t[1].median},
        {"p10", t[1].low},
        {"p90", t[1].high},
        {"standard us", t[0].median},
        {"over standard", t[1].median / t[0].median},
        {"launches", t[1].launches}};
    if (!peers.is_null()) {
      const auto& torch = peers.at("rows").at(fmt::format("{}x{}", size.first, size.second));
      row["torch us"] = torch.at("median");
      row["torch p10"] = torch.at("low");
      row["torch p90"] = torch.at("high");
      const double ratio = t[1].median / torch.at("median").get<double>();
      row["over torch"] = ratio;
      if (size == Size{4096, 4096}) report.figure("ns_4096_ratio", ratio);
      if (shorter == 4096 && size.first != size.second) {
        worst_rectangle = std::max(worst_rectangle, ratio);
        report.figure("ns_rect_ratio", worst_rectangle);
      }
    }
    report.add(table, row);
  }
  report.print(table);
}

// ---- optimizer steps ---------------------------------------------------------------------------------------------

struct Matrix {
  std::string name;
  std::int64_t rows, columns;
  Parameter::Role role;
};

// The LoRA factors of every linear of a Llama-3-8B.
std::vector<Matrix> factors_8b(std::int64_t rank, std::int64_t layers) {
  const std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> linears = {
      {"q_proj", 4096, 4096},     {"k_proj", 1024, 4096},   {"v_proj", 1024, 4096},    {"o_proj", 4096, 4096},
      {"gate_proj", 14336, 4096}, {"up_proj", 14336, 4096}, {"down_proj", 4096, 14336}};
  std::vector<Matrix> matrices;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    for (const auto& [name, out, in] : linears) {
      matrices.push_back({fmt::format("{}.{}.lora_A.weight", layer, name), rank, in, Parameter::Role::kLoraA});
      matrices.push_back({fmt::format("{}.{}.lora_B.weight", layer, name), out, rank, Parameter::Role::kLoraB});
    }
  }
  return matrices;
}

// The matrices of a Llama with a billion parameters, without embedding and head.
std::vector<Matrix> matrices_1b(std::int64_t layers) {
  std::vector<Matrix> matrices;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    for (const auto& [name, out, in] :
         std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>{{"q_proj", 2048, 2048},
                                                                          {"k_proj", 512, 2048},
                                                                          {"v_proj", 512, 2048},
                                                                          {"o_proj", 2048, 2048},
                                                                          {"gate_proj", 8192, 2048},
                                                                          {"up_proj", 8192, 2048},
                                                                          {"down_proj", 2048, 8192}})
      matrices.push_back({fmt::format("{}.{}.weight", layer, name), out, in, Parameter::Role::kMatrix});
  }
  return matrices;
}

std::vector<Parameter> make_parameters(Setup& setup, const std::vector<Matrix>& matrices) {
  std::vector<Parameter> parameters;
  for (const Matrix& matrix : matrices) {
    Parameter parameter;
    parameter.name = matrix.name;
    parameter.role = matrix.role;
    parameter.trainable = true;
    parameter.value = setup.random({matrix.rows, matrix.columns}, DType::kBFloat16, 0.02);
    parameter.grad = setup.random({matrix.rows, matrix.columns}, DType::kFloat32, 0.01);
    parameters.push_back(parameter);
  }
  return parameters;
}

// A parameter list under one optimizer.
struct Stepper {
  std::vector<Parameter> parameters;
  std::unique_ptr<Optimizer> optimizer;
};

Stepper make_stepper(Setup& setup, const std::vector<Matrix>& matrices, Algorithm algorithm) {
  Stepper stepper;
  stepper.parameters = make_parameters(setup, matrices);
  OptimizerOptions options;
  options.groups = default_groups(algorithm);
  stepper.optimizer = make_optimizer(options, stepper.parameters, setup.stream());
  // The optimizer made the masters; it finds them again in what it was given.
  stepper.optimizer->stage(stepper.parameters, {}, setup.stream());
  return stepper;
}

void add_step_case(Setup& setup, Report& report, const std::string& table, const std::string& name,
                   const std::vector<Matrix>& matrices, const std::string& figure) {
  SingleCommunicator single;
  const StreamRef stream = setup.stream();
  std::vector<Stepper> steppers;
  std::vector<Timed> timed;
  const std::vector<Algorithm> algorithms = {Algorithm::kMuown, Algorithm::kMuon, Algorithm::kAdamW};
  for (Algorithm algorithm : algorithms) steppers.push_back(make_stepper(setup, matrices, algorithm));
  for (Stepper& stepper : steppers)
    timed.push_back({1, [&](int) { stepper.optimizer->apply(stepper.parameters, stream, single); }});
  const std::vector<Sample> t = time_interleaved(timed, setup.timing(), stream);
  double elements = 0;
  for (const Matrix& matrix : matrices) elements += static_cast<double>(matrix.rows * matrix.columns);
  for (std::size_t i = 0; i < algorithms.size(); ++i)
    report.add(table, {{"parameters", name},
                       {"tensors", matrices.size()},
                       {"millions", elements * 1e-6},
                       {"optimizer", to_string(algorithms[i])},
                       {"ms", t[i].median * 1e-3},
                       {"over AdamW", t[i].median / t[2].median},
                       {"28-byte floor ms", setup.floor_us(28 * elements) * 1e-3},
                       {"launches", t[i].launches}});
  if (!figure.empty()) report.figure(figure, t[0].median * 1e-3);
}

void bench_steps(Setup& setup, Report& report) {
  const std::string table = "Optimizer steps (guard, update and 16-bit copies; a graph replay)";
  const std::int64_t layers = setup.on_cuda() ? 32 : 1;
  add_step_case(setup, report, table, "LoRA factors, 8B, r 16", factors_8b(16, layers),
                setup.on_cuda() ? "muown_448_ms" : "");
  add_step_case(setup, report, table, "LoRA factors, 8B, r 64", factors_8b(64, layers), "");
  if (setup.on_cuda()) add_step_case(setup, report, table, "matrices of a 1B Llama", matrices_1b(16), "");
  report.print(table);
  if (!setup.options().peers) return;
  const nlohmann::ordered_json answer = run_peers({{"bench", "optimizers"}, {"repeats", setup.timing().repeats}});
  if (answer.is_null()) return;
  const std::string peers = "Peers: torch.optim steps";
  for (const auto& row : answer.at("rows")) report.add(peers, row);
  report.print(peers);
}

}  // namespace

void bench_muown(Setup& setup, Report& report) {
  bench_rows(setup, report);
  bench_newton_schulz(setup, report);
  bench_steps(setup, report);
}

}  // namespace rowan::bench
