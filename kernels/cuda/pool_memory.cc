#include "kernels/cuda/pool_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/driver_allocation.h"
#include "kernels/populate.h"

namespace stoker::kernels::cuda {
namespace {

constexpr size_t kChunkBytes = size_t{1} << 30;
constexpr char kPoolName[] = "stoker-pool";

class RegisteredBuffer final : public Buffer {
 public:
  RegisteredBuffer(std::shared_ptr<const PoolDriver> driver, std::unique_ptr<Buffer> memory, size_t chunk_bytes)
      : driver_(std::move(driver)),
        memory_(std::move(memory)),
        chunk_bytes_(chunk_bytes),
        registrations_((memory_->bytes() + chunk_bytes - 1) / chunk_bytes) {}

  std::byte* data() const override { return memory_->data(); }
  size_t bytes() const override { return memory_->bytes(); }
  int descriptor() const override { return memory_->descriptor(); }
  ExportedMemory exported() const override { return memory_->exported(); }

  absl::Status Register(size_t offset, size_t bytes) {
    std::byte* const data = memory_->data() + offset;
    const cudaError_t error = driver_->host_register(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return Refused(error, bytes);
    }
    registrations_[offset / chunk_bytes_] = Owned("a registration", [driver = driver_.get(), data] {
      const cudaError_t result = driver->host_unregister(data);
      // The runtime's and the driver's codes are the same where both have one.
      return result == cudaErrorCudartUnloading ? CUDA_ERROR_DEINITIALIZED : static_cast<CUresult>(result);
    });
    return absl::OkStatus();
  }

 private:
  absl::Status Refused(cudaError_t error, size_t bytes) const {
    std::string message =
        absl::StrCat("cudaHostRegister of ", bytes, " of ", memory_->bytes(), " bytes: ", cudaGetErrorName(error));
    rlimit limit = {};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < memory_->bytes()) {
      absl::StrAppend(&message, "; RLIMIT_MEMLOCK is ", limit.rlim_cur,
                      " bytes, raise it (ulimit -l, LimitMEMLOCK of a systemd unit)");
      return absl::ResourceExhaustedError(message);
    }
    return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message) : absl::InternalError(message);
  }

  const std::shared_ptr<const PoolDriver> driver_;
  const std::unique_ptr<Buffer> memory_;
  const size_t chunk_bytes_;
  std::vector<Owned> registrations_;  // after the memory: goes first
};

// A file in memory that another process has made.
class ImportedFile final : public Buffer {
 public:
  static absl::StatusOr<std::unique_ptr<Buffer>> Make(const ExportedMemory::Part& part) {
    void* data = mmap(nullptr, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, part.descriptor, 0);
    if (data == MAP_FAILED) {
      return absl::InternalError(absl::StrCat("mmap of ", part.bytes, " bytes of a pool: ", std::strerror(errno)));
    }
    return std::unique_ptr<Buffer>(new ImportedFile(data, part.bytes));
  }
  ~ImportedFile() override { munmap(data_, bytes_); }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  size_t bytes() const override { return bytes_; }

 private:
  ImportedFile(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  void* const data_;
  const size_t bytes_;
};

// Host NUMA node of a device. FAILED_PRECONDITION: the device cannot use allocations on it.
absl::StatusOr<int> NumaNodeOf(const PoolDriver& driver, int device) {
  absl::Status status = CheckSupport(driver, device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                     "allocations on a host NUMA node");
  if (!status.ok()) return status;
  int node = -1;
  if (driver.device_get_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) != CUDA_SUCCESS || node < 0) {
    return absl::FailedPreconditionError(absl::StrCat("the host NUMA node of cuda:", device, " is not known"));
  }
  return node;
}

std::vector<CUmemAccessDesc> AccessOf(int node, const std::vector<int>& devices) {
  std::vector<CUmemAccessDesc> access = {ReadWrite(CU_MEM_LOCATION_TYPE_HOST_NUMA, node)};
  for (const int device : devices) access.push_back(ReadWrite(CU_MEM_LOCATION_TYPE_DEVICE, device));
  return access;
}

ChunkProgress Phase(PoolPhase phase, size_t bytes, const PhaseProgress& progress) {
  if (progress == nullptr) return nullptr;
  return [phase, bytes, &progress](size_t done_bytes) { return progress(phase, std::min(done_bytes, bytes)); };
}

// A wish: where the policy cannot be set (containers forbid it), pages are as good from any node.
void PreferNode(const PoolDriver& driver, int device, const Buffer& memory) {
  int node = -1;
  if (driver.device_get_attribute == nullptr ||
      driver.device_get_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) != CUDA_SUCCESS) {
    return;
  }
  constexpr int kPreferred = 1;  // MPOL_PREFERRED, of a header that only libnuma brings
  constexpr int kMaskBits = 64;
  if (node < 0 || node >= kMaskBits) return;
  const unsigned long mask = 1ul << node;
  (void)syscall(SYS_mbind, memory.data(), memory.exported().parts.front().bytes, kPreferred, &mask, kMaskBits + 1, 0);
}

}  // namespace

PoolPlan PlanNumaPool(size_t bytes) {
  // The driver seems to make one allocation at a time. 16 GiB on an H200's machine, in one: 3.2 s; in 16: 3.6 s, on 8
  // threads 3.4 s, on 16 threads 3.5 to 4.9 s. The chunks are for progress and for a stop.
  PoolPlan plan;
  plan.chunk_bytes = std::max(kChunkBytes, RoundUp((bytes + kMaxParts - 1) / kMaxParts, kChunkBytes));
  return plan;
}

PoolPlan PlanRegisteredPool(size_t bytes) {
  // One registration: a copy that lies across two of them is refused, and 16 GiB take 0.6 to 0.8 s in any number of
  // pieces and threads. Faults: 8.8 s on one thread, 3.6 s on 8, 3.6 to 4.3 s on 16.
  PoolPlan plan;
  plan.chunk_bytes = bytes;
  plan.fault_threads = PopulateThreads();
  return plan;
}

absl::StatusOr<std::unique_ptr<Buffer>> AllocateNumaPool(std::shared_ptr<const PoolDriver> driver,
                                                         const std::vector<int>& devices, size_t bytes,
                                                         const PoolPlan& plan, const PhaseProgress& progress) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
  if (absl::Status status = CheckFunctions(*driver); !status.ok()) return status;
  for (const int device : devices) {
    if (const absl::StatusOr<int> node = NumaNodeOf(*driver, device); !node.ok()) return node.status();
  }
  const int node = *NumaNodeOf(*driver, devices.front());
  const CUmemAllocationProp properties = Shareable(CU_MEM_LOCATION_TYPE_HOST_NUMA, node);
  size_t granularity = 0;
  const CUresult result =
      driver->get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (result != CUDA_SUCCESS || granularity == 0) {
    return ToStatus(*driver, result == CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : result, "cuMemGetAllocationGranularity",
                    bytes);
  }
  const size_t mapped_bytes = RoundUp(bytes, granularity);
  const size_t chunk_bytes = RoundUp(plan.chunk_bytes, granularity);
  auto buffer = std::make_unique<AllocationBuffer>(driver, bytes, chunk_bytes, mapped_bytes);
  if (absl::Status status = buffer->Reserve(); !status.ok()) return status;
  // The driver fetches and zeroes the pages in cuMemCreate.
  absl::Status status = ForEachChunk(mapped_bytes, chunk_bytes, plan.fault_threads,
                                     Phase(PoolPhase::kFault, bytes, progress), [&](size_t offset, size_t chunk) {
                                       driver->set_device(devices.front());
                                       return buffer->Create(offset, chunk, properties);
                                     });
  if (!status.ok()) return status;
  const std::vector<CUmemAccessDesc> access = AccessOf(node, devices);
  status = ForEachChunk(mapped_bytes, chunk_bytes, plan.pin_threads, Phase(PoolPhase::kPin, bytes, progress),
                        [&](size_t offset, size_t chunk) {
                          driver->set_device(devices.front());
                          return buffer->Map(offset, chunk, access);
                        });
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<std::unique_ptr<Buffer>> RegisterPool(std::shared_ptr<const PoolDriver> driver,
                                                     const std::vector<int>& devices, std::unique_ptr<Buffer> memory,
                                                     const PoolPlan& plan, const PhaseProgress& progress) {
  const size_t bytes = memory->bytes();
  PreferNode(*driver, devices.front(), *memory);
  absl::Status status = Populate(memory->data(), bytes, plan.fault_threads, Phase(PoolPhase::kFault, bytes, progress));
  if (!status.ok()) return status;
  auto buffer = std::make_unique<RegisteredBuffer>(driver, std::move(memory), plan.chunk_bytes);
  status = ForEachChunk(bytes, plan.chunk_bytes, plan.pin_threads, Phase(PoolPhase::kPin, bytes, progress),
                        [&](size_t offset, size_t chunk) {
                          driver->set_device(devices.front());
                          return buffer->Register(offset, chunk);
                        });
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<std::unique_ptr<Buffer>> AllocatePinnedPool(const std::shared_ptr<const PoolDriver>& driver,
                                                           cpu::MemoryBank* bank, const std::vector<int>& devices,
                                                           size_t bytes, const PoolOptions& options) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
  std::string reason;
  const auto progress_of = [&](const char* memory) {
    return [&options, &reason, bytes, memory](PoolPhase phase, size_t done_bytes) {
      return options.progress == nullptr || options.progress({phase, done_bytes, bytes, memory, reason});
    };
  };
  const auto failed = [&reason](const char* memory, const absl::Status& status) {
    absl::StrAppend(&reason, reason.empty() ? "" : "; ", memory, ": ", status.message());
  };
  // Reserved huge pages are not part of what is available; everything else is.
  const absl::Status room = bank->Check(kPoolName, bytes);
  if (room.ok()) {
    constexpr char kMemory[] = "allocations on the GPU's NUMA node";
    absl::StatusOr<std::unique_ptr<Buffer>> pool =
        AllocateNumaPool(driver, devices, bytes, PlanNumaPool(bytes), progress_of(kMemory));
    if (pool.ok() || absl::IsCancelled(pool.status())) return pool;
    failed(kMemory, pool.status());
  } else {
    reason = std::string(room.message());
  }
  if (absl::StatusOr<std::unique_ptr<Buffer>> pages = bank->AllocateHugePages(kPoolName, bytes); pages.ok()) {
    constexpr char kMemory[] = "registered shared memory, 2 MiB pages";
    absl::StatusOr<std::unique_ptr<Buffer>> pool =
        RegisterPool(driver, devices, *std::move(pages), PlanRegisteredPool(bytes), progress_of(kMemory));
    if (pool.ok() || absl::IsCancelled(pool.status())) return pool;
    failed(kMemory, pool.status());
  }
  if (!room.ok()) return room;
  constexpr char kMemory[] = "registered shared memory";
  absl::StatusOr<std::unique_ptr<Buffer>> memory = bank->Allocate(kPoolName, bytes, cpu::MemoryBank::Sharing::kShared);
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::unique_ptr<Buffer>> pool =
      RegisterPool(driver, devices, *std::move(memory), PlanRegisteredPool(bytes), progress_of(kMemory));
  if (pool.ok() || absl::IsCancelled(pool.status())) return pool;
  return absl::Status(pool.status().code(), absl::StrCat("memory for ", kPoolName, ": asked for ", bytes, " bytes; ",
                                                         pool.status().message(), " (before: ", reason, ")"));
}

absl::StatusOr<std::unique_ptr<Buffer>> ImportPool(std::shared_ptr<const PoolDriver> driver,
                                                   const std::vector<int>& devices, const ExportedMemory& exported) {
  if (exported.parts.empty() || exported.parts.front().bytes == 0) {
    return absl::InvalidArgumentError("exported: no part given, at least 1");
  }
  if (exported.kind == ExportedMemory::Kind::kFile) {
    absl::StatusOr<std::unique_ptr<Buffer>> file = ImportedFile::Make(exported.parts.front());
    if (!file.ok()) return file.status();
    // In one piece: the pages are there, and nobody waits for progress.
    const size_t bytes = (*file)->bytes();
    auto buffer = std::make_unique<RegisteredBuffer>(driver, *std::move(file), bytes);
    if (absl::Status status = buffer->Register(0, bytes); !status.ok()) return status;
    return buffer;
  }
  if (absl::Status status = CheckFunctions(*driver); !status.ok()) return status;
  const absl::StatusOr<int> node = NumaNodeOf(*driver, devices.front());
  if (!node.ok()) return node.status();
  // All parts but the last are equally large.
  const size_t chunk_bytes = exported.parts.front().bytes;
  size_t bytes = 0;
  for (const ExportedMemory::Part& part : exported.parts) {
    if (bytes % chunk_bytes != 0 || part.bytes > chunk_bytes || part.bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("exported: a part of ", part.bytes, " bytes among parts of ", chunk_bytes));
    }
    bytes += part.bytes;
  }
  auto buffer = std::make_unique<AllocationBuffer>(driver, bytes, chunk_bytes, bytes);
  if (absl::Status status = buffer->Reserve(); !status.ok()) return status;
  const std::vector<CUmemAccessDesc> access = AccessOf(*node, devices);
  size_t offset = 0;
  for (const ExportedMemory::Part& part : exported.parts) {
    if (absl::Status status = buffer->Import(offset, part.descriptor, part.bytes); !status.ok()) return status;
    if (absl::Status status = buffer->Map(offset, part.bytes, access); !status.ok()) return status;
    offset += part.bytes;
  }
  return buffer;
}

}  // namespace stoker::kernels::cuda
