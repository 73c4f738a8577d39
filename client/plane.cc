#include "client/plane.h"

#include "absl/strings/str_cat.h"

namespace stoker::client {
namespace {

v1::Plane ToProto(Plane plane) {
  switch (plane) {
    case Plane::kAuto:
      break;
    case Plane::kRpc:
      return v1::PLANE_RPC;
    case Plane::kServer:
      return v1::PLANE_SERVER;
    case Plane::kDirect:
      return v1::PLANE_DIRECT;
  }
  return v1::PLANE_UNSPECIFIED;
}

// OK where the daemon offers it.
absl::Status CheckOffer(const v1::Attached& attached, Plane plane) {
  for (const v1::PlaneStatus& status : attached.planes()) {
    if (status.plane() != ToProto(plane)) continue;
    if (status.available()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("plane ", PlaneName(plane), ": ", status.reason()));
  }
  return absl::FailedPreconditionError(absl::StrCat("plane ", PlaneName(plane), ": the daemon does not know it"));
}

}  // namespace

absl::string_view PlaneName(Plane plane) {
  switch (plane) {
    case Plane::kAuto:
      return "auto";
    case Plane::kRpc:
      return "rpc";
    case Plane::kServer:
      return "server";
    case Plane::kDirect:
      return "direct";
  }
  return "";
}

absl::StatusOr<Plane> ParsePlane(absl::string_view flag, absl::string_view text) {
  for (const Plane plane : {Plane::kAuto, Plane::kRpc, Plane::kServer, Plane::kDirect}) {
    if (text == PlaneName(plane)) return plane;
  }
  return absl::InvalidArgumentError(absl::StrCat(flag, " is \"", text, "\"; it must be auto, rpc, server, direct"));
}

absl::StatusOr<Plane> ChoosePlane(const v1::Attached& attached, Plane wanted) {
  if (wanted != Plane::kAuto) {
    if (absl::Status status = CheckOffer(attached, wanted); !status.ok()) return status;
    return wanted;
  }
  absl::Status none;
  for (const Plane plane : {Plane::kDirect, Plane::kServer, Plane::kRpc}) {
    none = CheckOffer(attached, plane);
    if (none.ok()) return plane;
  }
  return none;
}

}  // namespace stoker::client
