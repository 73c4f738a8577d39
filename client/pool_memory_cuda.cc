#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "client/pool_memory.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/pool_driver.h"
#include "kernels/cuda/pool_memory.h"
#include "kernels/cuda/wrapped_stream.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;

absl::StatusOr<int> OrdinalOf(absl::string_view device) {
  absl::StatusOr<int> ordinal = kernels::cuda::FindDevice(device);
  if (ordinal.ok()) return ordinal;
  return absl::NotFoundError(absl::StrCat("the session is on ", device, "; ", ordinal.status().message()));
}

// Frees the memory with its GPU current, on whatever thread that is.
class DevicePool final : public kernels::Buffer {
 public:
  DevicePool(int ordinal, std::unique_ptr<kernels::Buffer> memory) : ordinal_(ordinal), memory_(std::move(memory)) {}
  ~DevicePool() override {
    const CurrentDevice current(ordinal_);
    memory_.reset();
  }
  std::byte* data() const override { return memory_->data(); }
  size_t bytes() const override { return memory_->bytes(); }

 private:
  const int ordinal_;
  std::unique_ptr<kernels::Buffer> memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Buffer>> MapPoolForDevice(const kernels::ExportedMemory& exported,
                                                                  absl::string_view device) {
  const absl::StatusOr<int> ordinal = OrdinalOf(device);
  if (!ordinal.ok()) return ordinal.status();
  if (exported.kind == kernels::ExportedMemory::Kind::kFile) {
    if (exported.parts.size() != 1) {
      return absl::InternalError(
          absl::StrCat("direct.part_bytes ", exported.parts.size(), " of them: a file that a GPU is to reach is one"));
    }
    if (absl::Status status = CheckPoolFiles(exported); !status.ok()) return status;
  }
  const CurrentDevice current(*ordinal);
  if (absl::Status status = kernels::cuda::MakeContext(device); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
      kernels::cuda::ImportPool(kernels::cuda::LoadPoolDriver(), {*ordinal}, exported);
  if (!memory.ok()) return memory.status();
  return std::make_unique<DevicePool>(*ordinal, *std::move(memory));
}

absl::StatusOr<DeviceStream> WrapDeviceStream(CUstream_st* stream, absl::string_view device) {
  const absl::StatusOr<int> ordinal = OrdinalOf(device);
  if (!ordinal.ok()) return ordinal.status();
  absl::StatusOr<std::unique_ptr<kernels::Stream>> wrapped = kernels::cuda::WrapStream(stream, *ordinal);
  if (!wrapped.ok()) return wrapped.status();
  DeviceStream result;
  result.stream = *std::move(wrapped);
  result.wait = [stream, ordinal = *ordinal] {
    const CurrentDevice current(ordinal);
    const cudaError_t error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) cudaGetLastError();  // told here: the next launch of this thread must not find it
    return kernels::cuda::ToStatus(error, "the engine's stream");
  };
  return result;
}

}  // namespace stoker::client
