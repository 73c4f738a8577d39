#include "client/replay/host_rows.h"
#include "tests/replay/row_device_case.h"

namespace stoker::replay {

absl::StatusOr<std::unique_ptr<RowDevice>> MakeRowDevice(const RowDeviceSpec& spec,
                                                         const std::shared_ptr<const client::Arena>& arena) {
  return HostRows::Make(spec, arena);
}

void LeaveArena(const client::Arena&) {}

bool RowsAreCheckedOnDevice() { return false; }

}  // namespace stoker::replay
