#include "export.h"

#include <fmt/format.h>

#include <iostream>

#include "exit_code.h"
#include "options.h"
#include "output_paths.h"
#include "rowan/core/error.h"
#include "rowan/nn/gguf_adapter.h"

namespace rowan::app {

void run_export(const ExportOptions& options) {
  if (!options.gguf)
    throw Error(ErrorKind::kInvalidArgument, "export: expected the name of a format: --gguf (llama.cpp)");
  const DType dtype = parse_dtype(options.dtype, {DType::kFloat32, DType::kFloat16});
  const ModelConfig config = reading_input([&] { return read_model_config(options.model); });
  const AdapterFiles adapter = reading_input([&] { return AdapterFiles(options.adapter); });
  require_output_file(options.out, {{"--model", options.model}, {"--adapter", options.adapter}});
  write_gguf_adapter(options.out, config, adapter, dtype);
  std::cout << fmt::format("wrote {} modules to {}\n", adapter.modules().size(), options.out);
}

}  // namespace rowan::app
