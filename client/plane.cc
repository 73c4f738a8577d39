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

// Whether Attach on the direct plane has ended so that without it the session may be had all the same.
bool CannotBeHad(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status) || absl::IsUnimplemented(status) ||
         absl::IsNotFound(status) || absl::IsResourceExhausted(status);
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
  if (attached.has_direct()) {
    if (wanted == Plane::kAuto || wanted == Plane::kDirect) return Plane::kDirect;
    return absl::FailedPreconditionError(
        absl::StrCat("plane ", PlaneName(wanted), ": the session has attached on the direct plane"));
  }
  if (wanted != Plane::kAuto) {
    if (absl::Status status = CheckOffer(attached, wanted); !status.ok()) return status;
    if (wanted != Plane::kDirect) return wanted;
    return absl::FailedPreconditionError("plane direct: the session has attached without AttachRequest.plane");
  }
  absl::Status none;
  for (const Plane plane : {Plane::kServer, Plane::kRpc}) {
    none = CheckOffer(attached, plane);
    if (none.ok()) return plane;
  }
  return none;
}

absl::StatusOr<std::unique_ptr<Session>> AttachOnPlane(const Client& client, v1::AttachRequest request, Plane wanted,
                                                       const SessionOptions& options) {
  if (wanted == Plane::kAuto || wanted == Plane::kDirect) {
    request.set_plane(v1::PLANE_DIRECT);
    absl::StatusOr<std::unique_ptr<Session>> session = client.Attach(request, options);
    if (wanted == Plane::kDirect || !CannotBeHad(session.status())) return session;
  }
  request.set_plane(v1::PLANE_UNSPECIFIED);
  return client.Attach(request, options);
}

}  // namespace stoker::client
