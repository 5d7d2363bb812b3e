// How the ranks of a run exchange tensors.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "rowan/core/tensor.h"

namespace rowan {

enum class ReduceOp { kSum, kMax };

/// "sum", "max".
const char* to_string(ReduceOp op) noexcept;

/// Of every communicator with more than one rank.
struct CommunicatorOptions {
  std::chrono::milliseconds timeout{60000};  ///< of every wait for other ranks, meeting them at the start included
  /// Ranks tell each other what they are about to do before each operation, and all of them throw where one differs in
  /// operation, element count or dtype. Communicators on the host always do; NCCL's costs a round trip each time.
  bool check_operations = false;
};

/// A group of `size` ranks that call the same operations in the same order, with tensors of equal shapes and dtypes
/// where an operation does not say otherwise. All functions throw on every rank that can see the reason; a failed peer,
/// or one that misses the deadline of the implementation, is a Comm error (Nccl where NCCL reports it) that names the
/// rank; the communicator is of no use after it, on any rank. So is the group of a rank whose communicator is destroyed
/// while others still wait for it. Not thread-safe.
///
/// Operations are ordered in the stream and may return before they are done. They are the same function of the ranks'
/// inputs on every rank: all ranks hold the same bits after an all_reduce, an all_gather or a broadcast. Tensors are
/// contiguous, of any dtype, on the stream's device; one that an operation writes does not overlap another argument
/// unless it says so. Tensors without elements take part.
///
/// Public functions check their arguments (InvalidArgument, nothing sent) and call the implementation's protected twin.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// This process's place, 0 <= rank < size.
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// data = the elementwise sum or maximum of all ranks' data, in place. A sum with a NaN is NaN; a maximum may miss
  /// it.
  void all_reduce(Tensor& data, ReduceOp op, StreamRef stream);

  /// whole [size * n, ..] = the ranks' part [n, ..] one after the other. part may be this rank's own rows of whole.
  void all_gather(const Tensor& part, Tensor& whole, StreamRef stream);

  /// part [n, ..] = rows [rank * n, (rank + 1) * n) of the elementwise sum or maximum of all ranks' whole [size * n,
  /// ..]. part may be this rank's own rows of whole; whole is otherwise preserved.
  void reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream);

  /// receive[p] of this rank = send[rank] of rank p, for all p. `size` tensors each; their shapes may differ from peer
  /// to peer (and be empty), but send[p] here and receive[rank] on rank p agree.
  void all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream);

  /// data = rank root's data.
  void broadcast(Tensor& data, int root, StreamRef stream);

  /// Returns when all ranks have come here and their work on `stream` so far is done.
  virtual void barrier(StreamRef stream) = 0;

  /// Waits for this rank's work on `stream`, collectives included, without hanging on a peer that failed: callers use
  /// this instead of StreamRef::synchronize wherever a collective may be pending.
  virtual void synchronize(StreamRef stream) = 0;

 protected:
  Communicator() = default;

 private:
  virtual void do_all_reduce(Tensor& data, ReduceOp op, StreamRef stream) = 0;
  virtual void do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) = 0;
  virtual void do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) = 0;
  virtual void do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) = 0;
  virtual void do_broadcast(Tensor& data, int root, StreamRef stream) = 0;
};

/// The one rank of a run that is not spread: results are copies of the inputs, ordered in the stream.
class SingleCommunicator final : public Communicator {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  void barrier(StreamRef stream) override { stream.synchronize(); }
  void synchronize(StreamRef stream) override { stream.synchronize(); }

 private:
  void do_all_reduce(Tensor& data, ReduceOp op, StreamRef stream) override;
  void do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) override;
  void do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) override;
  void do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) override;
  void do_broadcast(Tensor& data, int root, StreamRef stream) override;
};

}  // namespace rowan
