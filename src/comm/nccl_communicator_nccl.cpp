#include "comm/nccl_communicator.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/mesh.h"
#include "core/check.h"
#include "core/cuda_check.h"

namespace rowan::detail {

namespace {

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kInt64:
      return ncclInt64;
    default:
      return ncclInt32;
  }
}

ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::kSum ? ncclSum : ncclMax; }

std::size_t count_of(const Tensor& t) { return static_cast<std::size_t>(t.elements()); }

/// A GPU of all machines: its machine's boot and its bus.
struct GpuName {
  char text[96] = {};
};

GpuName gpu_name(Device device) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char bus[32] = "";
  cuda::check(cudaDeviceGetPCIBusId(bus, sizeof bus, device.index), "cudaDeviceGetPCIBusId");
  GpuName name;
  const std::string text = boot.substr(0, 48) + " " + bus;
  std::copy_n(text.begin(), std::min(text.size(), sizeof name.text - 1), name.text);
  return name;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const RankEnvironment& environment, Device device, const CommunicatorOptions& options)
      : options_(options), device_(device), mesh_(environment, options.timeout) {
    require_device(device);
    const cuda::DeviceGuard guard(device);
    separate_ranks_of_one_gpu();
    ncclUniqueId id{};
    if (rank() == 0) require_success(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::vector<ncclUniqueId> ids = all_gather_host(id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    guarded(
        [&] { require_success(ncclCommInitRankConfig(&comm_, size(), ids[0], rank(), &config), "ncclCommInitRank"); });
  }

  ~NcclCommunicator() override {
    if (comm_ != nullptr && std::uncaught_exceptions() > exceptions_) abort();
    if (comm_ == nullptr) return;
    try {
      const cuda::DeviceGuard guard(device_);
      guarded([&] { require_success(ncclCommFinalize(comm_), "ncclCommFinalize"); });
      ncclCommDestroy(comm_);
    } catch (...) {  // guarded() has aborted it; the others learn from the mesh
    }
  }

  int rank() const noexcept override { return mesh_.rank(); }
  int size() const noexcept override { return mesh_.size(); }

  void barrier(StreamRef stream) override {
    synchronize(stream);
    Collective what;
    what.kind = CollectiveKind::kBarrier;
    begin(what);
    if (!options_.check_operations) meet();
  }

  void synchronize(StreamRef stream) override {
    guarded([&] { wait_until([&] { return stream.query(); }); });
  }

 private:
  void do_all_reduce(Tensor& data, ReduceOp op, StreamRef stream) override {
    begin(of(CollectiveKind::kAllReduce, data, op));
    run("ncclAllReduce", stream, [&](cudaStream_t queue) {
      return ncclAllReduce(data.raw(), data.raw(), count_of(data), nccl_type(data.dtype()), nccl_op(op), comm_, queue);
    });
    data.record_use(stream);
  }

  void do_all_gather(const Tensor& part, Tensor& whole, StreamRef stream) override {
    begin(of(CollectiveKind::kAllGather, part));
    run("ncclAllGather", stream, [&](cudaStream_t queue) {
      return ncclAllGather(part.raw(), whole.raw(), count_of(part), nccl_type(part.dtype()), comm_, queue);
    });
    part.record_use(stream);
    whole.record_use(stream);
  }

  void do_reduce_scatter(const Tensor& whole, Tensor& part, ReduceOp op, StreamRef stream) override {
    begin(of(CollectiveKind::kReduceScatter, part, op));
    run("ncclReduceScatter", stream, [&](cudaStream_t queue) {
      return ncclReduceScatter(whole.raw(), part.raw(), count_of(part), nccl_type(part.dtype()), nccl_op(op), comm_,
                               queue);
    });
    part.record_use(stream);
    whole.record_use(stream);
  }

  void do_all_to_all(std::span<const Tensor> send, std::span<const Tensor> receive, StreamRef stream) override {
    Collective what = of(CollectiveKind::kAllToAll, send[0]);
    what.count = 0;
    begin(what);
    run("ncclSend and ncclRecv", stream, [&](cudaStream_t queue) {
      ncclResult_t status = ncclGroupStart();
      for (int p = 0; p < size(); ++p) {
        const Tensor &to = send[static_cast<std::size_t>(p)], &from = receive[static_cast<std::size_t>(p)];
        if (to.elements() > 0)
          keep_first(status, ncclSend(to.raw(), count_of(to), nccl_type(to.dtype()), p, comm_, queue));
        if (from.elements() > 0)
          keep_first(status, ncclRecv(from.raw(), count_of(from), nccl_type(from.dtype()), p, comm_, queue));
      }
      keep_first(status, ncclGroupEnd());
      return status;
    });
    for (const Tensor& t : send) t.record_use(stream);
    for (const Tensor& t : receive) t.record_use(stream);
  }

  void do_broadcast(Tensor& data, int root, StreamRef stream) override {
    Collective what = of(CollectiveKind::kBroadcast, data);
    what.root = root;
    begin(what);
    run("ncclBroadcast", stream, [&](cudaStream_t queue) {
      return ncclBroadcast(data.raw(), data.raw(), count_of(data), nccl_type(data.dtype()), root, comm_, queue);
    });
    data.record_use(stream);
  }

  static void keep_first(ncclResult_t& status, ncclResult_t next) {
    if (status == ncclSuccess || status == ncclInProgress) status = next == ncclSuccess ? status : next;
  }

  static Collective of(CollectiveKind kind, const Tensor& shorter, ReduceOp op = ReduceOp::kSum) {
    Collective what;
    what.kind = kind;
    what.op = op;
    what.count = shorter.elements();
    what.dtype = shorter.dtype();
    return what;
  }

  void begin(Collective what) {
    what.sequence = at_.sequence + 1;
    at_ = what;
    mesh_.come_to(at_);
    guarded([&] { mesh_.check(at_); });
    if (comm_ == nullptr) fail(ErrorKind::kNccl, "communicator: it has failed before");
    if (options_.check_operations) meet();
  }

  /// A host barrier that compares operations.
  void meet() {
    const std::vector<std::span<const std::byte>> send(static_cast<std::size_t>(size()));
    const std::vector<std::span<std::byte>> receive(send.size());
    guarded([&] { mesh_.exchange(at_, send, receive); });
  }

  template <class T>
  std::vector<T> all_gather_host(const T& own) {
    std::vector<T> all(static_cast<std::size_t>(size()), own);
    std::vector<std::span<const std::byte>> send(all.size(), bytes_of(own));
    std::vector<std::span<std::byte>> receive;
    for (T& value : all) receive.push_back(writable_bytes_of(value));
    mesh_.exchange(Collective(), send, receive);
    return all;
  }

  /// NCCL refuses ranks that share a GPU unless it takes them for ranks of different machines, and then they must not
  /// wait for each other's kernels.
  void separate_ranks_of_one_gpu() {
    const std::vector<GpuName> names = all_gather_host(gpu_name(device_));
    const auto same = [&](const GpuName& name) {
      return std::strcmp(name.text, names[static_cast<std::size_t>(rank())].text) == 0;
    };
    if (std::count_if(names.begin(), names.end(), same) < 2) return;
    const std::string host = fmt::format("rowan-rank-{}", rank());
    const std::pair<const char*, const char*> settings[] = {{"NCCL_HOSTID", host.c_str()},
                                                            {"NCCL_SOCKET_IFNAME", "lo"},
                                                            {"NCCL_IB_DISABLE", "1"},
                                                            {"NCCL_NVLS_ENABLE", "0"},
                                                            {"NCCL_MAX_CTAS", "1"}};
    for (const auto& [name, value] : settings) setenv(name, value, 0);
  }

  template <class F>
  void run(const char* call, StreamRef stream, F&& launch) {
    const cuda::DeviceGuard guard(device_);
    guarded([&] { require_success(launch(cuda::to_cuda(stream)), call); });
  }

  /// Whatever fails inside ends the communicator.
  template <class F>
  void guarded(F&& f) {
    try {
      f();
    } catch (...) {
      abort();
      throw;
    }
  }

  void abort() noexcept {
    if (comm_ == nullptr) return;
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  [[noreturn]] void fail(ErrorKind kind, const std::string& why) { mesh_.fail(kind, why); }

  /// NCCL's non-blocking calls are over when the communicator is no longer in progress.
  void require_success(ncclResult_t status, const char* call) {
    if (status == ncclInProgress) {
      wait_until([&] {
        if (ncclCommGetAsyncError(comm_, &status) != ncclSuccess) status = ncclInternalError;
        return status != ncclInProgress;
      });
    }
    if (status != ncclSuccess) fail_nccl(status, call);
  }

  [[noreturn]] void fail_nccl(ncclResult_t status, const char* call) {
    const std::string text = fmt::format("{}: {} ({})", call, ncclGetErrorString(status), ncclGetLastError(comm_));
    // NCCL says that a peer is gone, not which: the mesh may know, or learn it now.
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(500);
    while (Clock::now() < deadline) {
      mesh_.check(at_);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    fail(ErrorKind::kNccl, text);
  }

  template <class F>
  void wait_until(F&& is_done) {
    const Clock::time_point begin = Clock::now();
    while (!is_done()) {
      const Clock::duration waited = Clock::now() - begin;
      mesh_.check(at_);
      ncclResult_t status = ncclSuccess;
      if (comm_ != nullptr && ncclCommGetAsyncError(comm_, &status) == ncclSuccess && status != ncclSuccess &&
          status != ncclInProgress)
        fail_nccl(status, "NCCL");
      if (waited > mesh_.timeout()) {
        std::vector<int> others;
        for (int r = 0; r < size(); ++r) {
          if (r != rank()) others.push_back(r);
        }
        mesh_.fail_late(at_, others);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(waited < std::chrono::milliseconds(1) ? 1 : 50));
    }
  }

  CommunicatorOptions options_;
  Device device_;
  Mesh mesh_;
  Collective at_;
  ncclComm_t comm_ = nullptr;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const RankEnvironment& environment, Device device,
                                                     const CommunicatorOptions& options) {
  return std::make_unique<NcclCommunicator>(environment, device, options);
}

}  // namespace rowan::detail
