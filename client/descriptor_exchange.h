// The daemon's descriptor socket, from the client's side. Internal to the library.
//
// Thread safety: functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/arena.h"

namespace stoker::client {

// The descriptor of the arena of the session that has the token. UNAVAILABLE: nobody listens at the socket;
// PERMISSION_DENIED: it may not be opened, or the daemon sent no descriptor; DEADLINE_EXCEEDED.
absl::StatusOr<FileDescriptor> FetchDescriptor(const std::string& path, absl::string_view token, absl::Time deadline);

// The kernel's limit for one message (SCM_MAX_FD).
inline constexpr size_t kMaxDescriptors = 253;

// The `count` descriptors, 1 to kMaxDescriptors, of the pool of the session that has the token. Statuses as above;
// RESOURCE_EXHAUSTED: more than this process may have open; INTERNAL: the daemon sent another number of them.
absl::StatusOr<std::vector<FileDescriptor>> FetchPoolDescriptors(const std::string& path, absl::string_view token,
                                                                 size_t count, absl::Time deadline);

// Hands a descriptor over; the number by which RegisterTensorRequest.offered_descriptor names it. Statuses as above;
// PERMISSION_DENIED has the daemon's reason.
absl::StatusOr<uint64_t> OfferDescriptor(const std::string& path, absl::string_view token, int descriptor,
                                         absl::Time deadline);

}  // namespace stoker::client
