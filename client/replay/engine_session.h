// One rank's session with the daemon: the calls a mock engine makes, timed, and the row bytes that go with them.
//
// Rows and entries take one of two ways, chosen at Open: through the mapped arena ("shared", see row_device.h), or
// inside the messages. So do steps: by calls, or, where there is a plane (step_plane.h), in the arena.
//
// Thread safety: belongs to one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/plane.h"
#include "client/replay/options.h"
#include "client/replay/rank_report.h"
#include "client/replay/row_device.h"
#include "client/replay/row_oracle.h"
#include "client/replay/step_plane.h"
#include "client/replay/trace.h"
#include "client/session.h"

namespace stoker::replay {

// A staging area on a GPU has two pieces of this size: a call moves thousands of rows of all layers, and takes some 5
// ms on a link of 50 GB/s.
inline constexpr uint64_t kGpuStagingPieceBytes = uint64_t{256} << 20;

// What the session needs beside the options.
struct SessionNeeds {
  std::string address;
  std::string name;         // of the session
  uint32_t state_rows = 1;  // sequences open at a time
  uint32_t batch_rows = 1;  // of a step, at most
  uint32_t max_sequence_rows = 1;
  uint32_t pool_blocks = 1;  // blocks of options.block_rows rows
  bool stores = true;        // whether it needs a staging area
  bool steps = true;         // whether it needs a plane
  uint32_t process = 0;      // its number, by which processes take turns on several devices
};

class EngineSession {
 public:
  // Connects, creates the pool where it is absent, attaches. `options` and `report` must outlive the session.
  static absl::StatusOr<std::unique_ptr<EngineSession>> Open(const Options& options, const SessionNeeds& needs,
                                                             RankReport* report);
  EngineSession(const EngineSession&) = delete;
  EngineSession& operator=(const EngineSession&) = delete;

  // OK until the session has ended; then why. Calls give it as well.
  absl::Status status() const { return session_->status(); }

  // RESOURCE_EXHAUSTED: no room now. Waits while another sequence stores a prefix that could be shared.
  absl::StatusOr<OpenSequence> Admit(const Request& request, const std::string& key, uint32_t max_rows);
  // Stores rows [first, end) of the sequence, as the oracle has them, in as many calls as the limits ask for.
  absl::Status Store(const OpenSequence& sequence, uint32_t first, uint32_t end);
  absl::Status Release(absl::Span<const uint64_t> ids);

  // A step is: BeginStep, WriteNewest and Entries for each batch row, Step, CheckStep, HotRows, FinishStep. By calls
  // newest rows are committed before the entries are resolved; on a plane at the end.
  //
  // Sets source, top_k and groups, and makes room for the entries of request->rows().
  void BeginStep(v1::StepRequest* request);
  // Writes the newest row of every layer: into the hot buffers, or, where those are not mapped, into `message`.
  void WriteNewest(const BatchRow& row, v1::StepRow* message);
  // Where the top_k positions of one batch row are written, and kept until after CheckStep.
  absl::Span<int32_t> Entries(v1::StepRequest* request, uint32_t group, size_t row);
  // On a plane the outcomes in the response are derived: what is neither the newest row, missed nor without a hot row
  // counts as hot.
  absl::Status Step(absl::Span<const BatchRow> batch, v1::StepRequest* request, v1::StepResponse* response);
  // Compares the hot rows of all groups with what they must hold, and counts checked and wrong rows in the report. The
  // status is not OK only when a call fails, or the reply has not the form of the request.
  absl::Status CheckStep(absl::Span<const BatchRow> batch, v1::StepRequest* request, const v1::StepResponse& response);
  absl::Span<const int32_t> HotRows(const v1::StepResponse& response, uint32_t group, size_t row) const;
  // What the request commits is stored when this returns.
  absl::Status FinishStep(const v1::StepRequest& request);

  bool shared() const { return rows_ != nullptr; }
  uint32_t region_rows() const { return region_rows_; }

 private:
  EngineSession(const Options& options, RankReport* report)
      : options_(options), report_(report), oracle_(options.row_shape()) {}

  absl::Status CreatePool(const client::Client& client, const SessionNeeds& needs);
  absl::Status Attach(const client::Client& client, const SessionNeeds& needs);
  // Maps the arena where the options want that and it can be had.
  absl::Status MapRows(const v1::AttachRequest& attach, const SessionNeeds& needs);
  // Opens the plane where the options want one and the session can have it.
  absl::Status OpenPlane(client::Plane wanted);
  absl::Status StepOnPlane(absl::Span<const BatchRow> batch, v1::StepRequest* request, v1::StepResponse* response);
  // How the entries of a batch row ended. INTERNAL: more misses than entries.
  absl::Status CountOutcomes(const BatchRow& row, absl::Span<const int32_t> positions,
                             absl::Span<const int32_t> hot_rows, int32_t misses, v1::LookupCounts* counts) const;
  // Of one step, for the report.
  void CountStep(std::chrono::nanoseconds took);
  // Asks for the block table of a sequence that was admitted. It stays: no row is written twice.
  absl::Status LearnBlocks(const OpenSequence& sequence);
  // Gives every position its pool row.
  void NameEntries(absl::Span<const BatchRow> batch, v1::StepRequest* request);
  absl::Status CheckInline(const BatchRow& row, size_t batch_row, uint32_t group, absl::Span<const int32_t> positions,
                           absl::Span<const int32_t> hot_rows);
  absl::Status CheckThroughRead(const BatchRow& row, size_t batch_row, uint32_t group);
  void CountWrong(const BatchRow& row, size_t batch_row, size_t entry, uint32_t layer, int32_t position,
                  int32_t hot_row, absl::Span<const std::byte> bytes);

  const Options& options_;
  RankReport* const report_;
  const RowOracle oracle_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<StepPlane> plane_;       // null: steps are calls
  std::chrono::nanoseconds step_took_{0};  // on it, until its hot rows were there
  std::vector<client::PlaneRow> plane_rows_;
  std::vector<int32_t> commits_;
  std::vector<std::vector<int32_t>> tables_;  // by pool row: blocks of the sequence in each state row
  std::vector<int32_t> positions_;            // by pool row and inline: [group][batch row][top_k]
  size_t batch_rows_ = 0;                     // of positions_
  std::unique_ptr<RowDevice> rows_;           // null: inline
  uint32_t region_rows_ = 0;
  uint32_t newest_row_ = 0;
  uint64_t store_chunk_bytes_ = 0;  // of a message, or of a piece of the staging area
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
  struct ReadEntry {
    int32_t position = 0;
    size_t entry = 0;
  };
  std::vector<ReadEntry> read_entries_;  // of read_request_'s hot rows
};

}  // namespace stoker::replay
