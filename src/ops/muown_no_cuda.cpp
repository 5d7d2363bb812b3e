// Stands in for muown_cuda.cu in a build without CUDA.
#include "ops/muown_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "muown: built without CUDA"); }
}  // namespace

MuownRowKind muown_row_kind(const MuownShape&) { unsupported(); }
std::int64_t muown_row_blocks(const MuownShape&) { unsupported(); }
void muown_prepare(const MuownRowKind&, const MuownTable<MuownPrepareArguments>&, StreamRef) { unsupported(); }
void muown_finish(const MuownRowKind&, const MuownTable<MuownFinishArguments>&, StreamRef) { unsupported(); }
std::size_t muown_workspace_bytes(const MuownShape&) { unsupported(); }
void muown_prepare(const MuownPrepareArguments&, void*, StreamRef) { unsupported(); }
void muown_finish(const MuownFinishArguments&, void*, StreamRef) { unsupported(); }
void muown_init(const MuownInitArguments&, void*, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
