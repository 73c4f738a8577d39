// What --device means: which of the machine's devices the daemon serves on.
//
//   auto          the first GPU where this build and the machine have one, else cpu
//   cpu           the CPU backend
//   cuda          the first GPU
//   cuda:N        the GPU with this ordinal of the CUDA runtime (CUDA_VISIBLE_DEVICES changes them)
//   cuda:GPU-...  the GPU with this UUID, as nvidia-smi -L gives it
//   cuda:all      all GPUs
//   A,B,...       several GPUs: each element is one of the cuda forms
//
// Thread safety: functions without state; any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stoker::server {

// A GPU that this process can use.
struct Gpu {
  int ordinal = 0;
  std::string uuid;
  std::string name;
};

struct DeviceChoice {
  std::vector<Gpu> gpus;  // none: the CPU
  std::string reason;     // for the log: why these
};

// Whether `device` is one of the forms above. INVALID_ARGUMENT says what is wrong with it, and begins with the value.
absl::Status CheckDeviceForm(std::string_view device);

// Chooses from the GPUs of the machine, or from the reason why there are none. NOT_FOUND: a GPU that is asked for is
// not there; INVALID_ARGUMENT: one is named twice, or the form is wrong. The message names field, value and reason.
absl::StatusOr<DeviceChoice> ChooseDevices(std::string_view device, const absl::StatusOr<std::vector<Gpu>>& gpus);

}  // namespace stoker::server
