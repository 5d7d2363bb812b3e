#include "comm/host_communicator.h"

#include <cstring>

#include "core/check.h"

namespace rowan::detail {

namespace {

/// A tensor's elements in host memory: its own, or a copy of them for one on CUDA.
class Staged {
 public:
  Staged(const Tensor& t, bool read, StreamRef stream) : tensor_(t), stream_(stream) {
    if (t.device().is_cpu()) {
      host_ = t;
    } else {
      host_ = read ? t.to(Device::cpu(), stream) : Tensor::empty(t.shape(), t.dtype(), StreamRef());
    }
  }

  std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(host_.raw()), static_cast<std::size_t>(host_.elements()) * size_of(host_.dtype())};
  }
  void store() const {
    if (!host_.shares_storage(tensor_)) tensor_.copy_from(host_, stream_);
  }

 private:
  Tensor tensor_, host_;
  StreamRef stream_;
};

void copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (from.data() != to.data() && !from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace

Collective HostCommunicator::next(CollectiveKind kind, const Tensor& shorter) {
  Collective what;
  what.sequence = ++sequence_;
  what.kind = kind;
  what.count = shorter.elements();
  what.dtype = shorter.dtype();
  return what;
}

void HostCommunicator::barrier(StreamRef stream) {
  stream.synchronize();
  Collective what;
  what.sequence = ++sequence_;
  what.kind = CollectiveKind::kBarrier;
  const std::vector<ConstBytes> send(static_cast<std::size_t>(size_));
  const std::vector<Bytes> receive(send.size());
  exchange(what, send, receive);
}

void HostCommunicator::reduce_pieces(const Collective& what, std::span<const ConstBytes> pieces, ConstBytes own,
                                     Bytes out) {
  const std::size_t length = out.size(), own_index = static_cast<std::size_t>(rank_);
  scratch_.resize(length * pieces.size());
  std::vector<Bytes> receive;
  std::vector<const std::byte*> inputs;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    receive.push_back(Bytes(scratch_).subspan(p * length, length));
    inputs.push_back(p == own_index ? own.data() : receive.back().data());
  }
  exchange(what, pieces, receive);
  reduce_in_order(what.dtype, what.op, inputs, static_cast<std::int64_t>(length / size_of(what.dtype)), out.data());
}

void HostCommunicator::do_all_reduce(Tensor& data, ReduceOp op, StreamRef stream) {
  Collective what = next(CollectiveKind::kAllReduce, data);
  what.op = op;
  const Staged staged(data, true, stream);
  const auto piece = [&](std::int64_t p) {
    const std::int64_t begin = what.count * p / size_, end = what.count * (p + 1) / size_;
    const std::size_t element = size_of(what.dtype);
    return staged.bytes().subspan(static_cast<std::size_t>(begin) * element,
                                  static_cast<std::size_t>(end - begin) * element);
  };
  std::vector<Bytes> pieces;
  for (int p = 0; p < size_; ++p) pieces.push_back(piece(p));
  const Bytes own = piece(rank_);
  reduce_pieces(what, std::vector<ConstBytes>(pieces.begin(), pieces.end()), own, own);
  exchange(what, std::vector<ConstBytes>(pieces.size(), own), pieces);
  staged.store();
}

void HostCommunicator::do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) {
  const Collective what = next(CollectiveKind::kAllGather, part);
  const Staged from(part, true, stream), to(whole, false, stream);
  const ConstBytes own = from.bytes();
  std::vector<Bytes> rows;
  for (int p = 0; p < size_; ++p)
    rows.push_back(to.bytes().subspan(static_cast<std::size_t>(p) * own.size(), own.size()));
  exchange(what, std::vector<ConstBytes>(rows.size(), own), rows);
  copy(own, rows[static_cast<std::size_t>(rank_)]);
  to.store();
}

void HostCommunicator::do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) {
  Collective what = next(CollectiveKind::kReduceScatter, part);
  what.op = op;
  const Staged from(whole, true, stream), to(part, false, stream);
  const std::size_t length = to.bytes().size();
  std::vector<ConstBytes> pieces;
  for (int p = 0; p < size_; ++p) pieces.push_back(from.bytes().subspan(static_cast<std::size_t>(p) * length, length));
  reduce_pieces(what, pieces, pieces[static_cast<std::size_t>(rank_)], to.bytes());
  to.store();
}

void HostCommunicator::do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) {
  Collective what = next(CollectiveKind::kAllToAll, send[0]);
  what.count = 0;
  std::vector<Staged> from, to;
  std::vector<ConstBytes> sent;
  std::vector<Bytes> received;
  for (std::size_t p = 0; p < send.size(); ++p) {
    sent.push_back(from.emplace_back(send[p], true, stream).bytes());
    received.push_back(to.emplace_back(receive[p], false, stream).bytes());
  }
  exchange(what, sent, received);
  const auto own = static_cast<std::size_t>(rank_);
  copy(sent[own], received[own]);
  for (const Staged& t : to) t.store();
}

void HostCommunicator::do_broadcast(Tensor& data, int root, StreamRef stream) {
  Collective what = next(CollectiveKind::kBroadcast, data);
  what.root = root;
  const Staged staged(data, rank_ == root, stream);
  std::vector<ConstBytes> send(static_cast<std::size_t>(size_));
  std::vector<Bytes> receive(send.size());
  if (rank_ == root) {
    send.assign(send.size(), staged.bytes());
  } else {
    receive[static_cast<std::size_t>(root)] = staged.bytes();
  }
  exchange(what, send, receive);
  if (rank_ != root) staged.store();
}

}  // namespace rowan::detail
