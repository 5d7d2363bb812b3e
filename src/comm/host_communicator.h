// Collectives out of one primitive, an exchange of bytes between all ranks on the host.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "comm/collective.h"
#include "rowan/comm/communicator.h"

namespace rowan::detail {

class HostCommunicator : public Communicator {
 public:
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void barrier(StreamRef stream) override;
  void synchronize(StreamRef stream) override { stream.synchronize(); }

 protected:
  using Bytes = std::span<std::byte>;
  using ConstBytes = std::span<const std::byte>;

  HostCommunicator(int rank, int size) : rank_(rank), size_(size) {}

  /// receive[p] here = send[rank()] of rank p, for every other rank p; entries of this rank are not used. Returns when
  /// this rank's part is done and its buffers are free. Throws Comm on all ranks where their `what` differ.
  virtual void exchange(const Collective& what, std::span<const ConstBytes> send, std::span<const Bytes> receive) = 0;

 private:
  void do_all_reduce(Tensor& data, ReduceOp op, StreamRef stream) override;
  void do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) override;
  void do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) override;
  void do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) override;
  void do_broadcast(Tensor& data, int root, StreamRef stream) override;

  Collective next(CollectiveKind kind, const Tensor& shorter);
  /// out = the reduction of all ranks' pieces, of which this rank's own is `own`; pieces[p] goes to rank p.
  void reduce_pieces(const Collective& what, std::span<const ConstBytes> pieces, ConstBytes own, Bytes out);

  int rank_, size_;
  std::int64_t sequence_ = 0;
  std::vector<std::byte> scratch_;
};

}  // namespace rowan::detail
