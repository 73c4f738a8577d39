// Statuses: the one place where the client turns wire errors into absl::Status and back.
//
// Thread safety: free functions without state.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "google/rpc/status.pb.h"

namespace grpc {
class Status;
}

namespace stoker::client {

// Code and message are kept. A code that no version of gRPC defines becomes UNKNOWN.
absl::Status FromGrpc(const grpc::Status& status);
// How a call ended. CANCELLED, where this side has not cancelled it, is what gRPC makes of one that a daemon meets
// while it stops, and becomes UNAVAILABLE.
absl::Status FromCall(const grpc::Status& status, bool cancelled_here);
grpc::Status ToGrpc(const absl::Status& status);

// The status of one item of a batch.
absl::Status FromItem(const google::rpc::Status& item);

// The first item that is not OK, its index put before the message ("items[3]: ..."); OK when there is none.
absl::Status FirstError(const google::protobuf::RepeatedPtrField<google::rpc::Status>& items);

// `status` with `prefix` and ": " before its message; OK stays OK.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

}  // namespace stoker::client
