// The implementation of RowDevice that row_device_test.cc runs on: host_rows_case.cc or gpu_rows_case.cc.
//
// Thread safety: one thread.
#pragma once

#include <memory>

#include "client/replay/row_device.h"

namespace stoker::replay {

// Of an arena that is mapped as host memory; a GPU is made to reach it.
absl::StatusOr<std::unique_ptr<RowDevice>> MakeRowDevice(const RowDeviceSpec& spec,
                                                         const std::shared_ptr<const client::Arena>& arena);
// When the RowDevice has gone and before the arena goes.
void LeaveArena(const client::Arena& arena);
// Whether RowCheck::on_device counts the rows.
bool RowsAreCheckedOnDevice();

}  // namespace stoker::replay
