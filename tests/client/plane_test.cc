#include "client/plane.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Plane kAll[] = {Plane::kAuto, Plane::kRpc, Plane::kServer, Plane::kDirect};

v1::Attached Offering(bool rpc, bool server, bool direct) {
  v1::Attached attached;
  const auto add = [&](v1::Plane plane, bool available) {
    v1::PlaneStatus& status = *attached.add_planes();
    status.set_plane(plane);
    status.set_available(available);
    if (!available) status.set_reason(v1::Plane_Name(plane) + " is off");
  };
  add(v1::PLANE_RPC, rpc);
  add(v1::PLANE_SERVER, server);
  add(v1::PLANE_DIRECT, direct);
  return attached;
}

TEST(PlaneTest, TheBestOneThatIsOffered) {
  // That of a session which has not attached on the direct plane, offered or not.
  for (const bool direct : {false, true}) {
    EXPECT_EQ(*ChoosePlane(Offering(true, true, direct), Plane::kAuto), Plane::kServer);
    EXPECT_EQ(*ChoosePlane(Offering(true, false, direct), Plane::kAuto), Plane::kRpc);
    const absl::Status none = ChoosePlane(Offering(false, false, direct), Plane::kAuto).status();
    EXPECT_EQ(none, absl::FailedPreconditionError("plane rpc: PLANE_RPC is off"));
  }
}

TEST(PlaneTest, TheWantedOneOrTheDaemonsReason) {
  for (const Plane plane : {Plane::kRpc, Plane::kServer}) {
    EXPECT_EQ(*ChoosePlane(Offering(true, true, true), plane), plane);
  }
  EXPECT_EQ(ChoosePlane(Offering(true, false, true), Plane::kServer).status(),
            absl::FailedPreconditionError("plane server: PLANE_SERVER is off"));
  EXPECT_EQ(ChoosePlane(Offering(true, true, false), Plane::kDirect).status(),
            absl::FailedPreconditionError("plane direct: PLANE_DIRECT is off"));
  EXPECT_EQ(ChoosePlane(Offering(true, true, true), Plane::kDirect).status(),
            absl::FailedPreconditionError("plane direct: the session has attached without AttachRequest.plane"));
  // An older daemon does not list it.
  EXPECT_EQ(ChoosePlane(v1::Attached(), Plane::kServer).status(),
            absl::FailedPreconditionError("plane server: the daemon does not know it"));
}

TEST(PlaneTest, ASessionOnTheDirectPlaneHasNoOther) {
  v1::Attached attached = Offering(true, true, true);
  attached.mutable_direct();
  EXPECT_EQ(*ChoosePlane(attached, Plane::kAuto), Plane::kDirect);
  EXPECT_EQ(*ChoosePlane(attached, Plane::kDirect), Plane::kDirect);
  EXPECT_EQ(ChoosePlane(attached, Plane::kRpc).status(),
            absl::FailedPreconditionError("plane rpc: the session has attached on the direct plane"));
  EXPECT_EQ(ChoosePlane(attached, Plane::kServer).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PlaneTest, NamesAreParsed) {
  for (const Plane plane : kAll) EXPECT_EQ(*ParsePlane("--plane", PlaneName(plane)), plane);
  for (const char* const text : {"", "Server", "rpc ", "doorbells"}) {
    const absl::Status status = ParsePlane("--plane", text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(std::string("--plane is \"") + text + "\""), HasSubstr("auto, rpc, server, direct")));
  }
}

}  // namespace
}  // namespace stoker::client
