// The daemon's descriptor socket, from the client's side. Internal to the library.
//
// Thread safety: functions without state.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/arena.h"

namespace stoker::client {

// The descriptor of the arena of the session that has the token. UNAVAILABLE: nobody listens at the socket;
// PERMISSION_DENIED: it may not be opened, or the daemon sent no descriptor; DEADLINE_EXCEEDED.
absl::StatusOr<FileDescriptor> FetchDescriptor(const std::string& path, absl::string_view token, absl::Time deadline);

// Hands a descriptor over; the number by which RegisterTensorRequest.offered_descriptor names it. Statuses as above;
// PERMISSION_DENIED has the daemon's reason.
absl::StatusOr<uint64_t> OfferDescriptor(const std::string& path, absl::string_view token, int descriptor,
                                         absl::Time deadline);

}  // namespace stoker::client
