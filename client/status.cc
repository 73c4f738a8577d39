#include "client/status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/status.h"

namespace stoker::client {
namespace {

constexpr int kLargestCode = static_cast<int>(absl::StatusCode::kUnauthenticated);
// The two enumerations have the same numbers.
static_assert(kLargestCode == static_cast<int>(grpc::StatusCode::UNAUTHENTICATED));
static_assert(static_cast<int>(absl::StatusCode::kUnavailable) == static_cast<int>(grpc::StatusCode::UNAVAILABLE));

absl::Status Make(int code, absl::string_view message) {
  if (code < 0 || code > kLargestCode) {
    return absl::UnknownError(absl::StrCat("status code ", code, " does not exist: ", message));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return Make(status.error_code(), status.error_message());
}

absl::Status FromCall(const grpc::Status& status, bool cancelled_here) {
  if (cancelled_here || status.error_code() != grpc::StatusCode::CANCELLED) return FromGrpc(status);
  return absl::UnavailableError(absl::StrCat("the daemon's side has cut the call off: ", status.error_message()));
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Status FromItem(const google::rpc::Status& item) { return Make(item.code(), item.message()); }

absl::Status FirstError(const google::protobuf::RepeatedPtrField<google::rpc::Status>& items) {
  for (int i = 0; i < items.size(); ++i) {
    if (items[i].code() != 0) return Annotate(FromItem(items[i]), absl::StrCat("items[", i, "]"));
  }
  return absl::OkStatus();
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

}  // namespace stoker::client
