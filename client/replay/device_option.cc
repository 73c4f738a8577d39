#include "client/replay/device_option.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stoker::replay {
namespace {

constexpr absl::string_view kUuidPrefix = "GPU-";

// Whether `element` is one of the cuda forms; what stands behind "cuda:" is in `which`, empty for "cuda" alone.
bool ParseCuda(absl::string_view element, absl::string_view* which) {
  if (element == "cuda") {
    *which = "";
    return true;
  }
  uint32_t number = 0;
  if (!absl::ConsumePrefix(&element, "cuda:")) return false;
  *which = element;
  return element == "all" || absl::StartsWith(element, kUuidPrefix) ||
         (!element.empty() && absl::ascii_isdigit(static_cast<unsigned char>(element[0])) &&
          absl::SimpleAtoi(element, &number));
}

}  // namespace

bool NamesGpu(absl::string_view option) { return option != "auto" && option != "cpu"; }

absl::Status CheckDeviceForm(absl::string_view option) {
  if (!NamesGpu(option)) return absl::OkStatus();
  absl::string_view which;
  for (const absl::string_view element : absl::StrSplit(option, ',')) {
    if (!ParseCuda(element, &which)) {
      return absl::InvalidArgumentError(
          "auto, cpu, cuda, cuda:N, cuda:GPU-UUID, cuda:all, or a list of the cuda forms with commas");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ChooseDevice(absl::string_view option, const std::vector<std::string>& devices,
                                         uint32_t process) {
  std::vector<std::string> gpus, chosen;
  std::copy_if(devices.begin(), devices.end(), std::back_inserter(gpus),
               [](const std::string& device) { return absl::StartsWith(device, kUuidPrefix); });
  const auto add = [&](bool there, const std::string& device) {
    if (there) chosen.push_back(device);
    return there;
  };
  bool found = true;
  if (option == "auto") {
    found = !devices.empty() && add(true, devices.front());
  } else if (option == "cpu") {
    found = add(std::find(devices.begin(), devices.end(), "cpu") != devices.end(), "cpu");
  } else {
    for (const absl::string_view element : absl::StrSplit(option, ',')) {
      absl::string_view which;
      uint32_t number = 0;
      if (!ParseCuda(element, &which)) {
        found = false;
      } else if (which == "all") {
        chosen.insert(chosen.end(), gpus.begin(), gpus.end());
        found &= !gpus.empty();
      } else if (absl::StartsWith(which, kUuidPrefix)) {
        const auto gpu = std::find_if(gpus.begin(), gpus.end(),
                                      [&](const std::string& uuid) { return absl::EqualsIgnoreCase(uuid, which); });
        found &= gpu != gpus.end() && add(true, *gpu);
      } else {
        found &= (which.empty() || absl::SimpleAtoi(which, &number)) && number < gpus.size() && add(true, gpus[number]);
      }
    }
  }
  if (!found || chosen.empty()) {
    return absl::NotFoundError(absl::StrCat("--device is \"", option, "\"; the daemon has ",
                                            devices.empty() ? "none" : absl::StrJoin(devices, ", ")));
  }
  return chosen[process % chosen.size()];
}

}  // namespace stoker::replay
