#include "client/status.h"

#include "absl/strings/str_cat.h"
#include "grpcpp/support/status.h"
#include "gtest/gtest.h"

namespace stoker::client {
namespace {

TEST(StatusTest, EveryCodeSurvivesTheWayThere) {
  for (int code = 0; code <= 16; ++code) {
    const grpc::Status wire(static_cast<grpc::StatusCode>(code), code == 0 ? "" : "why");
    const absl::Status status = FromGrpc(wire);
    EXPECT_EQ(static_cast<int>(status.code()), code);
    EXPECT_EQ(status.message(), code == 0 ? "" : "why");
    const grpc::Status back = ToGrpc(status);
    EXPECT_EQ(back.error_code(), wire.error_code());
    EXPECT_EQ(back.error_message(), wire.error_message());
  }
}

TEST(StatusTest, CodesThatDoNotExistAreUnknown) {
  for (const int code : {-1, 17, 1 << 30}) {
    google::rpc::Status item;
    item.set_code(code);
    item.set_message("why");
    EXPECT_TRUE(absl::IsUnknown(FromItem(item))) << code;
    EXPECT_EQ(FromItem(item).message(), absl::StrCat("status code ", code, " does not exist: why"));
  }
}

TEST(StatusTest, FirstErrorNamesTheItem) {
  google::protobuf::RepeatedPtrField<google::rpc::Status> items;
  EXPECT_TRUE(FirstError(items).ok());
  items.Add();
  items.Add();
  EXPECT_TRUE(FirstError(items).ok());
  items.Add()->set_code(5);
  items.rbegin()->set_message("no sequence 7");
  items.Add()->set_code(3);
  EXPECT_EQ(FirstError(items), absl::NotFoundError("items[2]: no sequence 7"));
}

}  // namespace
}  // namespace stoker::client
