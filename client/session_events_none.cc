#include "absl/strings/str_cat.h"
#include "client/session_events.h"

namespace stoker::client {

absl::StatusOr<std::unique_ptr<SessionEvents>> SessionEvents::Make(absl::string_view device) {
  return absl::UnimplementedError(absl::StrCat("exchange_events: the session is on ", device,
                                               ", whose events this build of the client does not know: it was built "
                                               "without CUDA"));
}

}  // namespace stoker::client
