// One rank's session with the daemon: the calls a mock engine makes, timed, and the row bytes that go with them.
//
// Rows and entries take one of two ways, chosen at Open: through the mapped arena ("shared"), or inside the messages.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/replay/options.h"
#include "client/replay/rank_report.h"
#include "client/replay/row_oracle.h"
#include "client/replay/trace.h"
#include "client/session.h"

namespace stoker::replay {

// What the session needs beside the options.
struct SessionNeeds {
  std::string address;
  std::string name;         // of the session
  uint32_t state_rows = 1;  // sequences open at a time, and batch rows of a step
  uint32_t max_sequence_rows = 1;
  uint32_t pool_blocks = 1;  // blocks of options.block_rows rows
  bool stores = true;        // whether it needs a staging area
};

// A sequence that the session has open.
struct OpenSequence {
  const Request* request = nullptr;
  uint64_t id = 0;
  uint32_t state_row = 0;
  uint32_t matched_rows = 0;
  bool writer = true;
};

class EngineSession {
 public:
  // Connects, creates the pool where it is absent, attaches. `options` and `report` must outlive the session.
  static absl::StatusOr<std::unique_ptr<EngineSession>> Open(const Options& options, const SessionNeeds& needs,
                                                             RankReport* report);
  EngineSession(const EngineSession&) = delete;
  EngineSession& operator=(const EngineSession&) = delete;

  // RESOURCE_EXHAUSTED: no room now. Waits while another sequence stores a prefix that could be shared.
  absl::StatusOr<OpenSequence> Admit(const Request& request, const std::string& key, uint32_t max_rows);
  // Stores rows [first, end) of the sequence, as the oracle has them, in as many calls as the limits ask for.
  absl::Status Store(const OpenSequence& sequence, uint32_t first, uint32_t end);
  absl::Status Release(absl::Span<const uint64_t> ids);
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response);

  // Writes the newest row of every layer: into the hot buffers, or, where those are not mapped, into `row`.
  void WriteNewest(const OpenSequence& sequence, uint32_t position, v1::StepRow* row);

  // Compares hot rows of one group's layers with what they must hold. Entry i names token `positions[i]`, -1 none, and
  // the daemon answered `hot_rows[i]`. `length` is the step's. Counts checked and wrong rows in the report. The status
  // is not OK only when a call fails.
  absl::Status CheckRows(const OpenSequence& sequence, uint32_t group, uint32_t length,
                         absl::Span<const int32_t> positions, absl::Span<const int32_t> hot_rows);

  bool shared() const { return arena_ != nullptr; }
  const client::Arena& arena() const { return *arena_; }
  uint32_t region_rows() const { return region_rows_; }

 private:
  EngineSession(const Options& options, RankReport* report)
      : options_(options), report_(report), oracle_(options.row_shape()) {}

  absl::Status CreatePool(const client::Client& client, const SessionNeeds& needs);
  absl::Status Attach(const client::Client& client, const SessionNeeds& needs);
  absl::Status MapViews();
  bool RowIsRight(uint32_t layer, uint64_t key, uint32_t hot_row) const;
  absl::Status CheckThroughRead(const OpenSequence& sequence, uint32_t group);
  void CountWrong(const OpenSequence& sequence, uint32_t layer, int32_t position, int32_t hot_row);

  const Options& options_;
  RankReport* const report_;
  const RowOracle oracle_;
  std::unique_ptr<client::Session> session_;
  std::shared_ptr<const client::Arena> arena_;  // null: inline
  std::vector<client::HotPartView> hot_parts_;  // [layer][part]
  absl::Span<std::byte> staging_;
  uint32_t region_rows_ = 0;
  uint32_t newest_row_ = 0;
  uint64_t store_chunk_bytes_ = 0;
  uint64_t read_chunk_bytes_ = 0;

  // Reused from call to call.
  v1::AdmitRequest admit_request_;
  v1::AdmitResponse admit_response_;
  v1::StoreRequest store_request_;
  v1::StoreResponse store_response_;
  v1::ReleaseRequest release_request_;
  v1::ReleaseResponse release_response_;
  v1::ReadRequest read_request_;
  v1::ReadResponse read_response_;
  std::vector<int32_t> read_positions_;  // of read_request_'s hot rows
};

}  // namespace stoker::replay
