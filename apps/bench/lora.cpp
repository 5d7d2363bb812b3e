#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "benches.h"
#include "rowan/nn/lora_linear.h"
#include "rowan/ops/gemm.h"
#include "rowan/ops/lora.h"

namespace rowan::bench {

namespace {

double bytes_of(std::int64_t elements, DType dtype) {
  return static_cast<double>(elements) * static_cast<double>(size_of(dtype));
}

// ---- layers ------------------------------------------------------------------------------------------------------

struct LayerCase {
  std::string name;
  std::int64_t m, k;
  std::vector<std::int64_t> parts;  // output neurons of the linears that read one x
  std::int64_t rank = 16;
  DType dtype = DType::kBFloat16;
};

std::int64_t outputs(const LayerCase& c) {
  std::int64_t n = 0;
  for (std::int64_t part : c.parts) n += part;
  return n;
}

LoraLinear make_layer(Setup& setup, const LayerCase& c) {
  LoraConfig lora;
  lora.rank = c.rank;
  lora.alpha = 2 * static_cast<double>(c.rank);
  std::vector<LinearPart> parts;
  for (std::size_t i = 0; i < c.parts.size(); ++i) parts.push_back({fmt::format("part{}", i), c.parts[i], false, lora});
  LoraLinear layer(c.k, parts, c.dtype, false, setup.stream());
  for (const Parameter& parameter : layer.parameters()) setup.randomize(parameter.value, 0.02);
  return layer;
}

// Buffers of one call: what the frozen linears and the layer read and write.
struct LayerSet {
  LoraLinear layer;
  LoraLinearContext context;
  Tensor x, y, dy, dx;                               // of the layer, with spare columns
  std::vector<Tensor> weights, frozen_y, frozen_dy;  // of the frozen linears, contiguous
  Tensor frozen_x, frozen_dx;
};

LayerSet make_set(Setup& setup, const LayerCase& c) {
  LayerSet set;
  set.layer = make_layer(setup, c);
  const std::int64_t n = outputs(c), slack = set.layer.slack_columns();
  set.x = setup.random({c.m, c.k}, c.dtype, 1, slack);
  set.y = Tensor::empty({c.m, n}, c.dtype, setup.stream());
  set.dy = setup.random({c.m, n}, c.dtype, 1, slack);
  set.dx = Tensor::empty({c.m, c.k}, c.dtype, setup.stream());
  set.frozen_x = setup.random({c.m, c.k}, c.dtype);
  set.frozen_dx = Tensor::empty({c.m, c.k}, c.dtype, setup.stream());
  for (std::int64_t part : c.parts) {
    set.weights.push_back(setup.random({part, c.k}, c.dtype, 0.02));
    set.frozen_y.push_back(Tensor::empty({c.m, part}, c.dtype, setup.stream()));
    set.frozen_dy.push_back(setup.random({c.m, part}, c.dtype));
  }
  return set;
}

void frozen_forward(LayerSet& set, StreamRef stream) {
  for (std::size_t i = 0; i < set.weights.size(); ++i)
    gemm(set.frozen_x, set.weights[i].transpose(0, 1), set.frozen_y[i], stream);
}

void frozen_backward(LayerSet& set, StreamRef stream) {
  for (std::size_t i = 0; i < set.weights.size(); ++i)
    gemm(set.frozen_dy[i], set.weights[i], set.frozen_dx, stream, {.beta = i == 0 ? 0.0 : 1.0});
}

struct LayerTimes {
  Sample frozen_forward, forward, frozen_backward, backward;
};

LayerTimes time_layer(Setup& setup, const LayerCase& c) {
  const StreamRef stream = setup.stream();
  const double bytes = bytes_of(c.m * c.k + c.m * outputs(c) + outputs(c) * c.k, c.dtype);
  const int rotations = setup.rotations(bytes, 40);
  std::vector<LayerSet> sets;
  for (int i = 0; i < rotations; ++i) sets.push_back(make_set(setup, c));
  const auto at = [&](int i) -> LayerSet& { return sets[static_cast<std::size_t>(i)]; };
  const auto forward = [&](int i) {
    LoraLinearContext context;
    at(i).layer.forward(at(i).x, at(i).y, context, stream);
  };
  const auto backward = [&](int i) {
    if (!at(i).context.x.defined()) at(i).layer.forward(at(i).x, at(i).y, at(i).context, stream);
    at(i).layer.backward(at(i).dy, at(i).context, &at(i).dx, stream);
  };
  const std::vector<Sample> samples = time_interleaved({{rotations, [&](int i) { frozen_forward(at(i), stream); }},
                                                        {rotations, forward},
                                                        {rotations, [&](int i) { frozen_backward(at(i), stream); }},
                                                        {rotations, backward}},
                                                       setup.timing(), stream);
  return {samples[0], samples[1], samples[2], samples[3]};
}

LayerTimes add_layer(Setup& setup, Report& report, const std::string& table, const LayerCase& c) {
  const LayerTimes t = time_layer(setup, c);
  report.add(table,
             {{"case", c.name},
              {"M", c.m},
              {"K", c.k},
              {"N", outputs(c)},
              {"r", c.rank},
              {"dtype", to_string(c.dtype)},
              {"frozen us", t.frozen_forward.median},
              {"forward us", t.forward.median},
              {"ratio", t.forward.median / t.frozen_forward.median},
              {"frozen dx us", t.frozen_backward.median},
              {"backward us", t.backward.median},
              {"dx ratio", t.backward.median / t.frozen_backward.median},
              {"both", (t.forward.median + t.backward.median) / (t.frozen_forward.median + t.frozen_backward.median)},
              {"launches", fmt::format("{}+{} (frozen {}+{})", t.forward.launches, t.backward.launches,
                                       t.frozen_forward.launches, t.frozen_backward.launches)}});
  return t;
}

void bench_layers(Setup& setup, Report& report) {
  const bool cuda = setup.on_cuda();
  const DType half = cuda ? DType::kBFloat16 : DType::kFloat32;
  const std::int64_t m = cuda ? 8192 : 256, k = cuda ? 4096 : 512;
  const std::string one = "LoRA layer against the frozen linear";
  const LayerTimes main = add_layer(setup, report, one, {"one linear", m, k, {k}, 16, half});
  report.figure("lora_fwd_ratio", main.forward.median / main.frozen_forward.median);
  report.figure("lora_bwd_ratio", main.backward.median / main.frozen_backward.median);
  add_layer(setup, report, one, {"one linear", m, k / 2, {k / 2}, 16, half});
  for (std::int64_t rank : {4, 8, 32, 64, 128}) add_layer(setup, report, one, {"rank", m, k, {k}, rank, half});
  for (std::int64_t rows : {1, 16, 128, 512, 2048, 32768})
    if (cuda || rows <= 512) add_layer(setup, report, one, {"rows", rows, k, {k}, 16, half});
  for (DType dtype : {DType::kFloat16, DType::kFloat32})
    add_layer(setup, report, one, {"dtype", dtype == DType::kFloat32 ? m / 4 : m, k, {k}, 16, dtype});
  report.print(one);
  const std::string stack = "Linears that read one x, against as many frozen products";
  add_layer(setup, report, stack, {"q, k, v of equal heads", m, k, {k, k, k}, 16, half});
  add_layer(setup, report, stack, {"q, k, v, 32/8 heads", m, k, {k, k / 4, k / 4}, 16, half});
  add_layer(setup, report, stack, {"gate, up", m, k, {k * 7 / 2, k * 7 / 2}, 16, half});
  report.print(stack);
  const std::string fused = "The same against one frozen product of all outputs";
  for (const auto& [name, n] :
       {std::pair<std::string, std::int64_t>{"equal heads", 3 * k}, {"32/8 heads", k * 3 / 2}}) {
    const LayerTimes frozen = time_layer(setup, {"", m, k, {n}, 16, half});
    const std::vector<std::int64_t> parts =
        n == 3 * k ? std::vector<std::int64_t>{k, k, k} : std::vector<std::int64_t>{k, k / 4, k / 4};
    const LayerTimes t = time_layer(setup, {"", m, k, parts, 16, half});
    report.add(fused, {{"case", name},
                       {"frozen us", frozen.frozen_forward.median},
                       {"forward us", t.forward.median},
                       {"frozen dx us", frozen.frozen_backward.median},
                       {"backward us", t.backward.median},
                       {"both", (t.forward.median + t.backward.median) /
                                    (frozen.frozen_forward.median + frozen.frozen_backward.median)}});
  }
  report.print(fused);
}

// ---- stand-alone operations ----------------------------------------------------------------------------------------

struct OpCase {
  std::int64_t m, k, n, rank;
  DType dtype = DType::kBFloat16;
};

struct OpSet {
  Tensor x, dy, a, b, y, dx, da, db;
};

OpSet make_op_set(Setup& setup, const OpCase& c) {
  const StreamRef stream = setup.stream();
  return {setup.random({c.m, c.k}, c.dtype),
          setup.random({c.m, c.n}, c.dtype),
          setup.random({c.rank, c.k}, c.dtype, 0.02),
          setup.random({c.n, c.rank}, c.dtype, 0.02),
          Tensor::empty({c.m, c.n}, c.dtype, stream),
          Tensor::empty({c.m, c.k}, c.dtype, stream),
          Tensor::empty({c.rank, c.k}, DType::kFloat32, stream),
          Tensor::empty({c.n, c.rank}, DType::kFloat32, stream)};
}

// How far over its goal, the larger of 1.2 floors and the floor plus 5 us, a time is.
double over_goal(double us, double floor) { return us / std::max(1.2 * floor, floor + 5); }

double add_op_case(Setup& setup, Report& report, const std::string& table, const OpCase& c) {
  const StreamRef stream = setup.stream();
  const double factors = bytes_of(c.rank * (c.k + c.n), c.dtype);
  const double forward = bytes_of(c.m * (c.k + c.n), c.dtype) + factors;
  const double da_dx = bytes_of(c.m * (c.n + 2 * c.k), c.dtype) + factors + 4.0 * static_cast<double>(c.rank * c.k);
  const double db = bytes_of(c.m * (c.k + c.n) + c.rank * c.k, c.dtype) + 4.0 * static_cast<double>(c.rank * c.n);
  const int rotations = setup.rotations(std::min(forward, db), 320);
  std::vector<OpSet> sets;
  for (int i = 0; i < rotations; ++i) sets.push_back(make_op_set(setup, c));
  const auto at = [&](int i) -> OpSet& { return sets[static_cast<std::size_t>(i)]; };
  const auto run_forward = [&](int i) { lora_forward(at(i).x, at(i).a, at(i).b, 2, at(i).y, 0, stream); };
  const auto run_da_dx = [&](int i) {
    lora_da_dx(at(i).dy, at(i).x, at(i).a, at(i).b, 2, at(i).dx, at(i).da, 0, stream);
  };
  const auto run_db = [&](int i) { lora_db(at(i).dy, at(i).x, at(i).a, 2, at(i).db, 0, stream); };
  const std::vector<Sample> t =
      time_interleaved({{rotations, run_forward}, {rotations, run_da_dx}, {rotations, run_db}}, setup.timing(), stream);
  const double floors[] = {setup.floor_us(forward), setup.floor_us(da_dx), setup.floor_us(db)};
  double worst = 0;
  for (int i = 0; i < 3; ++i) worst = std::max(worst, over_goal(t[static_cast<std::size_t>(i)].median, floors[i]));
  report.add(table, {{"M", c.m},
                     {"K", c.k},
                     {"N", c.n},
                     {"r", c.rank},
                     {"dtype", to_string(c.dtype)},
                     {"forward us", t[0].median},
                     {"floor", floors[0]},
                     {"da_dx us", t[1].median},
                     {"floor ", floors[1]},
                     {"db us", t[2].median},
                     {"floor  ", floors[2]},
                     {"worst over goal", worst},
                     {"launches", fmt::format("{}, {}, {}", t[0].launches, t[1].launches, t[2].launches)}});
  return worst;
}

void bench_ops(Setup& setup, Report& report) {
  const bool cuda = setup.on_cuda();
  const std::string anchors = "Stand-alone operations, microseconds (floor: every byte moved once at copy speed)";
  const std::int64_t s = cuda ? 1 : 8;  // smaller on the CPU
  double worst = 0;
  for (const OpCase& c : {OpCase{8192 / s, 4096 / s, 4096 / s, 16}, OpCase{2048 / s, 4096 / s, 4096 / s, 16},
                          OpCase{512 / s, 4096 / s, 4096 / s, 16}, OpCase{8192 / s, 4096 / s, 14336 / s, 16},
                          OpCase{8192 / s, 14336 / s, 4096 / s, 16}})
    worst = std::max(worst, add_op_case(setup, report, anchors, c));
  report.print(anchors);
  report.figure("lora_standalone_worst", worst);
  if (!cuda) return;
  const std::string more =
      setup.options().all ? "Stand-alone operations, every combination" : "Stand-alone operations, one axis at a time";
  if (setup.options().all) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
      for (std::int64_t rank : {4, 8, 16, 32, 64, 128})
        for (std::int64_t m : {1, 16, 128, 512, 2048, 8192, 32768})
          add_op_case(setup, report, more, {m, 4096, 4096, rank, dtype});
  } else {
    for (std::int64_t rank : {4, 8, 32, 64, 128}) add_op_case(setup, report, more, {8192, 4096, 4096, rank});
    for (std::int64_t m : {1, 16, 128, 32768}) add_op_case(setup, report, more, {m, 4096, 4096, 16});
    for (DType dtype : {DType::kFloat16, DType::kFloat32})
      add_op_case(setup, report, more, {8192, 4096, 4096, 16, dtype});
  }
  report.print(more);
}

void bench_lora_peers(Setup& setup, Report& report) {
  if (!setup.options().peers) return;
  const nlohmann::ordered_json answer = run_peers(
      {{"bench", "lora"}, {"m", 8192}, {"k", 4096}, {"n", 4096}, {"rank", 16}, {"repeats", setup.timing().repeats}});
  if (answer.is_null()) return;
  const std::string table = "Peers, bf16, M 8192, K = N = 4096, r 16 (each against its own frozen linear)";
  for (const auto& row : answer.at("rows")) report.add(table, row);
  report.print(table);
}

}  // namespace

void bench_lora(Setup& setup, Report& report) {
  bench_layers(setup, report);
  bench_ops(setup, report);
  bench_lora_peers(setup, report);
}

}  // namespace rowan::bench
