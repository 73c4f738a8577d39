// A step between its messages and core: used by Step, Resolve and RunSteps.
#pragma once

#include <vector>

#include "absl/functional/any_invocable.h"
#include "server/rpc/call.h"
#include "stoker/v1/residency.pb.h"

namespace stoker::rpc {

// The order of a request that may have one.
template <typename Request>
core::CallOrder OrderOf(const Request& request) {
  const v1::CallOrder& order = request.order();
  return {.given = request.has_order(), .number = order.number(), .wait = order.wait(), .signal = order.signal()};
}

// Reusable for one step after the other. Both messages must live until `done`.
class StepCall {
 public:
  explicit StepCall(const ServiceContext& service) : service_(service) {}

  void Run(core::Session& session, const v1::StepRequest& request, v1::StepResponse* response,
           absl::AnyInvocable<void(absl::Status) &&> done);
  void Run(core::Session& session, const v1::ResolveRequest& request, v1::ResolveResponse* response,
           absl::AnyInvocable<void(absl::Status) &&> done);

 private:
  // Fills request_ and readies a result for every group. RESOURCE_EXHAUSTED: the reply would be too large.
  absl::Status Begin(const google::protobuf::RepeatedPtrField<v1::StepRow>& rows, uint32_t top_k, v1::DataSource source,
                     int groups, bool plan, core::CallOrder order);
  void AddGroup(const v1::StepGroup& group, v1::StepGroupResult* result);
  void FinishGroup(size_t g, v1::StepGroupResult* result) const;
  static void Observe(server::Metrics* metrics, const core::StepResult& result);

  const ServiceContext& service_;
  core::StepRequest request_;
  std::vector<int32_t> counts_;  // [groups][rows][outcomes]
  std::vector<int32_t> plan_;    // Resolve: pool rows, hot rows, counts
};

}  // namespace stoker::rpc
