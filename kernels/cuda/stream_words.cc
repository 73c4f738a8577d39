#include "kernels/cuda/stream_words.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/driver_function.h"

namespace stoker::kernels::cuda {
namespace {

// The runtime's errors have the driver's numbers.
static_assert(static_cast<int>(cudaErrorInvalidValue) == static_cast<int>(CUDA_ERROR_INVALID_VALUE) &&
              static_cast<int>(cudaErrorIllegalAddress) == static_cast<int>(CUDA_ERROR_ILLEGAL_ADDRESS) &&
              static_cast<int>(cudaErrorMpsClientTerminated) == static_cast<int>(CUDA_ERROR_MPS_CLIENT_TERMINATED) &&
              static_cast<int>(cudaErrorUnknown) == static_cast<int>(CUDA_ERROR_UNKNOWN));
cudaError_t ErrorOf(CUresult result) { return static_cast<cudaError_t>(result); }

CUdeviceptr AddressOf(const uint64_t* word) { return reinterpret_cast<CUdeviceptr>(word); }

}  // namespace

StreamWordDriver LoadStreamWordDriver() {
  StreamWordDriver driver;
  FindDriverFunction("cuDeviceGetAttribute", &driver.device_get_attribute);
  FindDriverFunction("cuStreamWriteValue64", &driver.write);
  FindDriverFunction("cuStreamWaitValue64", &driver.wait);
  return driver;
}

absl::Status StreamWords::CheckSupport(int device) const {
  if (driver_.device_get_attribute == nullptr || driver_.write == nullptr || driver_.wait == nullptr) {
    return absl::FailedPreconditionError(
        "the driver has no stream memory operations (cuStreamWriteValue64, cuStreamWaitValue64)");
  }
  int can = 0;
  const CUresult result = driver_.device_get_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device);
  if (result != CUDA_SUCCESS) {
    return absl::FailedPreconditionError(
        absl::StrCat("whether the GPU has stream memory operations on 64-bit words cannot be asked: ",
                     cudaGetErrorString(ErrorOf(result))));
  }
  if (can != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the GPU has no stream memory operations on 64-bit words (CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)");
}

cudaError_t StreamWords::Write(uint64_t* word, uint64_t value, cudaStream_t stream) const {
  if (driver_.write == nullptr) return cudaErrorNotSupported;
  // By default behind a barrier for all memory: without it what the stream wrote before might come later.
  return ErrorOf(driver_.write(stream, AddressOf(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

cudaError_t StreamWords::Await(const uint64_t* word, uint64_t number, cudaStream_t stream) const {
  if (driver_.wait == nullptr) return cudaErrorNotSupported;
  return ErrorOf(driver_.wait(stream, AddressOf(word), number, CU_STREAM_WAIT_VALUE_GEQ));
}

absl::StatusOr<StreamHandle> MakeReleasingStream() {
  int lowest = 0;
  int highest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest);
  if (error != cudaSuccess) return ToStatus(error, "a stream cannot be made");
  return StreamHandle(stream);
}

}  // namespace stoker::kernels::cuda
