#include "client/replay/rank_report.h"

#include <cstdio>
#include <string>

namespace stoker::replay {

const char* CallName(Call call) {
  switch (call) {
    case Call::kAdmit:
      return "Admit";
    case Call::kStore:
      return "Store";
    case Call::kStep:
      return "Step";
    case Call::kRead:
      return "Read";
    case Call::kRelease:
      return "Release";
  }
  return "";
}

void RankReport::SetError(const absl::Status& status) {
  if (failed) return;
  failed = true;
  peer_gone = absl::IsCancelled(status);
  std::snprintf(error, sizeof(error), "%s", status.ToString().c_str());
}

void RankReport::SetDevice(const std::string& name) { std::snprintf(device, sizeof(device), "%s", name.c_str()); }

void RankReport::SetPlane(const std::string& name) { std::snprintf(plane, sizeof(plane), "%s", name.c_str()); }

void RankReport::SetWrongRow(const char* text) {
  if (wrong_row[0] == '\0') std::snprintf(wrong_row, sizeof(wrong_row), "%s", text);
}

}  // namespace stoker::replay
