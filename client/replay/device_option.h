// What --device means to the mock engine. The private daemon gets the option as it stands, and knows best what it
// names; here are its form, and the devices of a daemon among which the sessions choose.
//
// Thread safety: functions without state; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stoker::replay {

// Whether any GPU is named; "auto" names none.
bool NamesGpu(absl::string_view option);
// INVALID_ARGUMENT: not auto, cpu, or a list with commas of cuda, cuda:N, cuda:GPU-UUID and cuda:all. The message is a
// list of what there is.
absl::Status CheckDeviceForm(absl::string_view option);

// The value of AttachRequest.device for process number `process`: they take turns on the devices that the option names
// among `devices`, GetStatus's. auto: the first device; cuda: the first GPU; cuda:N: the GPU number N of the list.
// NOT_FOUND: one is not there; the message names option, value and what is there.
absl::StatusOr<std::string> ChooseDevice(absl::string_view option, const std::vector<std::string>& devices,
                                         uint32_t process);

}  // namespace stoker::replay
