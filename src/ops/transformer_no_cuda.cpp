// The transformer operations' CUDA backends in a build without CUDA.
#include "ops/attention_backend.h"
#include "ops/cross_entropy_backend.h"
#include "ops/embedding_backend.h"
#include "ops/rms_norm_backend.h"
#include "ops/rotary_backend.h"
#include "ops/swiglu_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported(const char* op) {
  throw Error(ErrorKind::kUnsupported, std::string(op) + ": built without CUDA");
}
}  // namespace

void attention_forward(const AttentionArguments&, StreamRef) { unsupported("attention_forward"); }
void attention_backward(const AttentionArguments&, StreamRef) { unsupported("attention_backward"); }
void cross_entropy(const CrossEntropyArguments&, StreamRef) { unsupported("cross_entropy"); }
void embedding_forward(const EmbeddingArguments&, StreamRef) { unsupported("embedding_forward"); }
std::size_t embedding_backward_workspace(const EmbeddingArguments&, StreamRef) { unsupported("embedding_backward"); }
void embedding_backward(const EmbeddingArguments&, void*, StreamRef) { unsupported("embedding_backward"); }
void rms_norm_forward(const RmsNormArguments&, StreamRef) { unsupported("rms_norm_forward"); }
void rms_norm_backward(const RmsNormArguments&, StreamRef) { unsupported("rms_norm_backward"); }
void rotary_apply(const RotaryArguments&, StreamRef) { unsupported("rotary_apply"); }
void swiglu_forward(const SwigluArguments&, StreamRef) { unsupported("swiglu_forward"); }
void swiglu_backward(const SwigluArguments&, StreamRef) { unsupported("swiglu_backward"); }

}  // namespace rowan::cuda
