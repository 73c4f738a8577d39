// On a machine without a GPU: what needs none.
#include "kernels/cuda/slabs.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::kernels::cuda {
namespace {

// Who is refused sees that there is memory, and why it cannot be had.
TEST(SlabsTest, ARefusalNamesWhatIsKept) {
  const absl::Status refused = absl::ResourceExhaustedError("4096 bytes of device memory: out of memory");
  EXPECT_EQ(RefusedBesideKept(refused, 0), refused);
  EXPECT_EQ(RefusedBesideKept(absl::InternalError("a fault"), 2097152), absl::InternalError("a fault"));
  const absl::Status status = RefusedBesideKept(refused, 2097152);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("4096 bytes"), testing::HasSubstr("2097152 bytes"),
                             testing::HasSubstr("while a session waits")));
}

}  // namespace
}  // namespace stoker::kernels::cuda
