// Which of the driver's functions and flags stream words take, on a driver of the test's own.
#include "kernels/cuda/stream_words.h"

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/order_word.h"

namespace stoker::kernels::cuda {
namespace {

using ::testing::HasSubstr;

struct Call {
  CUdeviceptr address = 0;
  cuuint64_t value = 0;
  unsigned flags = ~0u;
};

class StreamWordsTest : public testing::Test {
 protected:
  StreamWordDriver Driver() {
    StreamWordDriver driver;
    driver.device_get_attribute = [this](int* value, CUdevice_attribute attribute, CUdevice device) {
      EXPECT_EQ(attribute, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
      EXPECT_EQ(device, 3);
      *value = can_;
      return result_;
    };
    const auto called = [this](Call* call) {
      return [this, call](CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
        EXPECT_EQ(stream, kStream);
        *call = {address, value, flags};
        return result_;
      };
    };
    driver.write = called(&write_);
    driver.wait = called(&wait_);
    return driver;
  }

  static inline const cudaStream_t kStream = reinterpret_cast<cudaStream_t>(0x40);
  uint64_t word_ = 0;
  int can_ = 1;
  CUresult result_ = CUDA_SUCCESS;
  Call write_;
  Call wait_;
};

// CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER would let the word come before what it announces.
TEST_F(StreamWordsTest, WritesBehindABarrierAndWaitsForNoLess) {
  const StreamWords words(Driver());
  EXPECT_EQ(words.Write(&word_, 7, kStream), cudaSuccess);
  EXPECT_EQ(write_.address, reinterpret_cast<CUdeviceptr>(&word_));
  EXPECT_EQ(write_.value, 7u);
  EXPECT_EQ(write_.flags, static_cast<unsigned>(CU_STREAM_WRITE_VALUE_DEFAULT));
  EXPECT_EQ(words.Await(&word_, kMaxOrder, kStream), cudaSuccess);
  EXPECT_EQ(wait_.address, reinterpret_cast<CUdeviceptr>(&word_));
  EXPECT_EQ(wait_.value, kMaxOrder);
  EXPECT_EQ(wait_.flags, static_cast<unsigned>(CU_STREAM_WAIT_VALUE_GEQ));
}

TEST_F(StreamWordsTest, TellsTheDriversErrors) {
  const StreamWords words(Driver());
  result_ = CUDA_ERROR_ILLEGAL_ADDRESS;
  EXPECT_EQ(words.Write(&word_, 7, kStream), cudaErrorIllegalAddress);
  EXPECT_EQ(words.Await(&word_, 7, kStream), cudaErrorIllegalAddress);
}

TEST_F(StreamWordsTest, SaysWhatIsMissing) {
  EXPECT_TRUE(StreamWords(Driver()).CheckSupport(3).ok());
  can_ = 0;
  absl::Status status = StreamWords(Driver()).CheckSupport(3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the GPU has no stream memory operations on 64-bit words"));
  result_ = CUDA_ERROR_INVALID_DEVICE;
  status = StreamWords(Driver()).CheckSupport(3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot be asked"));
  const StreamWords without((StreamWordDriver()));
  status = without.CheckSupport(3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the driver has no stream memory operations"));
  EXPECT_EQ(without.Write(&word_, 7, kStream), cudaErrorNotSupported);
  EXPECT_EQ(without.Await(&word_, 7, kStream), cudaErrorNotSupported);
}

}  // namespace
}  // namespace stoker::kernels::cuda
