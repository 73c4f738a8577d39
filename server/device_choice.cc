#include "server/device_choice.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stoker::server {
namespace {

constexpr absl::string_view kUuidForm = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
// More than any machine has, and few digits.
constexpr int kMaxOrdinal = 1023;

bool IsUuid(absl::string_view text) {
  return text.size() == kUuidForm.size() && std::equal(text.begin(), text.end(), kUuidForm.begin(), [](char c, char f) {
           return f == 'x' ? absl::ascii_isxdigit(static_cast<unsigned char>(c)) : c == f;
         });
}

bool IsOrdinal(absl::string_view text, int* ordinal) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, ordinal) && *ordinal <= kMaxOrdinal;
}

// One element of a list: what stands behind "cuda", with its colon; false for another device.
bool ConsumeCuda(absl::string_view* element) {
  return absl::ConsumePrefix(element, "cuda") && (element->empty() || (*element)[0] == ':');
}

// The GPUs of one element of a list whose form is right.
std::vector<Gpu> Select(absl::string_view element, const std::vector<Gpu>& gpus) {
  ConsumeCuda(&element);
  if (element == ":all") return gpus;
  int ordinal = 0;
  const bool by_ordinal = element.empty() || IsOrdinal(element.substr(1), &ordinal);
  const auto gpu = std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& g) {
    return by_ordinal ? g.ordinal == ordinal : absl::EqualsIgnoreCase(g.uuid, element.substr(1));
  });
  return gpu == gpus.end() ? std::vector<Gpu>() : std::vector<Gpu>{*gpu};
}

std::string Describe(const std::vector<Gpu>& gpus) {
  return absl::StrJoin(gpus, ", ", [](std::string* out, const Gpu& gpu) {
    absl::StrAppend(out, "cuda:", gpu.ordinal, " (", gpu.uuid, ", ", gpu.name, ")");
  });
}

}  // namespace

absl::Status CheckDeviceForm(std::string_view device) {
  const absl::string_view text(device.data(), device.size());
  if (text == "auto" || text == "cpu") return absl::OkStatus();
  for (absl::string_view element : absl::StrSplit(text, ',')) {
    absl::string_view rest = element;
    int ordinal = 0;
    const bool good = ConsumeCuda(&rest) &&
                      (rest.empty() || rest == ":all" || IsOrdinal(rest.substr(1), &ordinal) || IsUuid(rest.substr(1)));
    if (good) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\"", element == text ? "" : absl::StrCat(": \"", element, "\""),
                     " is not auto, cpu, cuda, cuda:N (N from 0 to ", kMaxOrdinal, "), cuda:", kUuidForm,
                     ", cuda:all, or a list of the cuda forms with commas"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceChoice> ChooseDevices(std::string_view device, const absl::StatusOr<std::vector<Gpu>>& gpus) {
  const absl::string_view text(device.data(), device.size());
  if (absl::Status status = CheckDeviceForm(device); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("device: ", status.message()));
  }
  if (text == "cpu") return DeviceChoice{{}, "device is cpu"};
  const std::string none = gpus.ok() ? "there is no GPU" : std::string(gpus.status().message());
  const bool any = gpus.ok() && !gpus->empty();
  if (text == "auto") {
    if (!any) return DeviceChoice{{}, absl::StrCat("device is auto: ", none)};
    return DeviceChoice{{gpus->front()}, absl::StrCat("device is auto: found ", Describe(*gpus))};
  }
  DeviceChoice choice;
  choice.reason = absl::StrCat("device is ", text);
  if (!any) return absl::NotFoundError(absl::StrCat("device: \"", text, "\" given, but ", none));
  for (absl::string_view element : absl::StrSplit(text, ',')) {
    const std::vector<Gpu> selected = Select(element, *gpus);
    if (selected.empty()) {
      return absl::NotFoundError(
          absl::StrCat("device: \"", element, "\" given, which is not there; the GPUs are ", Describe(*gpus)));
    }
    for (const Gpu& gpu : selected) {
      const bool twice = std::any_of(choice.gpus.begin(), choice.gpus.end(),
                                     [&](const Gpu& other) { return other.ordinal == gpu.ordinal; });
      if (twice) {
        return absl::InvalidArgumentError(absl::StrCat("device: \"", text, "\" names ", gpu.uuid, " twice"));
      }
      choice.gpus.push_back(gpu);
    }
  }
  return choice;
}

}  // namespace stoker::server
